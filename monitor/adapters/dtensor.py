"""Adapt models of DTensors: FSDP2 (``fully_shard``), hybrid sharding, tensor and expert parallelism, mixed or not.

Each rank holds a box of every DTensor; plain tensors are on all ranks. Ranks that hold the same each write a part of
it. Parameters are the sharded ones, which the optimizer updates and which are the masters under mixed precision; if the
last forward left gathered ones registered, they are resharded first, as ``state_dict()`` does. Training thread only, on
all ranks; the only collective is :meth:`PyTorchAdapter.agree`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from monitor.adapters import module_tensors
from monitor.adapters.base import Home, Piece, Values
from monitor.adapters.identity import Identity
from monitor.adapters.optimizer_state import AnyOptimizer, kind_of, slots_of
from monitor.adapters.pytorch import PyTorchAdapter
from store.errors import UnstorableError, UnsupportedError
from store.names import Box, Fragment, group_by_key


@dataclass(frozen=True)
class Share:
    """The part of a tensor that a rank holds: replica ``number`` of ``count`` equal ones in the tensor's mesh."""

    box: Box
    number: int = 0
    count: int = 1


def share_of(shape: Sequence[int], mesh: Sequence[int], place: Sequence[int], placements: Sequence[Placement]) -> Share:
    """Return the share of the rank at ``place`` of a mesh of shape ``mesh``, of a tensor with a global ``shape``.

    Each mesh dimension in turn splits a dimension of the tensor as ``torch.chunk`` does: ceil(rows / ranks) each, and
    the last ranks get fewer or none. ``_StridedShard`` (``fully_shard`` over tensor parallelism) is applied after later
    mesh dimensions that split the same tensor dimension: it splits each of their ``split_factor`` chunks. Raises
    ValueError if those make another number of chunks."""
    offsets, sizes, number, count = [0] * len(shape), list(shape), 0, 1
    split: dict[int, list[int]] = {}  # tensor dimension to the mesh dimensions that split it
    for index, placement in enumerate(placements):
        if placement.is_replicate():
            number, count = number * mesh[index] + place[index], count * mesh[index]
        elif mesh[index] > 1:
            split.setdefault(placement.dim, []).append(index)  # type: ignore[attr-defined]
    for dim, indices in split.items():
        strided = [index for index in indices if hasattr(placements[index], "split_factor")]
        order = [index for index in indices if index not in strided]
        for index in reversed(strided):
            order.append(index)
            if placements[index].split_factor != prod(mesh[one] for one in order if one > index):  # type: ignore[attr-defined]
                raise ValueError(f"{list(placements)}: its rows do not follow each other")
        for index in order:
            start, sizes[dim] = module_tensors.even_slice(sizes[dim], place[index], mesh[index])
            offsets[dim] += start
    return Share(Box(tuple(offsets if all(sizes) else [0] * len(shape)), tuple(sizes), tuple(shape)), number, count)


def share_in_memory(tensor: DTensor, name: str) -> tuple[Share, torch.Tensor]:
    """Return this rank's share of a tensor and the local memory behind it.

    Raises UnsupportedError for placements other than ``Replicate``, ``Shard`` and ``_StridedShard``, and for a local
    tensor whose shape does not fit."""
    order = getattr(tensor._spec, "shard_order", None) or ()
    if any(list(one.mesh_dims) != sorted(one.mesh_dims) for one in order):
        raise UnsupportedError(f"{name} is sharded by {order}, not from the first mesh dimension on: redistribute it")
    try:
        share = _share(tensor.device_mesh, dist.get_rank(), tuple(tensor.shape), tensor.placements)
    except ValueError as error:
        raise UnsupportedError(f"{name} is placed as {error}") from error
    local = local_of(tensor, name)
    if local.numel() != share.box.numel or (local.numel() and tuple(local.shape) != share.box.sizes):
        raise UnsupportedError(
            f"{name} has {local.numel()} elements on this rank, and {list(tensor.placements)} of shape "
            f"{tuple(tensor.shape)} makes {share.box.numel}; build it with fully_shard or distribute_tensor"
        )
    return share, local


@lru_cache(1 << 12)
def _share(mesh: DeviceMesh, _rank: int, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> Share:
    """Return the share of this rank. Raises ValueError for placements that are not known."""
    for size, placement in zip(mesh.shape, placements, strict=True):
        if size > 1 and not (placement.is_replicate() or type(placement).__name__ in _SHARDS):
            raise ValueError(
                f"{placement!r}, which is neither Shard nor Replicate: its values are not yet reduced over the ranks, "
                "or of a form that is not known; redistribute it first"
            )
    if mesh.get_coordinate() is None:  # this rank is not in the mesh
        return Share(Box((0,) * len(shape), (0,) * len(shape), shape))
    # By the order of the ranks in each dimension's process group: fully_shard splits by it, and full_tensor() gathers
    # by it. It is the mesh's order unless that descends.
    coordinate = [dist.get_rank(mesh.get_group(dim)) if size > 1 else 0 for dim, size in enumerate(mesh.shape)]
    return share_of(shape, tuple(mesh.shape), coordinate, placements)


_SHARDS = frozenset({"Shard", "_StridedShard"})


def local_of(tensor: DTensor, name: str) -> torch.Tensor:
    """Return this rank's memory behind a DTensor, not a copy. Raise UnstorableError unless it is a plain tensor."""
    with torch.no_grad():  # while gradients are recorded, to_local() returns a new view
        local = tensor.to_local()
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise UnstorableError(
            f"{name} is made of {type(local).__name__} (quantized or otherwise packed), which is not supported; train "
            "with plain tensors"
        )
    module_tensors.require_materialized(local, name)
    return local


def sharded_tensors(module: nn.Module) -> module_tensors.ModuleTensors:
    """Return the sharded parameters. Gathered ones that the last forward left registered are resharded first."""

    def reshard() -> None:  # not a collective
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    plain = module_tensors.without_wrappers
    return module_tensors.ModuleTensors(module, plain, known=frozenset({DTensor}), before=reshard)


class DTensorAdapter(PyTorchAdapter):
    """Adapter of a module with DTensors and its optimizer, over all ranks of the job."""

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
        self.framework = "fsdp2" if any(isinstance(part, FSDPModule) for part in module.modules()) else "dtensor"
        super().__init__(module, optimizer, wrappers=wrappers)

    def owned(self) -> list[Piece]:
        self._check_state()
        return super().owned()

    def capture_run_state(self) -> Callable[[], dict[str, Any]]:
        """Capture the run state; ``on_mesh`` lists the scalars that are DTensors, by fqn."""
        scalars = ((fqn, key) for fqn, key, one, slot in self._sharded_state() if isinstance(one, DTensor) and not slot)
        captured, on_mesh = super().capture_run_state(), self._keep("on_mesh", lambda: group_by_key(scalars))
        return lambda: {**captured(), "on_mesh": on_mesh}

    def rank_scalars(self, every: bool = False) -> Mapping[str, tuple[str, str, Any]]:
        # A rank of which no expert got a token has no gradient, and counts fewer steps. FSDP2 has gradients everywhere.
        state = self._sharded_state() if every or self.framework == "dtensor" or self._places else ()
        return {
            f"{fqn}/{key}": (fqn, key, self._scalar(key, value, fqn))
            for fqn, key, value, slot in state
            if not slot and isinstance(value, bool | int | float | torch.Tensor) and getattr(value, "ndim", 0) == 0
        }

    def _sharded_state(self) -> Iterator[tuple[str, str, Any, bool]]:
        """Yield (fqn, key, value, whether it is a slot) of the optimizer's state beside DTensors."""
        for fqn, parameter, _ in self._optimized():
            state = self.optimizer.state.get(parameter, {}) if isinstance(parameter, DTensor) else {}
            slots = slots_of(state, parameter)
            yield from ((fqn, key, value, key in slots) for key, value in state.items())

    def _collect_tensors(self, module: nn.Module) -> module_tensors.ModuleTensors:
        return sharded_tensors(module)

    def _read_identity(self) -> Identity | None:
        self._inventory.before()
        return super()._read_identity()

    @staticmethod
    def _local_memory(tensor: torch.Tensor) -> torch.Tensor:
        return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # that of to_local(), for less

    def _replica(self, fqn: str, slot: str, tensor: torch.Tensor) -> module_tensors.Replica:
        if not isinstance(tensor, DTensor):
            return super()._replica(fqn, slot, tensor)
        share, memory = share_in_memory(tensor, f"{fqn} ({slot})")
        place, homes = self._places.get(fqn, (0, 1))
        piece = Piece(Fragment.of_box(fqn, slot, share.box), module_tensors.whole_piece(fqn, slot, memory).tensor)
        return module_tensors.Replica(piece, place * share.count + share.number, homes * share.count)

    def _home(self, tensor: torch.Tensor) -> Home:
        if not isinstance(tensor, DTensor):
            return super()._home(tensor)
        mesh = tensor.device_mesh
        return Home(f"{tuple(mesh.shape)} {tensor.placements}", tuple(mesh.mesh.flatten().tolist()))

    def _scalar(self, key: str, value: Any, fqn: str) -> Any:
        return local_of(value, f"{fqn} ({key})") if isinstance(value, DTensor) else value

    def _restored_scalars(self, fqn: str, parameter: nn.Parameter, group: Values, saved: Values) -> dict[str, Any]:
        # State with a shape of its own, beside a DTensor parameter, is a DTensor too, replicated on every rank.
        scalars = super()._restored_scalars(fqn, parameter, group, saved)
        if not isinstance(parameter, DTensor):
            return scalars
        on_mesh = saved.get("on_mesh", {}).get(fqn, ())
        meshed = {key for key, value in scalars.items() if key in on_mesh or _is_shaped_tensor(value)}
        return {key: _replicated(value, parameter) if key in meshed else value for key, value in scalars.items()}

    def _check_state(self) -> None:
        """Raise UnsupportedError for optimizer state whose position in the whole tensor is unknown."""
        for fqn, key, value, slot in self._sharded_state():
            problem = None
            if not isinstance(value, DTensor):
                problem = "as a plain tensor beside a sharded parameter" if _is_shaped_tensor(value) else None
            elif not slot:  # slots are checked as pieces
                share, _ = share_in_memory(value, f"{fqn} ({key})")
                problem = None if share.box.numel == value.numel() else "sharded over the ranks"
            if problem is not None:
                raise UnsupportedError(
                    f"{kind_of(self.optimizer)} keeps {key!r} of {fqn}, of shape {tuple(value.shape)}, {problem}, so "
                    "its part of the whole is unknown; use an optimizer with state per element, such as AdamW"
                )


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
    live = {id(parameter) for parameter in sharded_tensors(module).parameters().values()}
    if held and not any(id(parameter) in live for parameter in held):
        raise UnsupportedError(
            f"no parameter of {kind_of(optimizer)} is in the model: create the optimizer after fully_shard, "
            "which replaces the parameters"
        )
