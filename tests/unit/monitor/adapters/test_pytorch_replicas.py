"""Partition of replicated pieces over ranks: every element is written exactly once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monitor.adapters.base import Piece
from monitor.adapters.module_tensors import SMALL, even_slice, partition_replicated, whole_piece
from store.names import BUFFER, WEIGHTS, Fragment


@settings(deadline=None)
@given(st.integers(0, 100_000), st.integers(1, 70))
def test_even_slices_cover_exactly_once(numel: int, world_size: int) -> None:
    slices = [even_slice(numel, rank, world_size) for rank in range(world_size)]
    end = 0
    for start, count in slices:
        assert count >= 0 and (count == 0 or start == end)
        end += count
    assert end == numel


@settings(deadline=None)
@given(st.lists(st.sampled_from([1, 5, SMALL - 1, SMALL, SMALL + 1, 3 * SMALL + 2]), max_size=8), st.integers(1, 5))
def test_parts_of_replicas_cover_every_piece_exactly_once(sizes: list[int], world_size: int) -> None:
    pieces = [whole_piece(f"p{i}", WEIGHTS if i % 3 else BUFFER, torch.arange(size)) for i, size in enumerate(sizes)]
    found: dict[str, list[Piece]] = {f"p{i}": [] for i in range(len(sizes))}
    for rank in range(world_size):
        for piece in partition_replicated(pieces, rank, world_size):
            found[piece.fragment.fqn].append(piece)
            assert rank == 0 or piece.fragment.slot != BUFFER
    for i, size in enumerate(sizes):
        parts = sorted(found[f"p{i}"], key=lambda piece: piece.fragment.start)
        assert torch.equal(torch.cat([piece.tensor for piece in parts]), torch.arange(size))
        assert all(piece.fragment.start == piece.tensor[0] for piece in parts)
        assert size >= SMALL or len(parts) == 1


@settings(deadline=None)
@given(st.sets(st.integers(0, 30)), st.integers(1, 5))
def test_state_on_one_rank_only_does_not_change_the_writers_of_the_rest(extra: set[int], world_size: int) -> None:
    """An optimizer may leave out, on ranks without a row of a parameter, the state that others keep for it."""
    pieces = [whole_piece(f"p{i}", slot, torch.arange(3)) for i in range(6) for slot in (WEIGHTS, "exp_avg")]
    found: list[Fragment] = []
    for rank in range(world_size):
        local = list(pieces)
        for i in sorted(extra) if rank == 0 else ():
            local.insert(i, whole_piece(f"rank 0 alone {i}", "exp_avg", torch.empty(0)))
        found += [piece.fragment for piece in partition_replicated(local, rank, world_size)]
    assert sorted(found) == sorted(piece.fragment for piece in pieces)
