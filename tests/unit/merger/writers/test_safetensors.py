"""safetensors files made with holes, and small files: what safetensors itself reads, and damage of any byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from merger.checkpoint import PlannedTensor
from merger.io.output_file import Hole, VerbatimFile
from merger.io.transfer import check_hole
from merger.tensors import memory_of
from merger.writers.safetensors import SafetensorsFile
from store.errors import MergeError, UnsupportedError
from tests.support.extents import DTYPES

LARGE = 1 << 40


def finished(file: SafetensorsFile, path: Path) -> tuple[dict[str, torch.Tensor], list[tuple[Hole, int]]]:
    """Make and fill. Returns what was put in by name, and the holes with their checksums."""
    import zlib

    holes = {id(hole.stored): hole for hole in file.make(path)}
    filled, crcs = {}, []
    with path.open("r+b") as out:
        for number, (name, stored) in enumerate(file.tensors_by_name.items()):
            values = torch.randint(0, 2, stored.shape, generator=torch.Generator().manual_seed(number))
            filled[name] = values.to(stored.dtype)
            if id(stored) in holes:
                data = bytes(memory_of(filled[name]))
                out.seek(holes[id(stored)].offset)
                out.write(data)
                crcs.append((holes[id(stored)], zlib.crc32(data)))
    file.seal(path, {hole.offset: crc for hole, crc in crcs})
    return filled, crcs


def require_right(tensors: Mapping[str, PlannedTensor], metadata: Mapping[str, str], path: Path) -> None:
    file = SafetensorsFile(tensors, metadata)
    filled, _ = finished(file, path)
    file.check(path)
    assert path.stat().st_size == file.nbytes
    found = load_file(path)
    assert found.keys() == filled.keys()
    for name, tensor in filled.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
    with safetensors.safe_open(path, "pt") as opened:
        assert (opened.metadata() or {}) == metadata


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=9).filter(lambda name: name != "__metadata__"),
        st.builds(
            PlannedTensor, st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(DTYPES), st.just(())
        ),
        max_size=6,
    ),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_any_tensors(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, PlannedTensor], metadata: dict[str, str]
) -> None:
    require_right(tensors, metadata, tmp_path_factory.mktemp("any") / "x.safetensors")


def test_tensors_are_where_their_dtype_wants_them(tmp_path: Path) -> None:
    """Readers that map a file want each tensor at a multiple of its element's size."""
    tensors = {
        "flag": PlannedTensor((3,), torch.bool, ()),
        "half": PlannedTensor((5,), torch.bfloat16, ()),
        "number": PlannedTensor((2,), torch.int64, ()),
        "full": PlannedTensor((7,), torch.float32, ()),
    }
    file = SafetensorsFile(tensors, {"format": "pt"})
    holes = file.make(tmp_path / "x")
    assert all(hole.offset % hole.stored.dtype.itemsize == 0 for hole in holes)
    require_right(tensors, {"format": "pt"}, tmp_path / "y")


def test_a_name_that_the_format_keeps_for_itself(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="__metadata__"):
        SafetensorsFile({"__metadata__": PlannedTensor((3,), torch.float32, ())}, {}).make(tmp_path / "x")


def test_a_dtype_that_the_format_has_not() -> None:
    with pytest.raises(UnsupportedError, match="complex128"):
        _ = SafetensorsFile({"a": PlannedTensor((3,), torch.complex128, ())}, {}).header


def test_a_file_of_any_size_is_made_at_once(tmp_path: Path) -> None:
    file = SafetensorsFile(
        {"a": PlannedTensor((LARGE,), torch.uint8, ()), "b": PlannedTensor((1,), torch.uint8, ())}, {}
    )
    first, last = file.make(tmp_path / "x")
    assert (tmp_path / "x").stat().st_size == file.nbytes == last.offset + 1
    assert last.offset == first.offset + LARGE
    size = int.from_bytes(file.header[:8], "little")
    assert json.loads(file.header[8:])["b"]["data_offsets"] == [LARGE, LARGE + 1]
    assert size == len(file.header) - 8


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_damage_of_any_byte_is_found(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "x"
    file = SafetensorsFile(
        {"a": PlannedTensor((3,), torch.bool, ()), "b": PlannedTensor((5,), torch.float32, ())}, {"key": "value"}
    )
    _, holes = finished(file, path)
    data = path.read_bytes()

    def sound() -> bool:
        try:
            file.check(path)
            for hole, crc in holes:
                check_hole(path, hole, crc)
        except MergeError:
            return False
        return True

    assert sound()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :])
        assert not sound(), position
        path.write_bytes(data[:position])
        assert not sound(), position
    path.write_bytes(data + b"\0")
    assert not sound()


@pytest.mark.parametrize("container", [SafetensorsFile({}, {}), VerbatimFile(b"data")], ids=["safetensors", "verbatim"])
def test_a_name_that_is_taken(tmp_path: Path, container: SafetensorsFile | VerbatimFile) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        container.make(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "mine"


@given(st.binary(max_size=50))
def test_verbatim(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("verbatim") / "x"
    file = VerbatimFile(data)
    assert file.make(path) == () and file.tensors() == () and file.nbytes == len(data)
    file.seal(path, {})
    file.check(path)
    assert path.read_bytes() == data
    for changed in (data + b"\0", data[:-1], bytes(byte ^ 1 for byte in data)):
        if changed != data:
            path.write_bytes(changed)
            with pytest.raises(MergeError, match="reads back different bytes than were written"):
                file.check(path)
