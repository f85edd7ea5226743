"""Row ranges of DTensors, compared with torch's own arithmetic over meshes of every small size."""

from __future__ import annotations

import math
from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from monitor.adapters.fsdp2 import RowRange, row_range

meshes = st.lists(st.integers(1, 5), min_size=1, max_size=3)
shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3)


@st.composite
def placed(draw: st.DrawFn) -> tuple[list[int], list[int], list[Placement]]:
    """A shape on a mesh; a mesh dimension of one rank may have any placement."""
    shape, mesh = draw(shapes), draw(meshes)
    placements: list[Placement] = [
        draw(st.sampled_from([Replicate(), Shard(0)] + ([Shard(len(shape) - 1)] if size == 1 else []))) for size in mesh
    ]
    return shape, mesh, placements


@given(placed())
def test_ranges_are_where_torch_puts_them(case: tuple[list[int], list[int], list[Placement]]) -> None:
    shape, mesh, placements = case
    for coordinate in product(*(range(size) for size in mesh)):
        local, offset = _compute_local_shape_and_global_offset(shape, mesh, coordinate.__getitem__, placements)
        rows = row_range(shape, mesh, coordinate, placements)
        assert rows.numel == math.prod(local)
        assert not rows.numel or rows.start == offset[0] * math.prod(shape[1:])


@given(placed())
def test_ranks_together_hold_each_element_as_often_as_the_ranges_say(
    case: tuple[list[int], list[int], list[Placement]],
) -> None:
    shape, mesh, placements = case
    ranges = [row_range(shape, mesh, coordinate, placements) for coordinate in product(*(range(size) for size in mesh))]
    (count,) = {rows.count for rows in ranges}
    for number in range(count):
        held = torch.zeros(math.prod(shape), dtype=torch.int64)
        for rows in ranges:
            if rows.number == number:
                held[rows.start : rows.start + rows.numel] += 1
        assert bool((held == 1).all())


def test_ranges_computed_by_hand() -> None:
    hybrid = [Replicate(), Shard(0)]
    assert row_range((5, 3), (2, 3), (1, 1), hybrid) == RowRange(start=6, numel=6, number=1, count=2)
    assert row_range((5, 3), (2, 3), (0, 2), hybrid) == RowRange(start=12, numel=3, number=0, count=2)
    assert row_range((1,), (4,), (3,), [Shard(0)]) == RowRange(start=1, numel=0)
    assert row_range((), (4,), (3,), [Replicate()]) == RowRange(start=0, numel=1, number=3, count=4)
