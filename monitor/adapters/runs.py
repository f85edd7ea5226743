"""Where a DTensor's local memory lies in the whole tensor: as one run of rows, or all of it.

Rows are dealt out as ``torch.chunk`` does it, one mesh dimension after another: ceil(rows / ranks) each, the last ranks
get fewer or none. What is cut in another way is refused by name. It does not know parameters, optimizers or slots.
Nothing here is a collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from monitor.adapters.inventory import require_values
from monitor.adapters.replicas import even_slice
from store.errors import UnsupportedError


@dataclass(frozen=True)
class Run:
    """Elements [start, start + numel) of the flattened tensor, which ``count`` ranks hold alike; this rank is number
    ``number`` of them."""

    start: int
    numel: int
    number: int = 0
    count: int = 1


class Runs:
    """Finds the runs of this rank, and remembers them: there are few ways in which a model's tensors are cut."""

    def __init__(self) -> None:
        self._known: dict[tuple[DeviceMesh, torch.Size, tuple[Placement, ...]], Run] = {}

    def of(self, tensor: DTensor, what: str) -> tuple[Run, torch.Tensor]:
        """The run of a tensor, and the memory behind it. what: the tensor's name in errors.

        UnsupportedError for placements other than ``Replicate`` and ``Shard(0)``, for a mesh without some of the job's
        ranks or with ranks that do not ascend, and for a tensor that does not lie in memory as its placements say."""
        key = (tensor.device_mesh, tensor.shape, tensor.placements)
        run = self._known.get(key)
        if run is None:
            run = self._known[key] = _run_of(tensor, what)
        local = local_of(tensor, what)
        if local.numel() != run.numel:
            raise UnsupportedError(
                f"{what} has {local.numel()} elements here where {list(tensor.placements)} of shape "
                f"{tuple(tensor.shape)} makes {run.numel}: it was not cut as torch cuts; build it with fully_shard or "
                "distribute_tensor"
            )
        return run, local


def _run_of(tensor: DTensor, what: str) -> Run:
    mesh = tensor.device_mesh
    world_size, coordinate = dist.get_world_size(), mesh.get_coordinate()
    if coordinate is None or mesh.size() != world_size:
        raise UnsupportedError(
            f"{what} lives on {mesh.size()} of {world_size} ranks (pipeline, expert or tensor parallelism), which is "
            "not handled; give fully_shard a mesh of all ranks, (replicate, shard) for hybrid sharding"
        )
    _require_ascending(mesh, what)
    for dimension, placement in enumerate(tensor.placements):
        _require_rows(placement, mesh.size(dimension), what)
    return rows_of(tuple(tensor.shape), tuple(mesh.shape), coordinate, tensor.placements)


def rows_of(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Run:
    """The run at a coordinate of a mesh. placements: ``Replicate``, ``Shard(0)``, any where the mesh has one rank."""
    first, rows, number, count = 0, shape[0] if shape else 1, 0, 1
    for size, place, placement in zip(mesh, coordinate, placements, strict=True):
        if placement.is_replicate():
            number, count = number * size + place, count * size
        elif size > 1:
            start, rows = even_slice(rows, place, size)
            first += start
    row = math.prod(shape[1:])
    return Run(first * row, rows * row, number, count)


def local_of(tensor: DTensor, what: str) -> torch.Tensor:
    """This rank's memory behind a DTensor, not a copy. UnsupportedError where it is no plain tensor with values."""
    with torch.no_grad():  # where gradients are recorded, to_local() gives a view of its own
        local = tensor.to_local()
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedError(
            f"{what} is made of {type(local).__name__} (quantized or otherwise packed), which is not handled; train "
            "with plain tensors"
        )
    require_values(local, what)
    return local


def _require_ascending(mesh: DeviceMesh, what: str) -> None:
    """Process groups have their ranks in ascending order, whatever the mesh's is: torch itself cuts by the one and
    gathers by the other."""
    ranks = mesh.mesh
    if any(not bool((ranks.diff(dim=dimension) > 0).all()) for dimension in range(ranks.ndim)):
        raise UnsupportedError(
            f"{what} lives on a mesh of ranks {ranks.tolist()}, which do not ascend: where its rows lie cannot be "
            "told; give fully_shard a mesh of init_device_mesh"
        )


def _require_rows(placement: Placement, size: int, what: str) -> None:
    known = type(placement) in (Replicate, Shard)
    if known and (placement.is_replicate() or placement.is_shard(0) or size == 1):
        return
    how = {
        "Shard": "leave shard_placement_fn out of fully_shard, and use no tensor parallelism",
        "_StridedShard": "this is fully_shard over a tensor-parallel model; use fully_shard alone",
        "Partial": "it waits to be summed up over ranks; redistribute it first",
        "_MaskPartial": "it waits to be summed up over ranks; redistribute it first",
    }.get(type(placement).__name__, "use fully_shard alone")
    raise UnsupportedError(f"{what} is placed as {placement!r}; only Shard(0) and Replicate() are handled: {how}")
