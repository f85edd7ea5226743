"""Adapt plain PyTorch and DistributedDataParallel, and partition the writing of replicated tensors over ranks.

Every rank holds everything, writes a part of it and loads all of it. Training thread only. Schedulers and gradient
scalers are the user's own objects."""

import logging
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from itertools import chain, islice
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from monitor.adapters import base, optimizer_state
from monitor.adapters.frozen import fingerprint
from monitor.adapters.hyperparameters import LiveGroups, describe_group, group_values, match_groups, restore_groups
from monitor.adapters.identity import PLAIN_TENSORS, Hook, Identity, IdentityReader, OptimizerAttributes, T, versions_of
from monitor.adapters.module_tensors import ModuleTensors, Replica, partition_replicas, whole_piece, without_wrappers
from monitor.distributed import Group, run_on_all_ranks
from store.errors import UnsupportedError
from store.names import BUFFER, FROZEN, GRADIENT, WEIGHTS, Fragment
from store.schema import digest
from store.text import listed


class PyTorchAdapter(base.Adapter):
    """Adapter of a module and its optimizer. Raises UnsupportedError for unsupported tensors or optimizers.

    The module is unwrapped; its parameter names are the fqns. ``group`` has the ranks that hold replicas; None for all
    ranks, and for one process. ``wrappers`` are those around an optimizer, each with that. ``broadcasting``: of each
    model, by name, what overwrites its buffers with those of rank 0. ``replicas``: what averages gradients."""

    framework = "torch"
    state_is_private = False
    _known_tensors: frozenset[type] = frozenset()  # subclasses of tensors that the adapter can save

    def __init__(
        self,
        module: nn.Module,
        optimizer: optimizer_state.AnyOptimizer,
        group: dist.ProcessGroup | None = None,
        wrappers: Sequence[tuple[Any, torch.optim.Optimizer]] = (),
        *,
        broadcasting: Mapping[str, nn.parallel.DistributedDataParallel | None] = MappingProxyType({"": None}),
        replicas: Sequence[nn.parallel.DistributedDataParallel] = (),
    ) -> None:
        self.module, self.optimizer, self._broadcasting, self._replicated = module, optimizer, broadcasting, replicas
        self._optimizers = optimizer_state.members_of(optimizer)
        holders = [*((one, one) for one in self._optimizers), *wrappers]
        self._optimizer_attributes = [OptimizerAttributes(holder, one) for holder, one in holders]
        self._inventory = self._collect_tensors(module)
        self._reader, self.hooks = IdentityReader(self._local_memory), list[Hook]()
        distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank(group) if distributed else 0
        self._world_size = dist.get_world_size(group) if distributed else 1
        ranks = None if group is None else tuple(dist.get_process_group_ranks(group))
        self._home_here = base.Home("replicas", group=ranks)
        self._whole: Mapping[str, base.TensorInfo] | None = None  # of the whole model, if this is a pipeline stage
        self._places: Mapping[str, tuple[int, int]] = {}
        if any(type(one).__name__ == "ZeroRedundancyOptimizer" for one in self._optimizers):
            raise UnsupportedError("ZeroRedundancyOptimizer shards its state in its own way; use a plain one, or ZeRO")
        with self.cache_lookups():
            self.check_attached()

    @property
    def buffers_follow_rank0(self) -> bool:
        return all(self._synchronizing().values()) and None not in self._broadcasting.values()

    def _synchronizing(self) -> dict[str, bool]:
        """Return whether the next forward of each model broadcasts: not the one after a forward without gradients."""
        return {name: one is None or one.require_forward_param_sync for name, one in self._broadcasting.items()}

    def agree(self, group: Group) -> None:
        """Learn which ranks hold what, if not all hold the same: of pipeline stages, and meshes of some of the ranks.

        Collective. Raises UnsupportedError, on all ranks, if ranks hold different tensors of one name."""
        with self.cache_lookups():
            listing = run_on_all_ranks(group, self._listing)
            self.home = digest(repr(listing).encode())
            found = base.agree_on_stages(group, listing, self._hash_of)
        if found is not None:
            self._places = found.places
            if len(found.leaders) > 1:
                self._whole, self.leaders, self.local = found.tensors, found.leaders, found.places.keys()

    def completed_steps(self) -> int | None:
        return None  # torch does not count them

    def cache_lookups(self) -> AbstractContextManager[None]:
        return self._inventory.cache.enabled()

    def identity(self) -> Identity | None:
        return self._inventory.cache.get("identity", self._read_identity)

    def check_attached(self) -> None:
        """Raise UnsupportedError if an optimized parameter is not in the model, or state belongs to no parameter."""
        for attributes in self._optimizer_attributes:
            attributes.check()
        self._keep("attached", self._check_names)
        whole, own = self._whole, {} if self._whole is None else self._own_tensors()
        if whole is not None and not all(info.matches(whole.get(fqn)) for fqn, info in own.items()):
            raise UnsupportedError(
                "tensors of this stage changed since monitor.attach (name, shape, dtype, or whether they are trained), "
                "and other stages cannot know: close() and attach again"
            )
        optimizer_state.require_storable_groups(self.optimizer, self._known_tensors)

    def state_versions(self) -> base.StateVersions | None:
        identity, kind = self.identity(), optimizer_state.kind_of(self.optimizer)
        if identity is not None:
            return base.StateVersions(kind, versions_of(identity.trained), versions_of(identity.entries))
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        state = [value for p in trained for value in self.optimizer.state.get(p, {}).values()]
        return base.StateVersions(kind, versions_of(trained), versions_of(state))

    def probe(self, step: int, *, wait: bool) -> torch.Tensor | None:
        groups = [group["params"] for group in self.optimizer.param_groups if group["params"]]
        if self._places or not groups:  # ranks hold different ones
            return None
        number = int(digest(str(step).encode())[:15], 16)
        params = groups[number % len(groups)]
        some = (params[(number // len(groups) + i) % len(params)] for i in range(16))
        found = next((one for one in some if one.requires_grad), params[0])
        hooks = {getattr(hook, "__name__", "") for one in self._replicated for hook, _ in one._comm_hooks}
        # Also after a forward without gradients, on this rank alone perhaps.
        unsynced = wait and not all(one.require_forward_param_sync for one in self._replicated)
        plain = type(found) in PLAIN_TENSORS and found.layout is torch.strided and found.is_contiguous()
        return found if plain and (unsynced or hooks & _LOCAL_HOOKS or found.device.type == "cpu") else None

    def before_update(self, hook: Callable[[], None]) -> None:
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(Hook(self.hooks, lambda *_: hook()))

    def before_change(self, hook: Callable[[], None]) -> None:
        self.before_update(hook)
        before_load = Hook(self.hooks, lambda *_: hook())
        for one in list[Any]((*self._optimizers, *self.module.modules())):  # a script may load a part of the model
            one.register_load_state_dict_pre_hook(before_load)

    def tensors(self) -> Mapping[str, base.TensorInfo]:
        return self._own_tensors() if self._whole is None else self._whole

    def owned(self) -> list[base.Piece]:
        """Return this rank's part of :meth:`held`. Optimizer state is included once it exists, after the first step."""
        return partition_replicas(self._replicas())

    def held(self) -> list[base.Piece]:
        return [replica.piece for replica in self._replicas() if replica.piece.fragment.numel]

    def expected(self, slots: base.Slots) -> list[base.FragmentPlace]:
        optimized = {fqn: parameter for fqn, parameter, _ in self._optimized()}
        places = [base.FragmentPlace(one.piece.fragment, one.piece.tensor.dtype) for one in self._replicas(optimized)]
        own = {place.fragment.fqn: place.fragment for place in places}
        for fqn, parameter in optimized.items():
            state = self.optimizer.state.get(parameter, {})
            live = optimizer_state.slots_of(state, parameter)
            for slot, dtype in optimizer_state.planned_slots(parameter, state, live, slots.get(fqn, {})).items():
                new = slot not in live
                fragment = own[fqn]._replace(slot=slot) if new else self._replica(fqn, slot, state[slot]).piece.fragment
                places.append(base.FragmentPlace(fragment, dtype, new and optimizer_state.can_take_over(parameter)))
        return [place for place in places if place.fragment.numel]

    def prepare_load(self, slots: base.Slots, values: Mapping[Fragment, Any] = MappingProxyType({})) -> None:
        """Create the slots in ``slots`` that the optimizer lacks, and drop others."""
        for fqn, parameter, _ in self._optimized():
            wanted, live = slots.get(fqn, {}), self.optimizer.state.get(parameter, {})
            new = [slot for slot in wanted if slot not in live]
            found = {slot: values.get(self._replica(fqn, slot, parameter).piece.fragment) for slot in new}
            optimizer_state.fit_slots(self.optimizer, parameter, wanted, found)

    def finish_load(self) -> None:
        for _, parameter, _ in self._optimized():
            if parameter.grad is not None:  # of a step that is given up: others may hold its memory
                parameter.grad.detach().zero_()

    def run_state(self) -> dict[str, Any]:
        return self.capture_run_state()()

    def capture_run_state(self) -> Callable[[], dict[str, Any]]:
        groups = [
            {**describe_group(fqns, group), "optimizer": type(member).__name__, "member": number}
            for (fqns, group), (number, member) in zip(self._groups(), self._members(), strict=True)
        ]
        scalars = self._keep("stacks", self._stacked_scalars).capture(self._entries(), self._host)
        slots, kind = self._keep("slots", self._slots), optimizer_state.kind_of(self.optimizer)
        shared, strides = self._keep("shared", self._shared), self._keep("strides", self._strides)
        sync = self._synchronizing()
        return lambda: {
            "optimizer": kind,
            "param_groups": groups,
            "scalars": scalars(),
            "slots": slots,
            "shared": shared,
            "strides": strides,
            "counters": {},
            "loss_scaler": None,
            "lr_scheduler": None,
            **({"stages": list(self.leaders)} if len(self.leaders) > 1 else {}),
            **({} if all(sync.values()) else {"require_forward_param_sync": sync}),
        }

    def objects(self) -> Mapping[str, Any]:
        return {}

    def replicated_keys(self) -> str | None:
        states = self.optimizer.state
        keys = [[fqn, sorted(map(str, states.get(parameter, ())))] for fqn, parameter, _ in self._optimized()]
        return digest(repr(keys).encode()) if self.framework == "torch" and self.local is None else None

    def attributes(self) -> Mapping[str, OptimizerAttributes]:
        groups = zip(self._members(), self._keep("groups", self._named_groups), strict=True)
        first = {id(member): fqns[0] for (_, member), fqns in reversed(list(groups)) if fqns}
        return {f"{one.kind} with {first.get(id(one.optimizer))}": one for one in self._optimizer_attributes}

    def check_run_state(self, state: Mapping[str, Any]) -> None:
        match_groups(state["param_groups"], self._groups_to_restore(state))
        for fqn, parameter, group in self._optimized():
            self._restored_scalars(fqn, parameter, group, state)

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        for name, one in self._broadcasting.items():
            if one is not None:
                one.require_forward_param_sync = state.get("require_forward_param_sync", {}).get(name, True)
        # A parameter that was saved without state loses the state it has.
        restore_groups(state["param_groups"], self._groups_to_restore(state))
        for fqn, parameter, group in self._optimized():
            scalars = self._restored_scalars(fqn, parameter, group, state)
            slots = state.get("slots", {}).get(fqn, ())
            if optimizer_state.complete_state(self.optimizer, parameter, slots, bool(scalars)):
                live = self.optimizer.state[parameter]
                live.update(scalars)
                for slot, stride in state.get("strides", {}).get(fqn, {}).items():
                    if slot in live:
                        live[slot] = optimizer_state.with_stride(live[slot], stride)
        states = {fqn: self.optimizer.state.get(parameter, {}) for fqn, parameter, _ in self._optimized()}
        for (first, own), *others in state.get("shared", ()):
            tensor = states.get(first, {}).get(own)
            for fqn, key in others:
                other = states.get(fqn, {}).get(key)
                # A composite's may differ.
                if tensor is not None and other is not None and optimizer_state.equal(tensor, other):
                    states[fqn][key] = tensor

    def unsaveable(self) -> Sequence[str]:
        return ()

    def live_values(self) -> Iterator[base.LiveValue]:
        yield from self._inventory.live_values()
        for hook, kept in chain.from_iterable(one._comm_hooks for one in self._replicated):
            if _lasts(kept, set(map(id, self._inventory.parameters().values()))):
                name = f"what is kept by the communication hook {getattr(hook, '__qualname__', hook)}"
                yield base.LiveValue(name, kept, ownable=True)
        groups = self._groups()
        for number, optimizer in enumerate(self._optimizers):
            place = f"optimizer{f's[{number}]' if len(self._optimizers) > 1 else ''}.state_dict()"
            first, whole = sum(member < number for member, _ in self._members()), optimizer.state_dict()
            own = groups[first : first + len(optimizer.param_groups)]
            optimized = [pair for fqns, group in own for pair in zip(fqns, group["params"], strict=True)]
            for index, state in whole.get("state", {}).items():
                fqn, parameter = optimized[index]
                live = optimizer.state.get(parameter, {})
                for wrapped in [key for key in state if key not in live and isinstance(state[key], Mapping)]:
                    state = {**state, **state[wrapped]}  # noqa: PLW2901 - as of bitsandbytes, for FSDP1
                    del state[wrapped]
                slots = optimizer_state.slots_of(live, parameter)
                for key, value in state.items():
                    stored = None if key in slots else ("framework", "scalars", fqn, key)
                    shown = optimizer_state.to_host(value, key) if optimizer_state.is_packed(value) else value
                    yield base.LiveValue(f"{place}['state'][{index}][{key!r}]", shown, stored=stored)
            yield from group_values(whole.get("param_groups", ()), f"{place}['param_groups']", first)
            names = [(name, one.state_dict()) for name, one in self.attributes().items() if one.optimizer is optimizer]
            for key in whole.keys() - {"state", "param_groups"}:
                path = next((("attributes", name, key) for name, found in names if key in found), None)
                yield base.LiveValue(f"{place}[{key!r}]", whole[key], stored=path)

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._optimizers

    def step_inputs(self, number: int) -> tuple[list[dict[str, Any]], list[base.Piece], torch.Tensor | float]:
        groups = self._groups_of(number)
        gradients = (
            self._replica(fqn, GRADIENT, parameter.grad)
            for fqns, group in groups
            for fqn, parameter in zip(fqns, group["params"], strict=True)
            if parameter.grad is not None
        )
        return [describe_group(*group) for group in groups], partition_replicas(gradients), 1.0

    def new_gradients(self, number: int) -> list[base.Gradient]:
        trained = (
            (fqn, parameter)
            for fqns, group in self._groups_of(number)
            for fqn, parameter in zip(fqns, group["params"], strict=True)
            if parameter.requires_grad
        )
        made = [(fqn, parameter, torch.empty_like(parameter)) for fqn, parameter in trained]
        return [base.Gradient(one, memory, [self._replica(fqn, GRADIENT, memory).piece]) for fqn, one, memory in made]

    def repeat_step(self, number: int, groups: base.Groups, fqns: Set[str], gradients: Sequence[base.Gradient]) -> None:
        optimizer = self._optimizers[number]
        restore_groups(groups, self._groups_of(number))
        optimizer.zero_grad(set_to_none=True)
        for owner, memory, (piece,) in gradients:
            owner.grad = memory if piece.fragment.fqn in fqns else None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def layout_facts(self) -> dict[str, Any]:
        return self._keep("facts", self._facts)

    def _facts(self) -> dict[str, Any]:
        alone = {} if len(self.leaders) > 1 else {"state_dict_names": self._inventory.state_dict_names()}
        return {
            "framework": self.framework,
            "optimizer": optimizer_state.kind_of(self.optimizer),
            "world_size": self._world_size,
            "param_groups": [{"params": fqns} for fqns, _ in self._groups()],
            **alone,  # without it, the names of all stages are those of the tensors
            "shared_params": {alias: fqn for fqn, info in self.tensors().items() for alias in info.aliases},
        }

    # ---- overridden by adapters of sharded models

    def _collect_tensors(self, module: nn.Module) -> ModuleTensors:
        return ModuleTensors(module, without_wrappers)

    def _replica(self, fqn: str, slot: str, tensor: torch.Tensor) -> Replica:
        """Return this rank's piece of a tensor and its place among the ranks that hold the same piece."""
        place = self._places.get(fqn, (self._rank, self._world_size))
        return Replica(whole_piece(fqn, slot, tensor, strided=True), *place)

    def _home(self, tensor: torch.Tensor) -> base.Home:  # for adapters of sharded models
        return self._home_here

    _local_memory: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Returns this rank's memory of a tensor; None if that is the tensor itself."""

    def _scalar(self, key: str, value: Any, fqn: str) -> Any:  # fqn: for errors of subclasses
        return value

    def _read_identity(self) -> Identity | None:
        try:
            return self._reader.read(self.module, self.optimizer)
        except Exception:  # noqa: BLE001 - of an unusual module or tensor: everything is listed anew, which tells
            return None

    # ---- shared by all

    def _listing(self) -> base.Listing:
        held = {**self._inventory.parameters(), **self._inventory.buffers()}
        found = {fqn: (info, self._home(held[fqn])) for fqn, info in self._own_tensors().items()}
        # Where a rank is outside the mesh of a tensor, its optimizer has no state of it.
        return {fqn: one for fqn, one in found.items() if one[1].ranks is None or dist.get_rank() in one[1].ranks}

    def _hash_of(self, fqn: str) -> int:
        return fingerprint(self._replica(fqn, WEIGHTS, self._inventory.parameters()[fqn]).piece.tensor, 0)

    def _own_tensors(self) -> Mapping[str, base.TensorInfo]:
        return self._keep("infos", lambda: self._inventory.infos(trainable=frozenset()))

    def _keep(self, key: str, compute: Callable[[], T]) -> T:
        """Return ``compute()``, called once for as long as the job has the same tensors."""
        return self._inventory.cache.keep(self.identity(), key, compute)

    def _check_names(self) -> None:
        kind = optimizer_state.kind_of(self.optimizer)
        counted = Counter(fqn for fqns, _ in self._groups() for fqn in fqns)
        if twice := [fqn for fqn, count in counted.items() if count > 1]:
            raise UnsupportedError(f"several of {kind} hold {listed(twice)}: give each parameter to one optimizer")
        optimizer_state.require_by_parameter(self.optimizer)
        names = self._inventory.names()
        optimizer_state.require_storable(self.optimizer, lambda key: names.of(key, kind), self._known_tensors)

    def _slots(self) -> dict[str, list[str]]:
        states = self.optimizer.state
        return {fqn: optimizer_state.slots_of(states.get(one, {}), one) for fqn, one, _ in self._optimized()}

    def _shared(self) -> list[list[tuple[str, str]]]:
        """Return the (fqn, key) of each tensor that is in several places of the optimizer's state."""
        places = defaultdict[int, list[tuple[str, str]]](list)
        for fqn, parameter, _ in self._optimized():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    places[id(value)].append((fqn, key))
        return [found for found in places.values() if len(found) > 1]

    def _strides(self) -> dict[str, dict[str, list[int]]]:
        states = self.optimizer.state
        found = {
            fqn: optimizer_state.unusual_strides(states.get(parameter, {}), parameter)
            for fqn, parameter, _ in self._optimized()
        }
        return {fqn: strides for fqn, strides in found.items() if strides}

    def _entries(self) -> Sequence[Any]:
        identity, states = self.identity(), self.optimizer.state.values()
        return [value for state in states for value in state.values()] if identity is None else identity.entries

    def _host(self, key: str, value: Any, fqn: str) -> Any:
        return optimizer_state.to_host(self._scalar(key, value, fqn), f"optimizer state {key!r} of {fqn}")

    def _stacked_scalars(self) -> optimizer_state.StackedScalars:
        slots, fqns = self._keep("slots", self._slots), {id(p): fqn for fqn, p, _ in self._optimized()}
        places, first = {fqn: dict[str, int]() for fqn in slots}, 0
        for parameter, state in self.optimizer.state.items():
            if fqn := fqns.get(id(parameter)):
                places[fqn] = {key: index for index, key in enumerate(state, first) if key not in slots[fqn]}
            first += len(state)
        return optimizer_state.StackedScalars.of(places, self._entries())

    def _replicas(self, stateless: Container[str] = ()) -> Iterator[Replica]:
        """Yield the pieces on this rank. stateless: parameters whose optimizer state is left out."""
        states = self.optimizer.state
        for fqn, parameter in self._inventory.parameters().items():
            yield self._replica(fqn, WEIGHTS if parameter.requires_grad else FROZEN, parameter)
            state = {} if fqn in stateless else states.get(parameter, {})
            for slot in optimizer_state.slots_of(state, parameter):
                yield self._replica(fqn, slot, state[slot])
        for fqn, buffer in self._inventory.buffers().items():
            yield self._replica(fqn, BUFFER, buffer)

    def _groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        return list(zip(self._keep("groups", self._named_groups), self.optimizer.param_groups, strict=True))

    def _named_groups(self) -> list[list[str]]:
        names = self._inventory.names()
        return [
            [names.of(one, f"param group {index} of {type(member).__name__}") for one in group["params"]]
            for member in self._optimizers
            for index, group in enumerate(member.param_groups)
        ]

    def _groups_of(self, number: int) -> list[tuple[list[str], dict[str, Any]]]:
        return [one for one, (member, _) in zip(self._groups(), self._members(), strict=True) if member == number]

    def _members(self) -> list[tuple[int, torch.optim.Optimizer]]:
        return [(number, one) for number, one in enumerate(self._optimizers) for _ in one.param_groups]

    def _optimized(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        for fqns, group in self._groups():
            for fqn, parameter in zip(fqns, group["params"], strict=True):
                yield fqn, parameter, group

    def _groups_to_restore(self, saved: Mapping[str, Any]) -> LiveGroups:
        # Frozen parameters in a group do not matter: ZeRO drops them from its groups.
        known = {fqn for group in saved["param_groups"] for fqn in group["params"]}
        parameters = self._inventory.parameters()
        groups = self._groups()
        return [
            ([fqn for fqn in fqns if fqn in known or parameters[fqn].requires_grad], group) for fqns, group in groups
        ]

    def _restored_scalars(
        self, fqn: str, parameter: nn.Parameter, group: base.Values, saved: base.Values
    ) -> dict[str, Any]:
        owner = next(one for one in self._optimizers if any(group is own for own in one.param_groups))
        kind, several = saved.get("optimizer"), len(self._optimizers) > 1  # each parameter's class was compared
        kind = type(owner).__name__ if several or " + " in str(kind) else kind
        return optimizer_state.restored_scalars(owner, parameter, group, saved["scalars"].get(fqn, {}), kind)


_LOCAL_HOOKS = {"post_localSGD_hook", "noop_hook"}  # leave gradients on each rank as they are
_STATE = (torch.Tensor, np.ndarray, torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_NO_STATE = (type, ModuleType, nn.Module, torch.optim.Optimizer, DeviceMesh, logging.Logger)


def _lasts(kept: object, saved: Set[int], depth: int = 4) -> bool:
    """Whether what a communication hook keeps holds tensors, or counts steps as torch's own do.

    An empty list, set or mapping counts too: hooks fill theirs at the first steps. saved: ids of tensors that do not
    count. Of a container, looks at the first items only."""
    if isinstance(kept, _STATE):
        return id(kept) not in saved
    if depth == 0 or type(kept).__module__ == "threading" or isinstance(kept, (*_NO_STATE, dist.ProcessGroup)):
        return False
    if isinstance(kept, dict | set | frozenset | list | tuple | deque):
        items: Iterable[object] = kept.values() if isinstance(kept, dict) else kept
        found = any(_lasts(one, saved, depth - 1) for one in islice(items, 1000))
        return found or not (kept or isinstance(kept, tuple | frozenset))
    state = object.__getstate__(kept)  # its attributes and slots, without calling anything of its own
    fields = dict(chain.from_iterable(one.items() for one in (state if isinstance(state, tuple) else (state,)) if one))
    return "iter" in fields or any(_lasts(one, saved, depth - 1) for one in fields.values())
