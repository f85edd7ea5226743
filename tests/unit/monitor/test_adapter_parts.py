"""The parts that adapters are made of: shares of replicas, dtypes, scalars of a flat partition, DTensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from monitor.adapters.base import Piece
from monitor.adapters.module_tensors import ModuleTensors, dtype_name, torch_dtype, whole
from monitor.adapters.optimizer_state import common_scalars, snapshot
from monitor.adapters.pytorch import SMALL, even_slice, share
from store.errors import ModelMismatchError, UnsupportedError
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
def test_shares_cover_every_piece_exactly_once(sizes: list[int], world_size: int) -> None:
    pieces = [whole(f"p{i}", WEIGHTS if i % 3 else BUFFER, torch.arange(size)) for i, size in enumerate(sizes)]
    found: dict[str, list[Piece]] = {f"p{i}": [] for i in range(len(sizes))}
    for rank in range(world_size):
        for piece in share(pieces, rank, world_size):
            found[piece.fragment.fqn].append(piece)
            assert rank == 0 or piece.fragment.slot != BUFFER
    for i, size in enumerate(sizes):
        parts = sorted(found[f"p{i}"], key=lambda piece: piece.fragment.start)
        assert torch.equal(torch.cat([piece.tensor for piece in parts]), torch.arange(size))
        assert all(piece.fragment.start == piece.tensor[0] for piece in parts)
        assert size >= SMALL or len(parts) == 1


@settings(deadline=None)
@given(st.sets(st.integers(0, 30)), st.integers(1, 5))
def test_what_one_rank_has_besides_moves_nobodys_share_of_the_rest(extra: set[int], world_size: int) -> None:
    """An optimizer may leave out, on ranks without a row of a parameter, the state that others keep for it."""
    pieces = [whole(f"p{i}", slot, torch.arange(3)) for i in range(6) for slot in (WEIGHTS, "exp_avg")]
    found: list[Fragment] = []
    for rank in range(world_size):
        mine = list(pieces)
        for i in sorted(extra) if rank == 0 else ():
            mine.insert(i, whole(f"rank 0 alone {i}", "exp_avg", torch.empty(0)))
        found += [piece.fragment for piece in share(mine, rank, world_size)]
    assert sorted(found) == sorted(piece.fragment for piece in pieces)


def test_dtypes_both_ways() -> None:
    for name in ("F32", "BF16", "F16", "F64", "I64", "I32", "I16", "I8", "U8", "BOOL"):
        assert dtype_name(torch_dtype(name)) == name
    with pytest.raises(UnsupportedError, match="complex128"):
        dtype_name(torch.complex128)
    with pytest.raises(UnsupportedError, match="F33"):
        torch_dtype("F33")


def saved(**steps: object) -> dict[str, object]:
    return {"scalars": {fqn: {"step": step} for fqn, step in steps.items()}, "slots": {fqn: ["m"] for fqn in steps}}


def test_scalars_of_a_partition_are_what_its_parameters_have_in_common() -> None:
    state = saved(a=torch.tensor(3.0), b=torch.tensor(3.0))
    assert common_scalars(["a", "b", "unknown"], state) == ({"m"}, {"step": torch.tensor(3.0)})
    assert common_scalars(["unknown"], state) == (set(), {})


def test_parameters_with_different_steps_do_not_fit_one_partition() -> None:
    with pytest.raises(ModelMismatchError, match="a and b share a flat partition"):
        common_scalars(["a", "b"], saved(a=torch.tensor(3.0), b=torch.tensor(4.0)))


def test_factored_moments_do_not_fit_a_partition() -> None:
    with pytest.raises(UnsupportedError, match="shape of its own"):
        common_scalars(["a"], saved(a=torch.zeros(3)))


def test_what_is_not_plain_data_is_refused() -> None:
    assert snapshot({"a": [1, (2.0, None)], "b": torch.ones(2)}, "x")["a"] == [1, (2.0, None)]
    with pytest.raises(UnsupportedError, match="x holds a object"):
        snapshot({"a": [object()]}, "x")


def test_sharded_parameters_are_refused_by_name() -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = nn.Linear(4, 4)
        mesh = init_device_mesh("cpu", (1,))
        module.weight = nn.Parameter(DTensor.from_local(torch.zeros(4, 4), mesh, [Shard(0)]))
        with pytest.raises(UnsupportedError, match="weight is a DTensor"):
            ModuleTensors(module)
    finally:
        dist.destroy_process_group()
