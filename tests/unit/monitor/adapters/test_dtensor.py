"""Shares of DTensors, compared with torch's own arithmetic over meshes of every small size."""

from __future__ import annotations

import math
from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from monitor.adapters.dtensor import Share, share_of
from store.names import Box

meshes = st.lists(st.integers(1, 5), min_size=1, max_size=3)
shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3)


@st.composite
def placed(draw: st.DrawFn) -> tuple[list[int], list[int], list[Placement]]:
    shape, mesh = draw(shapes), draw(meshes)
    every = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    return shape, mesh, [draw(st.sampled_from(every)) for _ in mesh]


def numel(share: Share) -> int:
    return math.prod(share.box.sizes)


@given(placed())
def test_shares_are_where_torch_puts_them(case: tuple[list[int], list[int], list[Placement]]) -> None:
    shape, mesh, placements = case
    for coordinate in product(*(range(size) for size in mesh)):
        local, offset = _compute_local_shape_and_global_offset(shape, mesh, coordinate.__getitem__, placements)
        share = share_of(shape, mesh, coordinate, placements)
        assert share.box.sizes == local
        assert not numel(share) or share.box.offsets == offset


@given(placed())
def test_ranks_together_hold_each_element_as_often_as_the_shares_say(
    case: tuple[list[int], list[int], list[Placement]],
) -> None:
    shape, mesh, placements = case
    shares = [share_of(shape, mesh, coordinate, placements) for coordinate in product(*(range(size) for size in mesh))]
    (count,) = {share.count for share in shares}
    for number in range(count):
        held = torch.zeros(shape, dtype=torch.int64)
        for share in shares:
            if share.number == number:
                inside = zip(share.box.offsets, share.box.sizes, strict=True)
                held[tuple(slice(offset, offset + size) for offset, size in inside)] += 1
        assert bool((held == 1).all())


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5))
def test_fully_shard_over_tensor_parallelism(rows: int, data: int, tensor: int) -> None:
    """The first mesh dimension cuts what the second has cut before."""
    whole = torch.arange(rows)
    for i, j in product(range(data), range(tensor)):
        own = [*torch.chunk(whole, tensor), *[whole[:0]] * tensor][j]
        own = [*torch.chunk(own, data), *[own[:0]] * data][i] if own.numel() else own
        box = share_of((rows,), (data, tensor), (i, j), [_StridedShard(0, split_factor=tensor), Shard(0)]).box
        assert whole[box.offsets[0] :][: box.sizes[0]].tolist() == own.tolist()


def test_shares_computed_by_hand() -> None:
    hybrid = [Replicate(), Shard(0)]
    assert share_of((5, 3), (2, 3), (1, 1), hybrid) == Share(Box((2, 0), (2, 3), (5, 3)), number=1, count=2)
    assert share_of((5, 3), (2, 3), (0, 2), hybrid) == Share(Box((4, 0), (1, 3), (5, 3)), number=0, count=2)
    assert share_of((1,), (4,), (3,), [Shard(0)]) == Share(Box((0,), (0,), (1,)))
    assert share_of((), (4,), (3,), [Replicate()]) == Share(Box((), (), ()), number=3, count=4)
    assert share_of((4, 6), (2, 2), (1, 0), [Shard(1), Shard(0)]) == Share(Box((0, 3), (2, 3), (4, 6)))
