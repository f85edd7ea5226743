"""Refuse plans with missing or misplaced elements, and outputs that were not written as planned."""

from __future__ import annotations

import pytest
import torch

from merger.io.blocks import Extent
from merger.io.output_file import Hole
from merger.io.transfer import check_hole, checksums, plan_transfer
from store.errors import DamagedError, MergeError
from store.fragments import FragmentIndex
from tests.support.extents import Spread, all_of, run_transfer, values, wanted


def test_a_plan_with_missing_elements_is_refused(spread: Spread) -> None:
    spread.block([("a", 0, values(10, torch.float32, 1))])
    spread.block([("a", 12, values(10, torch.float32, 1))])
    with pytest.raises(MergeError, match=r"a/fp32: elements 10 to 22 are in no stored fragment"):
        plan_transfer(spread.index, [(0, Hole(0, wanted(22, torch.float32, ("a", 0, 22, 0))))])
    with pytest.raises(MergeError, match=r"nobody/fp32"):
        plan_transfer(spread.index, [(0, Hole(0, wanted(1, torch.float32, ("nobody", 0, 1, 0))))])


@pytest.mark.parametrize(("offset", "stop"), [(4, 10), (0, 11), (40, 10), (-4, 10)])
def test_an_extent_outside_its_block_is_refused(spread: Spread, offset: int, stop: int) -> None:
    """Otherwise the elements beyond the block would silently stay zero."""
    block = spread.block([("a", 0, values(10, torch.float32, 1))])
    index = FragmentIndex([Extent("a", "fp32", 0, stop, "F32", block, offset)])
    with pytest.raises(DamagedError, match=r"a/fp32: elements 0 to \d+ do not lie in block source-0"):
        plan_transfer(index, [(0, Hole(0, wanted(stop, torch.float32, ("a", 0, stop, 0))))])


def test_a_hole_that_was_not_filled_is_refused(spread: Spread) -> None:
    elements = values(10, torch.float32, 1)
    spread.tensor("a", elements)
    content = [[(0, all_of("a", elements))]]
    _, moved = run_transfer(spread, content)
    moved.pieces[0].pop()
    with pytest.raises(MergeError, match=r"0 of 40 bytes"):
        checksums(moved.pieces[0], [Hole(*content[0][0])])


@pytest.mark.parametrize("position", [0, 100, 399])
def test_a_hole_that_reads_back_differently_is_refused(spread: Spread, position: int) -> None:
    elements = values(100, torch.float32, 9)
    spread.tensor("a", elements)
    hole = Hole(11, all_of("a", elements))
    (path,), moved = run_transfer(spread, [[(11, hole.stored)]])
    crc = checksums(moved.pieces[0], [hole])[11]
    check_hole(path, hole, crc)
    data = bytearray(path.read_bytes())
    data[11 + position] ^= 1
    path.write_bytes(data)
    with pytest.raises(MergeError, match=str(path)):
        check_hole(path, hole, crc)
    path.write_bytes(data[:-1])
    with pytest.raises(MergeError, match=str(path)):
        check_hole(path, hole, crc)
