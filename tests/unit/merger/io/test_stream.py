"""Blocks as streams of fragments: every byte once, in its place, and under the checksum, whatever is skipped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import merger.io.blocks
from merger.io.blocks import Extent, FragmentStream, bytes_to_read, fragment_streams
from merger.tensors import memory_of
from store.errors import DamagedError, StorageError
from store.segment import Item, write_payload
from store.storage.local import LocalFiles
from tests.support.extents import DTYPES, Spread, values


@pytest.fixture
def spread(tmp_path: Path) -> Spread:
    return Spread(tmp_path)


def drawn(found: Iterable[FragmentStream]) -> dict[str, bytes]:
    """Everything, drawn in order, by tensor; fragments of a tensor must come to all of it."""
    pieces: dict[str, dict[int, bytes]] = {}
    for flow in found:
        data = b"".join(bytes(piece) for piece in flow.pieces())
        assert len(data) == flow.nbytes
        assert pieces.setdefault(flow.extent.fqn, {}).setdefault(flow.extent.start, data) is data
    return {fqn: b"".join(data for _, data in sorted(parts.items())) for fqn, parts in pieces.items()}


def expected(spread: Spread) -> dict[str, bytes]:
    return {fqn: bytes(memory_of(tensor)) for fqn, tensor in spread.tensors.items() if tensor.numel()}


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from(DTYPES), st.integers(0, 2)), max_size=6),
    st.integers(0, 9),
    st.sampled_from([1, 7, 16, 64, 1000]),
    st.sampled_from([1, 8, 24, 1000]),
)
def test_any_tensors(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: list[tuple[int, torch.dtype, int]],
    gap: int,
    chunk: int,
    most: int,
) -> None:
    spread = Spread(tmp_path_factory.mktemp("stream"))
    by_block: dict[int, list[tuple[str, int, torch.Tensor]]] = {}
    for number, (numel, dtype, block) in enumerate(tensors):
        spread.tensors[f"t{number}"] = values(numel, dtype, number)
        by_block.setdefault(block, []).append((f"t{number}", 0, spread.tensors[f"t{number}"]))
    for pieces in by_block.values():
        spread.block(pieces, gap=gap, before=gap)
    told: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merger.io.blocks, "READ", chunk)
        patch.setattr(merger.io.blocks, "FRAGMENT_BYTES", most)
        found = fragment_streams(spread.extents, told.append)
        assert drawn(found) == expected(spread)
        assert all(flow.nbytes <= max(most, torch.float64.itemsize) for flow in found)
    assert sum(told) == bytes_to_read(found)
    used = {extent.block for extent in spread.extents if extent.stop > extent.start}
    assert sum(told) == sum(block.nbytes for block in used)


def test_names_that_share_bytes_are_read_each(spread: Spread) -> None:
    elements = values(100, torch.float32, 1)
    block = spread.tensor("a", elements)
    spread.extents.append(Extent("b", "fp32", 0, 50, "F32", block, 100))
    spread.extents.append(Extent("c", "fp32", 0, 50, "F32", block, 200))
    spread.tensors |= {"b": elements[25:75], "c": elements[50:]}
    found = fragment_streams(spread.extents, lambda _: None)
    assert drawn(found) == expected(spread)
    assert bytes_to_read(found) == 3 * block.nbytes


@pytest.mark.parametrize("position", [0, 2, 3, 402, 403, 405])
def test_damage_is_found_wherever_it_is(spread: Spread, position: int) -> None:
    """Also in what no tensor takes: the checksum is over the whole block."""
    spread.tensors["a"] = values(100, torch.float32, 1)
    block = spread.block([("a", 0, spread.tensors["a"]), ("b", 0, values(0, torch.float32, 1))], gap=3)
    assert block.nbytes == 406
    spread.damage(block, position)
    with pytest.raises(DamagedError, match="bytes 0 to 406 of source-0"):
        drawn(fragment_streams(spread.extents, lambda _: None))


def test_a_file_that_ends_early(spread: Spread) -> None:
    block = spread.tensor("a", values(100, torch.float32, 1))
    (spread.root / block.path).write_bytes(bytes(100))
    with pytest.raises(DamagedError, match="ends at byte 100"):
        drawn(fragment_streams(spread.extents, lambda _: None))
    (spread.root / block.path).unlink()
    with pytest.raises(StorageError, match="cannot read"):
        drawn(fragment_streams(spread.extents, lambda _: None))


def test_an_extent_outside_its_block(spread: Spread) -> None:
    spread.tensor("a", values(100, torch.float32, 1))
    for wrong in (replace(spread.extents[0], offset=4), replace(spread.extents[0], offset=-4)):
        with pytest.raises(DamagedError, match="a/fp32: elements 0 to 100 "):
            fragment_streams([wrong], lambda _: None)


def test_out_of_order_is_a_mistake_not_a_mixture(spread: Spread) -> None:
    spread.tensors |= {"a": values(10, torch.float32, 1), "b": values(10, torch.float32, 2)}
    spread.block([("a", 0, spread.tensors["a"]), ("b", 0, spread.tensors["b"])])
    first, second = fragment_streams(spread.extents, lambda _: None)
    drawn([second])
    with pytest.raises(ValueError, match="byte 0 was already read"):
        drawn([first])


class Short:
    nbytes = 10
    exact = True

    def pieces(self) -> list[memoryview]:
        return [memoryview(b"12345")]


def test_a_payload_of_fewer_bytes_than_said_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a has 5 bytes instead of 10"):
        write_payload(LocalFiles(tmp_path), "payload", [Item("a", "U8", (10,), Short())])
    assert list(tmp_path.iterdir()) == []
