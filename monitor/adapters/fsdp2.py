"""FSDP2 / DTensor.

Where a DTensor's local memory lies in the whole tensor: as one run of rows, or all of it.

Rows are dealt out as ``torch.chunk`` does it, one mesh dimension after another: ceil(rows / ranks) each, the last ranks
get fewer or none. What is cut in another way is refused by name. It does not know parameters, optimizers or slots.
Nothing here is a collective.

FSDP2 (``fully_shard``), and any model of DTensors: each rank holds a run of rows of every parameter.

Hybrid sharding holds each run on several ranks, and what is no DTensor on all of them: those share out the writing.
The parameters are the sharded ones, which the optimizer steps and which are the masters under mixed precision; where
the last forward left gathered ones in their place, those are let go first, as ``state_dict()`` does it. Used from the
training thread only, on all ranks alike. It does not know tensor parallelism, and refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard

from monitor.adapters.base import Piece
from monitor.adapters.module_tensors import ModuleTensors, require_materialized, whole_piece, without_wrappers
from monitor.adapters.optimizer_state import slots_of
from monitor.adapters.pytorch import PyTorchAdapter, Replica, even_slice
from store.errors import UnsupportedError
from store.names import Fragment


@dataclass(frozen=True)
class RowRange:
    """Elements [start, start + numel) of the flattened tensor, which ``count`` ranks hold alike; this rank is number
    ``number`` of them."""

    start: int
    numel: int
    number: int = 0
    count: int = 1


class RowRanges:
    """Finds the runs of this rank, and remembers them: there are few ways in which a model's tensors are cut."""

    def __init__(self) -> None:
        self._known: dict[tuple[DeviceMesh, torch.Size, tuple[Placement, ...]], RowRange] = {}

    def of(self, tensor: DTensor, what: str) -> tuple[RowRange, torch.Tensor]:
        """The run of a tensor, and the memory behind it. what: the tensor's name in errors.

        UnsupportedError for placements other than ``Replicate`` and ``Shard(0)``, for a mesh without some of the job's
        ranks or with ranks that do not ascend, and for a tensor that does not lie in memory as its placements say."""
        key = (tensor.device_mesh, tensor.shape, tensor.placements)
        run = self._known.get(key)
        if run is None:
            run = self._known[key] = _row_range_of(tensor, what)
        local = local_of(tensor, what)
        if local.numel() != run.numel:
            raise UnsupportedError(
                f"{what} has {local.numel()} elements here where {list(tensor.placements)} of shape "
                f"{tuple(tensor.shape)} makes {run.numel}: it was not cut as torch cuts; build it with fully_shard or "
                "distribute_tensor"
            )
        return run, local


def _row_range_of(tensor: DTensor, what: str) -> RowRange:
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
    return row_range(tuple(tensor.shape), tuple(mesh.shape), coordinate, tensor.placements)


def row_range(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> RowRange:
    """The run at a coordinate of a mesh. placements: ``Replicate``, ``Shard(0)``, any where the mesh has one rank."""
    first, rows, number, count = 0, shape[0] if shape else 1, 0, 1
    for size, place, placement in zip(mesh, coordinate, placements, strict=True):
        if placement.is_replicate():
            number, count = number * size + place, count * size
        elif size > 1:
            start, rows = even_slice(rows, place, size)
            first += start
    row = math.prod(shape[1:])
    return RowRange(first * row, rows * row, number, count)


def local_of(tensor: DTensor, what: str) -> torch.Tensor:
    """This rank's memory behind a DTensor, not a copy. UnsupportedError where it is no plain tensor with values."""
    with torch.no_grad():  # where gradients are recorded, to_local() gives a view of its own
        local = tensor.to_local()
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedError(
            f"{what} is made of {type(local).__name__} (quantized or otherwise packed), which is not handled; train "
            "with plain tensors"
        )
    require_materialized(local, what)
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


class ShardedModuleTensors(ModuleTensors):
    """ParameterNames of sharded parameters, whichever form the last forward left registered."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, without_wrappers)

    def _parameters(self) -> dict[str, nn.Parameter]:
        self.reshard()
        return super()._parameters()

    def _aliases(self) -> dict[str, tuple[str, ...]]:
        self.reshard()
        return super()._aliases()

    def reshard(self) -> None:
        """Have the sharded parameters registered. No collective; the next forward gathers anew."""
        for part in self.cache.get("parts", self._parts):
            part.reshard()

    def _parts(self) -> list[FSDPModule]:
        return [part for part in self._module.modules() if isinstance(part, FSDPModule)]

    def _refuse_sharded(self) -> None:
        """What cannot be handled of them is refused where they are looked at."""


class Fsdp2Adapter(PyTorchAdapter):
    """Adapter of a sharded module and its optimizer, over all ranks of the job."""

    framework = "fsdp2"

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, around: Sequence[Any] = ()) -> None:
        if not dist.is_initialized():
            raise UnsupportedError("the model is sharded and there is no process group: was it destroyed already?")
        _require_sharded_first(module, optimizer)
        self._ranges = RowRanges()
        super().__init__(module, optimizer, around=around)

    def owned(self) -> list[Piece]:
        """This rank's runs, and its share of what other ranks hold alike."""
        self._check_state()
        return super().owned()

    def run_state(self) -> dict[str, Any]:
        """See :class:`monitor.adapters.base.Adapter`. ``on_mesh``: the scalars that are DTensors, by fqn."""
        on_mesh: dict[str, list[str]] = {}
        for fqn, parameter, _ in self._optimized():
            state = self.optimizer.state.get(parameter, {})
            slots = slots_of(state, parameter)
            found = sorted(key for key, value in state.items() if isinstance(value, DTensor) and key not in slots)
            if found:
                on_mesh[fqn] = found
        return {**super().run_state(), "on_mesh": on_mesh}

    def layout_facts(self) -> dict[str, Any]:
        meshes = {
            tuple(parameter.device_mesh.shape)
            for parameter in self._inventory.parameters().values()
            if isinstance(parameter, DTensor)
        }
        return {**super().layout_facts(), "meshes": [list(mesh) for mesh in sorted(meshes)]}

    def _collect_tensors(self, module: nn.Module) -> ModuleTensors:
        return ShardedModuleTensors(module)

    def _replica(self, fqn: str, slot: str, tensor: torch.Tensor) -> Replica:
        if not isinstance(tensor, DTensor):
            return super()._replica(fqn, slot, tensor)
        run, local = self._ranges.of(tensor, f"{fqn} ({slot})")
        here = whole_piece(fqn, slot, local)
        return Replica(Piece(Fragment(fqn, slot, run.start, run.numel), here.tensor), run.number, run.count)

    def _scalar(self, key: str, value: Any, fqn: str) -> Any:
        return local_of(value, f"{fqn} ({key})") if isinstance(value, DTensor) else value

    def _restored_scalars(
        self, fqn: str, parameter: nn.Parameter, group: Mapping[str, Any], saved: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Beside a DTensor, state of a shape of its own is one, too, on every rank whole."""
        found = super()._restored_scalars(fqn, parameter, group, saved)
        if not isinstance(parameter, DTensor):
            return found
        on_mesh = saved.get("on_mesh", {}).get(fqn, ())
        return {
            key: _replicated(value, parameter) if key in on_mesh or _is_shaped_tensor(value) else value
            for key, value in found.items()
        }

    def _check_state(self) -> None:
        """UnsupportedError for optimizer state of which this rank has a part that cannot be told."""
        for fqn, parameter, _ in self._optimized():
            if not isinstance(parameter, DTensor):
                continue
            state = self.optimizer.state.get(parameter, {})
            slots = slots_of(state, parameter)
            for key, value in state.items():
                lies = self._sharding_problem(f"{fqn} ({key})", value, slot=key in slots)
                if lies is not None:
                    raise UnsupportedError(
                        f"{type(self.optimizer).__name__} keeps {key!r} of {fqn}, of shape {tuple(value.shape)}, "
                        f"{lies}: which part of the whole that is, is not known; use an optimizer with state per "
                        "element, such as AdamW"
                    )

    def _sharding_problem(self, what: str, value: Any, *, slot: bool) -> str | None:
        """What is wrong with a value in the state of a sharded parameter, if anything is."""
        if not isinstance(value, DTensor):
            return "as a plain tensor beside a sharded parameter" if _is_shaped_tensor(value) else None
        if slot:
            return None  # looked at as a piece
        run, _ = self._ranges.of(value, what)
        return None if run.numel == value.numel() else "cut up over the ranks"


def _is_shaped_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _replicated(value: Any, parameter: DTensor) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    mesh = parameter.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _require_sharded_first(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer made before ``fully_shard`` steps tensors that nobody uses any more."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    live = {id(parameter) for parameter in ShardedModuleTensors(module).parameters().values()}
    if held and not any(id(parameter) in live for parameter in held):
        raise UnsupportedError(
            f"no parameter of {type(optimizer).__name__} is one of the model's: make the optimizer after fully_shard, "
            "which replaces the parameters"
        )
