"""Adapt FSDP2 (``fully_shard``) and other models of DTensors: each rank holds a range of rows of every parameter.

With hybrid sharding several ranks hold each range, and all ranks hold plain tensors; those ranks partition the writing.
The parameters are the sharded ones, which the optimizer updates and which are the masters under mixed precision; if the
last forward left gathered ones registered, they are resharded first, as ``state_dict()`` does. Training thread only, on
all ranks; nothing is a collective. Tensor parallelism is not supported.
"""

import math
from collections.abc import Callable, Mapping, Sequence
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
from monitor.adapters.identity import Identity
from monitor.adapters.module_tensors import ModuleTensors, require_materialized, whole_piece, without_wrappers
from monitor.adapters.optimizer_state import AnyOptimizer, kind_of, slots_of
from monitor.adapters.pytorch import PyTorchAdapter, Replica, even_slice
from store.errors import UnstorableError, UnsupportedError
from store.names import Fragment


@dataclass(frozen=True)
class RowRange:
    """Elements [start, start + numel) of a flattened tensor, held by ``count`` ranks; this is number ``number``."""

    start: int
    numel: int
    number: int = 0
    count: int = 1


class RowRanges:
    """Finds this rank's ranges of DTensors, and caches them by mesh, shape and placements."""

    def __init__(self) -> None:
        self._known: dict[tuple[DeviceMesh, torch.Size, tuple[Placement, ...]], RowRange] = {}

    def of(self, tensor: DTensor, name: str) -> tuple[RowRange, torch.Tensor]:
        """Return the range of a tensor and the local memory behind it.

        Raises UnsupportedError for placements other than ``Replicate`` and ``Shard(0)``, for a mesh without some of the
        job's ranks or with ranks that do not ascend, and for a local tensor whose size does not fit."""
        key = (tensor.device_mesh, tensor.shape, tensor.placements)
        rows = self._known.get(key)
        if rows is None:
            rows = self._known[key] = _row_range_of(tensor, name)
        local = local_of(tensor, name)
        if local.numel() != rows.numel:
            raise UnsupportedError(
                f"{name} has {local.numel()} elements on this rank, and {list(tensor.placements)} of shape "
                f"{tuple(tensor.shape)} makes {rows.numel}; build it with fully_shard or distribute_tensor"
            )
        return rows, local


def _row_range_of(tensor: DTensor, name: str) -> RowRange:
    mesh = tensor.device_mesh
    world_size, coordinate = dist.get_world_size(), mesh.get_coordinate()
    if coordinate is None or mesh.size() != world_size:
        raise UnsupportedError(
            f"{name} is on {mesh.size()} of {world_size} ranks (pipeline, expert or tensor parallelism), which is "
            "not supported; give fully_shard a mesh of all ranks, (replicate, shard) for hybrid sharding"
        )
    ranks = mesh.mesh
    # Process groups sort their ranks, whatever the mesh's order is: torch shards by one and gathers by the other.
    if any(not bool((ranks.diff(dim=dimension) > 0).all()) for dimension in range(ranks.ndim)):
        raise UnsupportedError(
            f"{name} is on a mesh whose ranks do not ascend, {ranks.tolist()}, so the place of its rows is unknown; "
            "give fully_shard a mesh of init_device_mesh"
        )
    for dimension, placement in enumerate(tensor.placements):
        _check_placement(placement, mesh.size(dimension), name)
    return row_range(tuple(tensor.shape), tuple(mesh.shape), coordinate, tensor.placements)


def row_range(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> RowRange:
    """Return the range of the rank at ``coordinate`` of a mesh of shape ``mesh``, of a tensor with a global ``shape``.

    Placements are ``Replicate`` or ``Shard(0)``; any in a mesh dimension of one rank. Rows are split as by
    ``torch.chunk``, one mesh dimension after another: ceil(rows / ranks) each, and the last ranks get fewer or none."""
    first, rows, number, count = 0, shape[0] if shape else 1, 0, 1
    for size, place, placement in zip(mesh, coordinate, placements, strict=True):
        if placement.is_replicate():
            number, count = number * size + place, count * size
        elif size > 1:
            start, rows = even_slice(rows, place, size)
            first += start
    row = math.prod(shape[1:])
    return RowRange(first * row, rows * row, number, count)


def local_of(tensor: DTensor, name: str) -> torch.Tensor:
    """Return this rank's memory behind a DTensor, not a copy. Raise UnstorableError unless it is a plain tensor."""
    with torch.no_grad():  # while gradients are recorded, to_local() returns a new view
        local = tensor.to_local()
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise UnstorableError(
            f"{name} is made of {type(local).__name__} (quantized or otherwise packed), which is not supported; train "
            "with plain tensors"
        )
    require_materialized(local, name)
    return local


def _check_placement(placement: Placement, size: int, name: str) -> None:
    known = type(placement) in (Replicate, Shard)
    if known and (placement.is_replicate() or placement.is_shard(0) or size == 1):
        return
    advice = {
        "Shard": "leave shard_placement_fn out of fully_shard, and use no tensor parallelism",
        "_StridedShard": "this is fully_shard over a tensor-parallel model; use fully_shard alone",
        "Partial": "its values are not yet reduced over the ranks; redistribute it first",
        "_MaskPartial": "its values are not yet reduced over the ranks; redistribute it first",
    }.get(type(placement).__name__, "use fully_shard alone")
    raise UnsupportedError(f"{name} is placed as {placement!r}; only Shard(0) and Replicate() are supported: {advice}")


class ShardedModuleTensors(ModuleTensors):
    """Names of sharded parameters, also if the last forward left gathered ones registered."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, without_wrappers)

    def _parameters(self) -> dict[str, nn.Parameter]:
        self.reshard()
        return super()._parameters()

    def _aliases(self) -> dict[str, tuple[str, ...]]:
        self.reshard()
        return super()._aliases()

    def reshard(self) -> None:
        """Register the sharded parameters. Not a collective; the next forward gathers again."""
        for part in self.cache.get("parts", lambda: [p for p in self._module.modules() if isinstance(p, FSDPModule)]):
            part.reshard()

    def _special_kind(self, tensor: torch.Tensor) -> str | None:
        return None if type(tensor) is DTensor else super()._special_kind(tensor)

    def _check_sharding(self) -> None:
        pass  # RowRanges refuses unsupported placements


class Fsdp2Adapter(PyTorchAdapter):
    """Adapter of a sharded module and its optimizer, over all ranks of the job."""

    framework = "fsdp2"
    _known_tensors = frozenset({DTensor})  # their local parts are checked by local_of()

    def __init__(
        self, module: nn.Module, optimizer: AnyOptimizer, wrappers: Sequence[tuple[Any, torch.optim.Optimizer]] = ()
    ) -> None:
        if not dist.is_initialized():
            raise UnsupportedError(
                "the model is sharded, but there is no process group: call monitor.attach before "
                "destroy_process_group()"
            )
        _require_sharded_first(module, optimizer)
        self._ranges = RowRanges()
        super().__init__(module, optimizer, wrappers=wrappers)

    def owned(self) -> list[Piece]:
        self._check_state()
        return super().owned()

    def capture_run_state(self) -> Callable[[], dict[str, Any]]:
        """Capture the run state; ``on_mesh`` lists the scalars that are DTensors, by fqn."""
        captured, on_mesh = super().capture_run_state(), self._keep("on_mesh", self._scalars_on_mesh)
        return lambda: {**captured(), "on_mesh": on_mesh}

    def _scalars_on_mesh(self) -> dict[str, list[str]]:
        on_mesh: dict[str, list[str]] = {}
        for fqn, parameter, _ in self._optimized():
            state = self.optimizer.state.get(parameter, {})
            slots = slots_of(state, parameter)
            keys = sorted(key for key, value in state.items() if isinstance(value, DTensor) and key not in slots)
            if keys:
                on_mesh[fqn] = keys
        return on_mesh

    def _facts(self) -> dict[str, Any]:
        meshes = {
            tuple(parameter.device_mesh.shape)
            for parameter in self._inventory.parameters().values()
            if isinstance(parameter, DTensor)
        }
        return {**super()._facts(), "meshes": [list(mesh) for mesh in sorted(meshes)]}

    def _collect_tensors(self, module: nn.Module) -> ModuleTensors:
        return ShardedModuleTensors(module)

    def _read_identity(self) -> Identity | None:
        assert isinstance(self._inventory, ShardedModuleTensors)
        self._inventory.reshard()
        with torch.no_grad():
            return super()._read_identity()

    @staticmethod
    def _local_memory(tensor: torch.Tensor) -> torch.Tensor:
        local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local

    def _replica(self, fqn: str, slot: str, tensor: torch.Tensor) -> Replica:
        if not isinstance(tensor, DTensor):
            return super()._replica(fqn, slot, tensor)
        rows, memory = self._ranges.of(tensor, f"{fqn} ({slot})")
        local = whole_piece(fqn, slot, memory)
        return Replica(Piece(Fragment(fqn, slot, rows.start, rows.numel), local.tensor), rows.number, rows.count)

    def _scalar(self, key: str, value: Any, fqn: str) -> Any:
        return local_of(value, f"{fqn} ({key})") if isinstance(value, DTensor) else value

    def _restored_scalars(
        self, fqn: str, parameter: nn.Parameter, group: Mapping[str, Any], saved: Mapping[str, Any]
    ) -> dict[str, Any]:
        # State with a shape of its own, beside a DTensor parameter, is a DTensor too, replicated on every rank.
        scalars = super()._restored_scalars(fqn, parameter, group, saved)
        if not isinstance(parameter, DTensor):
            return scalars
        on_mesh = saved.get("on_mesh", {}).get(fqn, ())
        return {
            key: _replicated(value, parameter) if key in on_mesh or _is_shaped_tensor(value) else value
            for key, value in scalars.items()
        }

    def _check_state(self) -> None:
        """Raise UnsupportedError for optimizer state whose position in the whole tensor is unknown."""
        for fqn, parameter, _ in self._optimized():
            if not isinstance(parameter, DTensor):
                continue
            state = self.optimizer.state.get(parameter, {})
            slots = slots_of(state, parameter)
            for key, value in state.items():
                problem = self._sharding_problem(f"{fqn} ({key})", value, slot=key in slots)
                if problem is not None:
                    raise UnsupportedError(
                        f"{kind_of(self.optimizer)} keeps {key!r} of {fqn}, of shape {tuple(value.shape)}, "
                        f"{problem}, so its part of the whole is unknown; use an optimizer with state per element, "
                        "such as AdamW"
                    )

    def _sharding_problem(self, name: str, value: Any, *, slot: bool) -> str | None:
        if not isinstance(value, DTensor):
            return "as a plain tensor beside a sharded parameter" if _is_shaped_tensor(value) else None
        if slot:
            return None  # checked as a piece
        rows, _ = self._ranges.of(value, name)
        return None if rows.numel == value.numel() else "sharded over the ranks"


def _is_shaped_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _replicated(value: Any, parameter: DTensor) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    mesh = parameter.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _require_sharded_first(module: nn.Module, optimizer: AnyOptimizer) -> None:
    """Refuse an optimizer that was created before ``fully_shard`` replaced the parameters."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    live = {id(parameter) for parameter in ShardedModuleTensors(module).parameters().values()}
    if held and not any(id(parameter) in live for parameter in held):
        raise UnsupportedError(
            f"no parameter of {kind_of(optimizer)} is in the model: create the optimizer after fully_shard, "
            "which replaces the parameters"
        )
