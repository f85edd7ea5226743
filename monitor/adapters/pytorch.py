"""Plain PyTorch and DDP; sharing replicated writes.

Sharing out the writing of tensors that several ranks hold alike.

Pure interval arithmetic, without a collective: every rank computes the same shares of what it holds. Whose turn it is
to write a small tensor follows from the tensor's name alone: what some ranks hold besides, such as state that an
optimizer keeps only where it has elements to update, moves nobody's turn.

Plain PyTorch, and DistributedDataParallel: every rank holds everything, whole.

Each rank writes a share (:mod:`monitor.adapters.pytorch`), each rank loads all of it. Used from the
training thread only. It does not know schedulers and gradient scalers: those are the user's own objects.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from monitor.adapters.base import FragmentPlace, Piece, TensorInfo, StateVersions, versions_of
from monitor.adapters.module_tensors import ModuleTensors, slice_piece, whole_piece, without_wrappers
from monitor.adapters.optimizer_state import (
    LiveGroups,
    complete_state,
    describe_group,
    fit_slots,
    match_groups,
    require_by_parameter,
    restore_groups,
    restore_scalar,
    scalar_device,
    slots_of,
    planned_slots,
    to_host,
)
from store.errors import UnsupportedError
from store.names import BUFFER, FROZEN, WEIGHTS, Fragment

SMALL = 16_384
"""Tensors of fewer elements go whole to one rank: a slice of them would cost more than it spares."""


@dataclass(frozen=True)
class Replica:
    """A piece that ``count`` ranks hold alike; this rank is number ``number`` of them."""

    piece: Piece
    number: int
    count: int


def even_slice(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """(start, numel) of a rank's share of ``numel`` elements in slices of ceil(numel / world size).

    The last ranks may get fewer elements or none.
    """
    part = -(-numel // world_size)
    start = min(rank * part, numel)
    return start, min(part, numel - start)


def partition_replicated(pieces: Iterable[Piece], rank: int, world_size: int) -> list[Piece]:
    """:func:`partition_replicas` of pieces that all ranks hold alike."""
    return partition_replicas(Replica(piece, rank, world_size) for piece in pieces)


def partition_replicas(replicas: Iterable[Replica]) -> list[Piece]:
    """The parts of replicated pieces that this rank saves; over all ranks that hold one they cover it exactly once.

    Buffers are all the first one's: where ranks disagree (running statistics that nothing synchronises), they are saved
    as one rank has them, not as a mixture, and as the rank whose buffers DistributedDataParallel broadcasts.
    """
    out: list[Piece] = []
    for replica in replicas:
        fragment = replica.piece.fragment
        if fragment.slot == BUFFER:
            start, numel = (0, fragment.numel) if replica.number == 0 else (0, 0)
        elif fragment.numel < SMALL:
            start, numel = (0, fragment.numel) if replica.number == _writer_number(fragment) % replica.count else (0, 0)
        else:
            start, numel = even_slice(fragment.numel, replica.number, replica.count)
        if numel:
            out.append(slice_piece(replica.piece, start, numel))
    return out


def _writer_number(fragment: Fragment) -> int:
    return zlib.crc32(f"{fragment.fqn}/{fragment.slot}".encode())


_NO_STATE = (WEIGHTS, FROZEN, BUFFER)


class PyTorchAdapter:
    """Adapter of a module and its optimizer.

    module: without wrappers; its parameter names are the fqns. group: the ranks that hold replicas, None for
    all (and for one process). around: wrappers that the optimizer is in, outermost first. Raises UnsupportedError
    for tensors or optimizers that cannot be handled.
    """

    framework = "torch"
    state_is_private = False

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None = None,
        around: Sequence[Any] = (),
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self._wrappers = tuple(around)
        self._inventory = self._collect_tensors(module)
        together = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank(group) if together else 0
        self._world_size = dist.get_world_size(group) if together else 1
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise UnsupportedError(
                "ZeroRedundancyOptimizer shards its state in its own way; use a plain optimizer or DeepSpeed ZeRO"
            )
        self.check_attached()
        self.held()

    def completed_steps(self) -> int | None:
        """None: torch does not count them."""
        return None

    def cache_lookups(self) -> AbstractContextManager[None]:
        return self._inventory.cache.enabled()

    def check_attached(self) -> None:
        """See :class:`monitor.adapters.base.Adapter`: every parameter that is optimized is in the model, and all state
        is of one."""
        self._groups()
        require_by_parameter(self.optimizer)
        for wrapper in self._wrappers:
            _require_no_state(wrapper, self.optimizer)

    def state_versions(self) -> StateVersions | None:
        moved = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        state = (value for p in moved for value in self.optimizer.state.get(p, {}).values())
        return StateVersions(type(self.optimizer).__name__, versions_of(moved), versions_of(state))

    def before_update(self, hook: Callable[[], None]) -> None:
        self.optimizer.register_step_pre_hook(lambda *_: hook())

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._inventory.infos(trainable=frozenset())

    def owned(self) -> list[Piece]:
        """This rank's share of :meth:`held`. Optimizer state appears once it exists, after the first step."""
        return partition_replicas(self._replicas())

    def held(self) -> list[Piece]:
        """All of this rank's pieces: here every tensor, whole."""
        return [replica.piece for replica in self._replicas() if replica.piece.fragment.numel]

    def expected(self, slots: Mapping[str, Mapping[str, str]]) -> list[FragmentPlace]:
        optimized = {fqn: parameter for fqn, parameter, _ in self._optimized()}
        places = [
            FragmentPlace(piece.fragment, piece.tensor.dtype)
            for piece in self.held()
            if piece.fragment.slot in _NO_STATE or piece.fragment.fqn not in optimized
        ]
        for fqn, parameter in optimized.items():
            state = self.optimizer.state.get(parameter, {})
            live = slots_of(state, parameter)
            for slot, dtype in planned_slots(state, parameter, slots.get(fqn, {})).items():
                tensor = state[slot] if slot in live else parameter
                places.append(FragmentPlace(self._replica(fqn, slot, tensor).piece.fragment, dtype))
        return [place for place in places if place.fragment.numel]

    def prepare_load(self, slots: Mapping[str, Mapping[str, str]]) -> None:
        """Make the optimizer's slots those that ``slots`` names: create missing ones, drop others."""
        for fqn, parameter, _ in self._optimized():
            fit_slots(self.optimizer, parameter, slots.get(fqn, {}))

    def finish_load(self) -> None:
        """Nothing is derived from the parameters here."""

    def run_state(self) -> dict[str, Any]:
        """See :class:`monitor.adapters.base.Adapter`; counters, scaler and scheduler are not known here."""
        scalars: dict[str, dict[str, Any]] = {}
        slots: dict[str, list[str]] = {}
        for fqn, parameter, _ in self._optimized():
            state = self.optimizer.state.get(parameter, {})
            slots[fqn] = slots_of(state, parameter)
            scalars[fqn] = {
                key: to_host(self._scalar(key, value, fqn), f"optimizer state {key!r} of {fqn}")
                for key, value in state.items()
                if key not in slots[fqn]
            }
        return {
            "optimizer": type(self.optimizer).__name__,
            "param_groups": [describe_group(fqns, group) for fqns, group in self._groups()],
            "scalars": scalars,
            "slots": slots,
            "counters": {},
            "loss_scaler": None,
            "lr_scheduler": None,
        }

    def objects(self) -> Mapping[str, Any]:
        """None: schedulers and gradient scalers are the user's own."""
        return {}

    def check_run_state(self, state: Mapping[str, Any]) -> None:
        match_groups(state["param_groups"], self._groups_to_restore(state))
        for fqn, parameter, group in self._optimized():
            self._restored_scalars(fqn, parameter, group, state)

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """See :class:`monitor.adapters.base.Adapter`. Parameters saved without state lose theirs."""
        restore_groups(state["param_groups"], self._groups_to_restore(state))
        for fqn, parameter, group in self._optimized():
            scalars = self._restored_scalars(fqn, parameter, group, state)
            if complete_state(self.optimizer, parameter, state.get("slots", {}).get(fqn, ()), bool(scalars)):
                self.optimizer.state[parameter].update(scalars)

    def layout_facts(self) -> dict[str, Any]:
        return {
            "framework": self.framework,
            "optimizer": type(self.optimizer).__name__,
            "world_size": self._world_size,
            "param_groups": [{"params": fqns} for fqns, _ in self._groups()],
            "state_dict_names": self._inventory.state_dict_names(),
            "shared_params": {alias: fqn for fqn, names in self._inventory.aliases().items() for alias in names},
        }

    # ---- what a kind of sharding says

    def _collect_tensors(self, module: nn.Module) -> ModuleTensors:
        return ModuleTensors(module, without_wrappers)

    def _replica(self, fqn: str, slot: str, tensor: torch.Tensor) -> Replica:
        """What this rank holds of a tensor, and who else does."""
        return Replica(whole_piece(fqn, slot, tensor), self._rank, self._world_size)

    def _scalar(self, key: str, value: Any, fqn: str) -> Any:  # noqa: ARG002 - for errors of subclasses
        """Optimizer state besides the slots, as it is saved."""
        return value

    # ---- shared parts

    def _replicas(self) -> Iterator[Replica]:
        states = self.optimizer.state
        for fqn, parameter in self._inventory.parameters().items():
            yield self._replica(fqn, WEIGHTS if parameter.requires_grad else FROZEN, parameter)
            state = states.get(parameter, {})
            for slot in slots_of(state, parameter):
                yield self._replica(fqn, slot, state[slot])
        for fqn, buffer in self._inventory.buffers().items():
            yield self._replica(fqn, BUFFER, buffer)

    def _groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        names = self._inventory.names()
        return [
            ([names.of(parameter, self._group_label(index)) for parameter in group["params"]], group)
            for index, group in enumerate(self.optimizer.param_groups)
        ]

    def _optimized(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        names = self._inventory.names()
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                yield names.of(parameter, self._group_label(index)), parameter, group

    def _groups_to_restore(self, saved: Mapping[str, Any]) -> LiveGroups:
        # Frozen parameters in a group say nothing: ZeRO drops them from its groups.
        known = {fqn for group in saved["param_groups"] for fqn in group["params"]}
        parameters = self._inventory.parameters()
        return [
            ([fqn for fqn in fqns if fqn in known or parameters[fqn].requires_grad], group)
            for fqns, group in self._groups()
        ]

    def _restored_scalars(
        self, fqn: str, parameter: nn.Parameter, group: Mapping[str, Any], saved: Mapping[str, Any]
    ) -> dict[str, Any]:
        live = self.optimizer.state.get(parameter, {})
        return {
            key: restore_scalar(
                key,
                value,
                live=live.get(key),
                optimizer=self.optimizer,
                saved_by=saved.get("optimizer"),
                device=scalar_device(value, group, parameter),
            )
            for key, value in saved["scalars"].get(fqn, {}).items()
        }

    def _group_label(self, index: int) -> str:
        return f"param group {index} of {type(self.optimizer).__name__}"


def _require_no_state(wrapper: Any, optimizer: torch.optim.Optimizer) -> None:
    state = getattr(wrapper, "state", None)
    if isinstance(state, Mapping) and state is not optimizer.state and any(state.values()):
        inner = type(optimizer).__name__
        raise UnsupportedError(
            f"{type(wrapper).__name__} around {inner} keeps state of its own, which would not be saved: attach the "
            f"{inner} itself and give the wrapper's state as an object in state=[...], or do without the wrapper"
        )


def unwrap(model: nn.Module) -> tuple[nn.Module, dist.ProcessGroup | None]:
    """The module inside of DistributedDataParallel and torch.compile, and the group of its replicas."""
    group: dist.ProcessGroup | None = None
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model, group = model.module, cast("dist.ProcessGroup", model.process_group)
        elif isinstance(model, nn.parallel.DataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model, group
