from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load

from store.errors import DamagedError, ExistsError, StorageError
from store.segment import Item, StagedFragment, check_header, read_piece, write_payload
from store.storage.atomic import is_temporary
from store.storage.local import LocalFiles
from tests.crash.simulated import Fault, SimulatedFiles

ITEMS = st.lists(
    st.builds(
        lambda name, data: Item(name, "U8", (len(data),), data),
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(
            lambda name: name != "__metadata__"
        ),
        st.binary(max_size=200),
    ),
    max_size=6,
    unique_by=lambda item: item.name,
)


@given(ITEMS)
def test_any_safetensors_reader_opens_it(items: list[Item]) -> None:
    files = SimulatedFiles()
    payload = write_payload(files, "p", items)
    data = files.read("p", 1 << 20)
    assert len(data) == payload.payload_bytes
    assert payload.header_bytes % 64 == 0
    assert {name: value.tobytes() for name, value in load(data).items()} == {i.name: bytes(i.data) for i in items}


class Leading:
    """Data that leads back to the item which holds it, as that of a copy whose error is kept does."""

    nbytes, exact, item = 1, True, None

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(b"x")


@pytest.mark.parametrize("kind", ["item", "fragment"])
def test_the_collector_looks_at_what_may_lead_back_to_itself(kind: str) -> None:
    data: Any = Leading()
    data.item = Item("a", "U8", (1,), data)
    if kind == "fragment":
        data.item = StagedFragment("l", "fp32", "w", 0, 1, "U8", "raw", data)
    gone = weakref.ref(data)
    del data
    gc.collect()
    assert gone() is None


@given(ITEMS)
def test_pieces_come_back_with_their_hash_checked(items: list[Item]) -> None:
    files = SimulatedFiles()
    payload = write_payload(files, "p", items)
    check_header(files, "p", payload.header_bytes, payload.header_xxh3_128)
    for item, piece in zip(items, payload.placed, strict=True):
        target = bytearray(piece.nbytes)
        read_piece(files, "p", payload.header_bytes, piece, memoryview(target))
        assert target == item.data


def test_shapes_and_dtypes_as_the_library_sees_them(tmp_path: Path) -> None:
    weights = np.arange(6, dtype="<f4").reshape(2, 3)
    counts = np.array(7, dtype="<i8")
    items = [
        Item("w", "F32", (2, 3), memoryview(weights)),
        Item("n", "I64", (), counts.tobytes()),
        Item("b", "BF16", (2,), b"\x80\x3f\x00\x40"),
        Item("none", "F32", (0, 3), memoryview(np.zeros((0, 3), dtype="<f4"))),
    ]
    files = LocalFiles(tmp_path)
    write_payload(files, "p.safetensors", items)
    with safe_open(tmp_path / "p.safetensors", framework="np") as found:
        assert found.get_tensor("w").tolist() == weights.tolist()
        assert found.get_tensor("n").item() == 7
        assert found.get_slice("b").get_dtype() == "BF16"
        assert found.get_slice("none").get_shape() == [0, 3]


@dataclass
class Shrinking:
    """Comes to fewer bytes than were announced."""

    data: bytes
    nbytes: int = 1000
    exact: bool = False

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(self.data[:2])
        yield memoryview(self.data[2:])


def test_what_is_packed_is_bytes_to_the_library_whatever_dtype_it_had() -> None:
    files = SimulatedFiles()
    items = [Item("w", "F32", (250,), Shrinking(b"12345")), Item("n", "I64", (1,), bytes(8))]
    payload = write_payload(files, "p", [*items, Item("none", "BF16", (0,), Shrinking(b""))])
    found = load(files.read("p", 1 << 20))
    assert (found["w"].tobytes(), found["w"].dtype, found["n"].tolist()) == (b"12345", np.uint8, [0])
    assert found["none"].shape == (0,)
    check_header(files, "p", payload.header_bytes, payload.header_xxh3_128)
    assert payload.payload_bytes == payload.header_bytes + 13 == files.size("p")


def test_more_than_one_chunk_is_hashed_as_one() -> None:
    data = np.frombuffer(hashlib.shake_128(b"big").digest((1 << 22) + 12345), dtype=np.uint8)
    files = SimulatedFiles()
    payload = write_payload(files, "p", [Item("a", "U8", data.shape, memoryview(data))])
    target = bytearray(len(data))
    read_piece(files, "p", payload.header_bytes, payload.placed[0], memoryview(target))
    assert target == data.tobytes()


def test_every_changed_byte_is_found() -> None:
    files = SimulatedFiles()
    payload = write_payload(files, "p", [Item("a", "U8", (40,), bytes(range(40))), Item("b", "U8", (3,), b"xyz")])
    whole = files.read("p", 1 << 20)
    for at in range(len(whole)):
        damaged = SimulatedFiles()
        file = damaged.create("p")
        file.write(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        found = 0
        try:
            check_header(damaged, "p", payload.header_bytes, payload.header_xxh3_128)
            for piece in payload.placed:
                read_piece(damaged, "p", payload.header_bytes, piece, memoryview(bytearray(piece.nbytes)))
        except DamagedError:
            found += 1
        assert found == 1, at


def test_a_piece_needs_room_of_its_size() -> None:
    files = SimulatedFiles()
    payload = write_payload(files, "p", [Item("a", "U8", (4,), b"1234")])
    for room in (3, 5):
        with pytest.raises(DamagedError, match="bytes instead of"):
            read_piece(files, "p", payload.header_bytes, payload.placed[0], memoryview(bytearray(room)))


def test_two_items_of_one_name_are_refused_before_anything_is_written() -> None:
    files = SimulatedFiles()
    with pytest.raises(ValueError, match="same name"):
        write_payload(files, "p", [Item("a", "U8", (1,), b"1"), Item("a", "U8", (1,), b"2")])
    assert files.list_dir("") == []


def test_what_is_there_is_never_replaced() -> None:
    files = SimulatedFiles()
    write_payload(files, "p", [Item("a", "U8", (1,), b"1")])
    before = files.read("p", 1 << 20)
    with pytest.raises(ExistsError):
        write_payload(files, "p", [Item("a", "U8", (1,), b"2")])
    assert files.list_dir("") == ["p"]
    assert files.read("p", 1 << 20) == before


@pytest.mark.parametrize("verb", ["create", "write", "sync", "link"])
@pytest.mark.parametrize("after", [False, True])
def test_a_failed_write_leaves_no_half_file_under_the_name(verb: str, after: bool) -> None:
    files = SimulatedFiles(faults=[Fault(verb, after=after)])
    with pytest.raises(StorageError):
        write_payload(files, "p", [Item("a", "U8", (1,), b"1")])
    left = files.list_dir("")
    assert [name for name in left if not is_temporary(name)] in ([], ["p"])
    if "p" in left:  # it got its name before the error
        assert (verb, after) in (("link", True), ("sync_dir", False), ("sync_dir", True))
        assert load(files.read("p", 1 << 20))["a"].tolist() == [49]


@pytest.mark.parametrize("nth", [1, 2])
def test_a_failed_fsync_is_never_tried_again(nth: int) -> None:
    files = SimulatedFiles(faults=[Fault("sync")])
    with pytest.raises(StorageError):
        write_payload(files, "p", [Item("a", "U8", (1,), b"1")])
    assert [op.verb for op in files.log if op.verb in ("sync", "link")] == []
    write_payload(files, "p", [Item("a", "U8", (1,), b"1")])  # a new file, under a new temporary name
    assert files.list_dir("") == ["p"]
