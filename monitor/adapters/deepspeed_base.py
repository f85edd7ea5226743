"""Capture and restore the state of a DeepSpeed engine, and implement the adapter that all ZeRO stages share.

A stage describes its flat fp32 partitions and the pieces of parameters in them (:class:`FlatPartition`), and the
parameters that the optimizer does not hold (mostly frozen ones). DeepSpeed's tensors are read and written in place,
from the training thread, between optimizer steps. Tensor, pipeline and expert parallelism are not supported."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from monitor.adapters import base, optimizer_state
from monitor.adapters.base import Adapter, FragmentPlace, LiveValue, Piece, StateVersions, TensorInfo, wrap_methods
from monitor.adapters.cpu_adam import powers_of
from monitor.adapters.deepspeed_gradients import ReusedGradients
from monitor.adapters.hyperparameters import describe_group, group_values, match_groups, restore_groups
from monitor.adapters.identity import Hook, Identity, IdentityReader, OptimizerAttributes, T
from monitor.adapters.module_tensors import ModuleTensors, partition_replicated, whole_piece
from store.errors import ModelMismatchError, UnsupportedError
from store.names import BUFFER, WEIGHTS, Fragment
from store.schema import as_json

_CHANGING = (
    *("load_state_dict", "refresh_fp32_params", "_restore_from_bit16_weights"),
    *("set_full_hp_param", "set_local_hp_param"),
)
"""Methods of a ZeRO optimizer, besides ``step``, that write masters or moments."""

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def engine_state(engine: Any) -> dict[str, Any]:
    """Return the engine's own run state: ``counters``, ``loss_scaler``, ``lr_scheduler``."""
    counters = {name: int(getattr(engine, name)) for name in _COUNTERS}
    counters["gradient_accumulation_steps"] = int(engine.gradient_accumulation_steps())
    scheduler = engine.lr_scheduler
    return {
        "counters": counters,
        "loss_scaler": scaler_state(engine.optimizer),
        "lr_scheduler": None if scheduler is None else copy.deepcopy(scheduler.state_dict()),
    }


def require_same_engine(engine: Any, module: Any, optimizer: Any) -> None:
    """Raise UnsupportedError if the engine has another module or optimizer than when it was attached."""
    for part, live, attached in (("module", engine.module, module), ("optimizer", engine.optimizer, optimizer)):
        if live is not attached:
            raise UnsupportedError(
                f"the engine's {part} was replaced after monitor.attach (was {type(attached).__name__}, is "
                f"{type(live).__name__}): call close() and attach the engine again"
            )


class EngineAdapter(Adapter):
    """Base of the adapters of DeepSpeed engines."""

    framework = "deepspeed"
    engine: Any

    def completed_steps(self) -> int | None:
        """Return the steps at accumulation boundaries, those skipped for an overflow included, as DeepSpeed counts."""
        return int(self.engine.global_steps)

    def state_versions(self) -> StateVersions | None:
        return None  # check_attached() detects a replaced optimizer

    def objects(self) -> Mapping[str, Any]:
        return {} if self.engine.lr_scheduler is None else {"lr_scheduler": self.engine.lr_scheduler}


def check_engine_state(engine: Any, state: Mapping[str, Any]) -> None:
    """Raise the errors that :func:`load_engine_state` would raise. Changes nothing."""
    _counters(engine, state)
    _scaler_updates(engine.optimizer, state.get("loss_scaler"))


def load_engine_state(engine: Any, state: Mapping[str, Any]) -> None:
    """Load a run state, except the scheduler. Without saved counters they are derived from the optimizer's ``step``."""
    values = _scaler_updates(engine.optimizer, state.get("loss_scaler"))
    for name, value in _counters(engine, state).items():
        setattr(engine, name, value)
    scaler = _live_scaler(engine.optimizer)
    if values and isinstance(scaler, torch.amp.GradScaler):
        scaler.load_state_dict(dict(values))
    else:
        for name, value in values.items():
            setattr(scaler, name, value)


def _counters(engine: Any, state: Mapping[str, Any]) -> dict[str, int]:
    saved = state.get("counters") or _counters_from_steps(engine, state)
    if missing := sorted({*_COUNTERS, "gradient_accumulation_steps"} - saved.keys()):
        raise ModelMismatchError(
            f"the saved counters lack {', '.join(missing)}: resume with the DeepSpeed version that saved them"
        )
    counters = {name: int(saved[name]) for name in _COUNTERS}
    # Partly accumulated gradients are not saved, so round down to the last accumulation boundary.
    windows = counters["micro_steps"] // int(saved["gradient_accumulation_steps"])
    return {**counters, "micro_steps": windows * int(engine.gradient_accumulation_steps())}


def _counters_from_steps(engine: Any, state: Mapping[str, Any]) -> dict[str, int]:
    steps = max((int(scalars.get("step", 0)) for scalars in state["scalars"].values()), default=0)
    accumulation = int(engine.gradient_accumulation_steps())
    return {
        "global_steps": steps,
        "global_samples": steps * int(engine.train_batch_size()),
        "skipped_steps": 0,
        "micro_steps": steps * accumulation,
        "gradient_accumulation_steps": accumulation,
    }


def scaler_state(optimizer: Any) -> dict[str, Any] | None:
    """Return the state of the loss scaler, if there is one."""
    scaler = _live_scaler(optimizer)
    if scaler is None:
        return None
    values = scaler.state_dict() if isinstance(scaler, torch.amp.GradScaler) else vars(scaler)
    plain = {key: value for key, value in values.items() if isinstance(value, bool | int | float)}
    return {"class": type(scaler).__name__, **plain}


def _live_scaler(optimizer: Any) -> Any:
    autocast = getattr(optimizer, "torch_autocast_gradscaler", None)
    return getattr(optimizer, "loss_scaler", None) if autocast is None else autocast


def _scaler_updates(optimizer: Any, saved: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the saved values that the live scaler takes. A scaler of another class starts with its configuration."""
    scaler = _live_scaler(optimizer)
    keys: Sequence[str] = _SCALER_STATE if getattr(scaler, "dynamic", False) else ()
    if isinstance(scaler, torch.amp.GradScaler):
        keys = [*scaler.state_dict()]  # none if it is disabled
    if saved is None or scaler is None or type(scaler).__name__ != saved["class"]:
        return {}
    if missing := [key for key in keys if key not in saved]:
        raise ModelMismatchError(
            f"the saved state of the loss scaler {saved['class']} lacks {', '.join(missing)}: it was saved by a scaler "
            "with other settings; configure it as in the run that was saved"
        )
    return {key: saved[key] for key in keys}


@dataclass(frozen=True)
class Placement:
    """Position of a piece of a parameter in a flat partition.

    Elements [start, start + numel) of the flattened parameter are at [offset, offset + numel) of the partition."""

    fqn: str
    start: int
    offset: int
    numel: int


@dataclass(frozen=True)
class FlatPartition:
    """One flat partition of master weights on this rank: a key of the base optimizer's state."""

    tensor: torch.Tensor  # 1-d
    group: int  # index of its param group
    fqns: tuple[str, ...]  # every parameter in it over all ranks, in order
    placements: tuple[Placement, ...]  # the pieces on this rank; everything between and behind them is padding


class ZeroAdapter(EngineAdapter, ABC):
    """Adapter of a ZeRO engine; subclasses describe the layout of their stages."""

    state_is_private = True
    memory_of: Callable[[Any], Any] | None = None  # see :class:`IdentityReader`

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.module: nn.Module = engine.module
        self._zero = engine.optimizer
        self._inventory = ModuleTensors(self.module)
        self._reader, self.hooks = IdentityReader(self.memory_of), list[Hook]()
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._check_supported()
        self._wrapped, self._group_count = self._base_optimizer, len(self._base_optimizer.param_groups)
        self._optimizer_attributes = OptimizerAttributes(self._wrapped, self._wrapped)
        self._beta_powers = powers_of(self._wrapped)
        stage, offloads = int(engine.zero_optimization_stage()), getattr(self._zero, "cpu_offload", False)
        reuses, names = stage == 3 or offloads, {fqn for flat in self.flats() for fqn in flat.fqns}
        trained = {fqn: one for fqn, one in self._inventory.parameters().items() if reuses and fqn in names}
        frozen = offloads or bool(getattr(self._zero, "offload_optimizer", False))
        self._reused = ReusedGradients(engine, trained, "any" if stage == 1 else "first", frozen)

    # ---- implemented by a stage

    @abstractmethod
    def _flats(self) -> list[FlatPartition]:
        """Return the flat partitions of this rank, in the order of DeepSpeed's own (sub-)groups."""

    @abstractmethod
    def _masters(self) -> Sequence[torch.Tensor]:
        """Return the tensors of :meth:`_flats`."""

    def _located(self) -> Sequence[torch.Tensor]:
        """Return the tensors whose memory :meth:`_flats` depends on, beside that of the parameters."""
        return self._masters()

    @abstractmethod
    def _unpartitioned(self) -> tuple[list[Piece], list[Piece]]:
        """Return pieces of the parameters that are in no flat partition: (replicated, this rank's own slices)."""

    @abstractmethod
    def _check_supported(self) -> None:
        """Raise UnsupportedError for a variant of the stage that is not supported."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """Return JSON values of the layout, without hyperparameters, the same on all ranks."""

    @abstractmethod
    def finish_load(self) -> None:
        """Cast the working weights from the masters and gather them. Collective."""

    # ---- Adapter

    def cache_lookups(self) -> AbstractContextManager[None]:
        return self._inventory.cache.enabled()

    def flats(self) -> list[FlatPartition]:
        return self._inventory.cache.get("flats", self._known_flats)

    def _known_flats(self) -> list[FlatPartition]:
        nothing = torch.empty(0, device="cpu")
        known = self._keep("flats", lambda: [replace(flat, tensor=nothing) for flat in self._flats()])
        self._listed = [replace(flat, tensor=master) for flat, master in zip(known, self._masters(), strict=True)]
        return self._listed

    def _keep(self, key: str, compute: Callable[[], T]) -> T:
        """Return ``compute()``, called once for as long as the job has the same tensors."""
        return self._inventory.cache.keep(self.identity(), key, compute)

    def check_attached(self) -> None:
        require_same_engine(self.engine, self.module, self._zero)
        if self._base_optimizer is not self._wrapped:
            raise UnsupportedError(
                "ZeRO's inner optimizer was replaced after monitor.attach: call close() and attach the engine again"
            )
        optimizer_state.require_storable_groups(self._base_optimizer)
        self._optimizer_attributes.check()
        self._keep("attached", self._check_state)

    def unsaveable(self) -> Sequence[str]:
        return self._reused.found()

    def attributes(self) -> Mapping[str, OptimizerAttributes]:
        return {self._optimizer_attributes.kind: self._optimizer_attributes}

    def _check_state(self) -> None:
        self._check_supported()
        optimizer_state.require_by_parameter(self._base_optimizer)
        optimizer_state.require_storable(self._base_optimizer, self._name_of_state)
        known, groups = {id(flat.tensor) for flat in self.flats()}, self._base_optimizer.param_groups
        unknown = [index for index, group in enumerate(groups) if any(id(p) not in known for p in group["params"])]
        if unknown or len(groups) != self._group_count:
            raise UnsupportedError(
                f"{type(self._base_optimizer).__name__} has param groups or parameters that ZeRO does not know (group "
                f"{(unknown or [len(groups) - 1])[0]}), so they would not be saved; give them to "
                "deepspeed.initialize, or take them out"
            )

    def identity(self) -> Identity | None:
        return self._inventory.cache.get("identity", self._read_identity)

    def _read_identity(self) -> Identity | None:
        try:
            return self._reader.read(self.module, self._base_optimizer, self._located())
        except Exception:  # noqa: BLE001 - an unusual module or tensor: listing it anew raises a clear error
            return None

    def capture_run_state(self) -> Callable[[], dict[str, Any]]:
        state = self.run_state()
        return lambda: state

    def before_update(self, hook: Callable[[], None]) -> None:
        # Master weights and moments change only in the optimizer that ZeRO wraps.
        self._base_optimizer.register_step_pre_hook(Hook(self.hooks, lambda *_: hook()))

    def before_change(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` before every call that writes masters or moments, most of which do so through ``.data``.

        Scripts import ``safe_set_full_fp32_param`` and the like by name, so the methods they call are wrapped: at stage
        3 the optimizer's; at stages 1 and 2 one of each parameter, which DeepSpeed remakes on linking the master."""
        self.before_update(hook)
        hook = Hook(self.hooks, hook)
        self._base_optimizer.register_load_state_dict_pre_hook(lambda *_: hook())
        loading = ("load_checkpoint", "load_module_state_dict", "offload_states", "reload_states")
        wrap_methods(self.engine, loading, hook)
        wrap_methods(self._zero, _CHANGING, hook)
        wrap_methods(self._zero, ("_link_all_hp_params",), then=lambda: self._intercept_parameters(hook))
        self._intercept_parameters(hook)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._keep(
            "infos", lambda: self._inventory.infos(frozenset(fqn for flat in self.flats() for fqn in flat.fqns))
        )

    def owned(self) -> list[Piece]:
        """Return pieces of the flat partitions and their optimizer state, and a part of the replicated tensors."""
        replicated, sliced = self._unpartitioned()
        parts = partition_replicated([*replicated, *self._buffers()], self._rank, self._world_size)
        return [*self._flat_pieces(), *sliced, *parts]

    def held(self) -> list[Piece]:
        replicated, sliced = self._unpartitioned()
        pieces = [*self._flat_pieces(), *sliced, *replicated, *self._buffers()]
        return [piece for piece in pieces if piece.fragment.numel]

    def expected(self, slots: base.Slots) -> list[FragmentPlace]:
        replicated, sliced = self._unpartitioned()
        places = [FragmentPlace(one.fragment, one.tensor.dtype) for one in [*sliced, *replicated, *self._buffers()]]
        for flat in self.flats():
            state = self._base_optimizer.state.get(flat.tensor, {})
            live = optimizer_state.slots_of(state, flat.tensor)
            planned = optimizer_state.planned_slots(flat.tensor, state, live, _wanted_slots(flat, slots))
            for slot, dtype in {WEIGHTS: flat.tensor.dtype, **planned}.items():
                places += [FragmentPlace(Fragment(at.fqn, slot, at.start, at.numel), dtype) for at in flat.placements]
        return [place for place in places if place.fragment.numel]

    def prepare_load(self, slots: base.Slots, values: Mapping[Fragment, Any] = MappingProxyType({})) -> None:
        """Fit the slots of each flat partition to those that ``slots`` names for any parameter in it.

        Missing slots are created with zeros, others dropped. If ``slots`` names a slot for only some parameters of a
        partition, the others' pieces become zeros. ``values`` is not used: a partition's slot has many parameters."""
        for flat in self.flats():
            optimizer_state.fit_slots(self._base_optimizer, flat.tensor, _wanted_slots(flat, slots))
            state = self._base_optimizer.state.get(flat.tensor, {})
            for slot in optimizer_state.slots_of(state, flat.tensor):
                for place in flat.placements:
                    if slot not in slots.get(place.fqn, {}):
                        state[slot].narrow(0, place.offset, place.numel).zero_()

    def run_state(self) -> dict[str, Any]:
        """Return the run state, which is the same on all ranks."""
        scalars: dict[str, dict[str, Any]] = {}
        slots: dict[str, list[str]] = {}
        for flat in self.flats():
            names, values = self._state_of(flat)
            for fqn in flat.fqns:
                slots[fqn], scalars[fqn] = names, values  # all parameters of a partition share one copy
        return {
            "optimizer": type(self._base_optimizer).__name__,
            "param_groups": [describe_group(fqns, group) for fqns, group in self._groups()],
            "scalars": scalars,
            "slots": slots,
            "unused": self._reused.unused(),
            "beta_powers": self._beta_powers and self._beta_powers.state(self._base_optimizer),
            **engine_state(self.engine),
        }

    def check_run_state(self, state: Mapping[str, Any]) -> None:
        match_groups(state["param_groups"], self._groups())
        check_engine_state(self.engine, state)
        for flat in self.flats():
            self._restored_scalars(flat, optimizer_state.common_scalars(flat.fqns, state)[1], state)

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        common = {flat.fqns: optimizer_state.common_scalars(flat.fqns, state) for flat in self.flats()}
        restore_groups(state["param_groups"], self._groups())
        load_engine_state(self.engine, state)
        self._reused.resumed(state.get("unused"))
        for flat in self.flats():
            slots, saved = common[flat.fqns]
            scalars = self._restored_scalars(flat, saved, state)
            if optimizer_state.complete_state(self._base_optimizer, flat.tensor, slots, bool(scalars)):
                self._base_optimizer.state[flat.tensor].update(scalars)
        if self._beta_powers is not None:
            self._beta_powers.restore(self._base_optimizer, state.get("beta_powers"))

    def live_values(self) -> Iterator[LiveValue]:
        """Return buffers, and the state of the base optimizer. Stage 3 has no parameters in ``state_dict()``."""
        for fqn, buffer in self._inventory.buffers().items():
            yield LiveValue(f"model.state_dict()[{fqn!r}]", buffer)
        flats = {id(flat.tensor): flat for flat in self.flats()}
        for tensor, state in self._base_optimizer.state.items():
            flat = flats.get(id(tensor))
            for key, value in state.items():
                name = f"optimizer.state[{'?' if flat is None else f'partition with {flat.fqns[0]}'}][{key!r}]"
                if flat is None:
                    yield LiveValue(name, value)
                elif key not in optimizer_state.slots_of(state, flat.tensor):
                    yield LiveValue(name, value, stored=("framework", "scalars", flat.fqns[0], key))
                else:
                    for place in flat.placements:
                        yield LiveValue(name, value.narrow(0, place.offset, place.numel))
        yield from group_values(self._base_optimizer.param_groups, "optimizer.param_groups")
        for key, item in self.objects().items():
            yield LiveValue(f"engine.{key}.state_dict()", item.state_dict(), stored=("framework", key))

    def layout_facts(self) -> dict[str, Any]:
        facts = self._facts()
        hyper = [
            {key: one for key, one in live.items() if key != "params"} for live in self._base_optimizer.param_groups
        ]
        groups = zip(facts["param_groups"], as_json(hyper), strict=True)
        return {**facts, "param_groups": [{**group, "hyper": values} for group, values in groups]}

    # ---- shared by all stages

    def _intercept_parameters(self, hook: Callable[[], None]) -> None:
        for parameter in self._inventory.parameters().values():
            wrap_methods(parameter, ("set_full_hp_param",), hook)

    @property
    def _base_optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self._zero.optimizer
        return optimizer

    def _name_of_state(self, key: torch.Tensor) -> str:
        return next((f"the partition with {flat.fqns[0]}" for flat in self.flats() if flat.tensor is key), "a tensor")

    def _groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        fqns: dict[int, list[str]] = {}
        for flat in self.flats():
            fqns.setdefault(flat.group, []).extend(flat.fqns)
        return [(fqns.get(index, []), group) for index, group in enumerate(self._base_optimizer.param_groups)]

    def _flat_pieces(self) -> Iterator[Piece]:
        for flat in self.flats():
            tensors = {WEIGHTS: flat.tensor}
            state = self._base_optimizer.state.get(flat.tensor, {})
            tensors |= {slot: state[slot] for slot in optimizer_state.slots_of(state, flat.tensor)}
            for place in flat.placements:
                for slot, tensor in tensors.items():
                    fragment = Fragment(place.fqn, slot, place.start, place.numel)
                    yield Piece(fragment, tensor.detach().narrow(0, place.offset, place.numel))

    def _buffers(self) -> list[Piece]:
        return [whole_piece(fqn, BUFFER, buffer) for fqn, buffer in self._inventory.buffers().items()]

    def _state_of(self, flat: FlatPartition) -> tuple[list[str], dict[str, Any]]:
        state = self._base_optimizer.state.get(flat.tensor, {})
        slots, scalars = optimizer_state.slots_of(state, flat.tensor), {}
        for key, value in state.items():
            if key in slots:
                continue
            if isinstance(value, torch.Tensor) and value.ndim:
                raise UnsupportedError(
                    f"{type(self._base_optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a flat "
                    f"partition of {flat.tensor.numel()} elements: it cannot be split by parameter; use an "
                    "optimizer with state per element, such as AdamW"
                )
            where = f"optimizer state {key!r} of the partition with {flat.fqns[0]}"
            scalars[key] = optimizer_state.to_host(value, where)
        return slots, scalars

    def _restored_scalars(self, flat: FlatPartition, scalars: base.Values, saved: base.Values) -> dict[str, Any]:
        optimizer, kind = self._base_optimizer, saved.get("optimizer")
        group = optimizer.param_groups[flat.group]
        return optimizer_state.restored_scalars(optimizer, flat.tensor, group, scalars, kind)

    def _require_attributes(self, *attributes: str) -> None:
        for name in attributes:
            if not hasattr(self._zero, name):
                raise UnsupportedError(
                    f"{type(self._zero).__name__} of DeepSpeed {deepspeed.__version__} has no {name!r}: this release "
                    "is not supported; install 0.19"
                )


def _wanted_slots(flat: FlatPartition, slots: base.Slots) -> dict[str, str]:
    return {slot: dtype for fqn in flat.fqns for slot, dtype in slots.get(fqn, {}).items()}
