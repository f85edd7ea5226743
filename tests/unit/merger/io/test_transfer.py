"""Transfer stored fragments into output files: every byte at its place, cast to the planned dtype, with checksums."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import merger.io.blocks
import merger.io.output_file
from merger.checkpoint import PlannedTensor
from merger.io.blocks import READ
from merger.io.transfer import TransferPlan, TransferResult, transfer
from tests.support.extents import DTYPES, Spread, all_of, require_transferred, run_transfer, values, wanted


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_cast_between_all_dtypes_in_small_chunks(
    spread: Spread, source: torch.dtype, target: torch.dtype, workers: int
) -> None:
    elements = values(1000, source, 1)
    spread.tensor("a", elements, before=13)
    content = [[(5, all_of("a", elements, target))]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merger.io.blocks, "READ", 96)
        require_transferred(spread, content, *run_transfer(spread, content, workers=workers))


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("gap", [1, 2, 3, 5])
def test_an_element_may_lie_in_two_chunks(spread: Spread, gap: int, target: torch.dtype) -> None:
    """An offset in a block need not be a multiple of the dtype's size, so a chunk may end within an element."""
    one, two = values(100, torch.float32, 1), values(77, torch.float32, 2)
    spread.tensors |= {"a": one, "b": two}
    spread.block([("a", 0, one), ("b", 0, two)], gap=gap)
    content = [[(0, all_of("a", one, target)), (1000, all_of("b", two, target))]]
    for chunk in (16, 20, 64):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(merger.io.blocks, "READ", chunk)
            require_transferred(spread, content, *run_transfer(spread, content))


def test_a_block_of_several_chunks_at_an_unaligned_offset(spread: Spread) -> None:
    elements = values(READ // 4 * 2 + 12345, torch.float32, 3)
    spread.tensor("a", elements, before=3)
    content = [
        [(7, all_of("a", elements))],
        [(64, all_of("a", elements, torch.bfloat16))],
        [(1, wanted(READ // 4 + 2, torch.float32, ("a", READ // 8 + 1, READ // 4, 1)))],
    ]
    reported: list[int] = []
    paths, moved = run_transfer(spread, content, reported=reported)
    require_transferred(spread, content, paths, moved)
    assert reported == [READ, READ, 4 * elements.numel() - 2 * READ]


@pytest.mark.parametrize("workers", [1, 4])
def test_more_output_files_than_may_be_open(spread: Spread, workers: int) -> None:
    numel = 3 * merger.io.output_file.OPEN_FILES
    elements = values(2 * numel, torch.float32, 4)
    spread.tensor("a", elements)
    content = [[(0, wanted(2, torch.float32, ("a", 2 * i, 2, 0)))] for i in range(numel)]
    content[::7] = [[(3, all_of("a", elements))] for _ in content[::7]]
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    require_transferred(spread, content, *run_transfer(spread, content, workers=workers))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_one_source_tensor_in_several_planned_tensors(spread: Spread) -> None:
    elements = values(50, torch.float32, 5)
    spread.tensor("a", elements)
    content = [
        [
            (0, all_of("a", elements)),
            (200, wanted(60, torch.float64, ("a", 10, 20, 3), ("a", 10, 20, 30))),
            (1000, wanted(1, torch.bfloat16, ("a", 49, 1, 0))),
        ],
        [(0, all_of("a", elements))],
    ]
    require_transferred(spread, content, *run_transfer(spread, content))


@st.composite
def layouts(
    draw: st.DrawFn,
) -> tuple[list[tuple[int, torch.dtype, list[int]]], list[list[PlannedTensor]], int, int, int]:
    """(tensors with their dtype and where they are cut, planned tensors by file, gap, chunk, workers)."""
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        numel = draw(st.integers(1, 70))
        cuts = sorted(draw(st.sets(st.integers(1, numel), max_size=4)) | {numel})
        tensors.append((numel, draw(st.sampled_from(DTYPES)), cuts))
    files: list[list[PlannedTensor]] = []
    for _ in range(draw(st.integers(1, 4))):
        content = []
        for _ in range(draw(st.integers(0, 3))):
            position, pieces = draw(st.integers(0, 3)), []
            for _ in range(draw(st.integers(0, 4))):
                number = draw(st.integers(0, len(tensors) - 1))
                start = draw(st.integers(0, tensors[number][0]))
                count = draw(st.integers(0, tensors[number][0] - start))
                pieces.append((f"t{number}", start, count, position))
                position += count + draw(st.integers(0, 3))
            content.append(wanted(position, draw(st.sampled_from(DTYPES)), *pieces))
        files.append(content)
    return (
        tensors,
        files,
        draw(st.integers(0, 9)),
        draw(st.sampled_from([1, 8, 16, 24, 37, 1000])),
        draw(st.sampled_from([1, 4])),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layouts())
def test_random_layouts(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[list[tuple[int, torch.dtype, list[int]]], list[list[PlannedTensor]], int, int, int],
) -> None:
    tensors, files, gap, chunk, workers = case
    spread = Spread(tmp_path_factory.mktemp("any"))
    fragments = []
    for number, (numel, dtype, cuts) in enumerate(tensors):
        elements = spread.tensors[f"t{number}"] = values(numel, dtype, number)
        fragments += [
            (f"t{number}", start, elements[start:stop]) for start, stop in zip([0, *cuts[:-1]], cuts, strict=True)
        ]
    # Every second fragment shares a block with those of other tensors and dtypes.
    spread.block(fragments[::2], gap=gap, crc=True)
    for fragment in fragments[1::2]:
        spread.block([fragment], gap=gap, before=gap)
    content = []
    for planned in files:
        offset, places = gap, []
        for stored in planned:
            places.append((offset, stored))
            offset += stored.nbytes + gap
        content.append(places)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merger.io.blocks, "READ", chunk)
        patch.setattr(merger.io.output_file, "OPEN_FILES", 2)
        reported: list[int] = []
        paths, moved = run_transfer(spread, content, workers=workers, reported=reported)
    # Planned tensors without elements share their place with the next one, and have no checksum of their own.
    solid = [[place for place in places if place[1].nbytes] for places in content]
    require_transferred(spread, solid, paths, moved)
    for path, places in zip(paths, content, strict=True):
        inside = {i for offset, stored in places for i in range(offset, offset + stored.nbytes)}
        assert not any(byte for i, byte in enumerate(path.read_bytes()) if i not in inside)


def test_an_empty_plan_transfers_nothing(spread: Spread) -> None:
    assert transfer(TransferPlan({}), [], 4, lambda _: None) == TransferResult({}, {}, {})
