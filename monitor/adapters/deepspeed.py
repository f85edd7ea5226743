"""DeepSpeed engines: what their ZeRO stages have in common, and choosing the adapter of a stage.

A stage says where its flat fp32 partitions are and which piece of which parameter lies where in them
(:class:`Flat`); everything else here follows from that. Parameters that the optimizer does not hold
(frozen ones, mostly) are the stage's too. Reads and writes DeepSpeed's tensors in place, from the training
thread, between optimizer steps. It knows neither tensor nor pipeline nor expert parallelism, and refuses them.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from monitor.adapters.base import Adapter, Piece, TensorInfo
from monitor.adapters.hyper import describe_group, restore_groups, restore_scalar, scalar_device, snapshot
from monitor.adapters.inventory import Inventory, whole
from monitor.adapters.plain import PlainAdapter, complete_state, fit_slots, slots_of
from monitor.adapters.replicas import share
from store.errors import ModelMismatchError, UnsupportedError
from store.names import BUFFER, WEIGHTS, Fragment

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class Placement:
    """Where a piece of a parameter lies: elements [start, start + numel) of the flattened parameter are
    elements [offset, offset + numel) of this rank's flat partition."""

    fqn: str
    start: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Flat:
    """One flat partition of master weights on this rank, 1-d, to which the base optimizer's state is keyed.

    group: index of its param group. fqns: every parameter laid out in it over all ranks, in that order.
    placements: the pieces on this rank; what is between and behind them is padding.
    """

    tensor: torch.Tensor
    group: int
    fqns: tuple[str, ...]
    placements: tuple[Placement, ...]


class ZeroAdapter(ABC):
    """What every ZeRO stage shares; a subclass per family of stages says where things are."""

    framework = "deepspeed"

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.module: nn.Module = engine.module
        self._zero = engine.optimizer
        self._inventory = Inventory(self.module)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._refuse_what_is_not_data_parallel()
        self._refuse_this_stage()

    # ---- what a stage says

    @abstractmethod
    def flats(self) -> list[Flat]:
        """The flat partitions of this rank, in the order of DeepSpeed's own (sub-)groups."""

    @abstractmethod
    def _outside(self) -> tuple[list[Piece], list[Piece]]:
        """Pieces of the parameters that no flat partition holds: (replicated whole, this rank's own slices)."""

    @abstractmethod
    def _refuse_this_stage(self) -> None:
        """Raise UnsupportedError, naming it, for a variant of the stage that is not handled."""

    @abstractmethod
    def _stage_facts(self) -> dict[str, Any]:
        """JSON values of the stage's own layout, the same on all ranks."""

    @abstractmethod
    def finish_load(self) -> None:
        """See :class:`monitor.adapters.base.Adapter`."""

    # ---- the adapter's contract

    def completed_steps(self) -> int | None:
        """Steps at accumulation boundaries, those skipped for an overflow included, as DeepSpeed counts."""
        return int(self.engine.global_steps)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """See :class:`monitor.adapters.base.Adapter`."""
        return self._inventory.infos(frozenset(fqn for flat in self.flats() for fqn in flat.fqns))

    def owned(self) -> list[Piece]:
        """Pieces of the flat partitions and of their optimizer state, and a share of what is replicated."""
        replicated, sliced = self._outside()
        return [*self._flat_pieces(), *sliced, *share([*replicated, *self._buffers()], self._rank, self._world_size)]

    def held(self) -> list[Piece]:
        """As :meth:`owned`, with what is replicated whole on every rank."""
        replicated, sliced = self._outside()
        pieces = [*self._flat_pieces(), *sliced, *replicated, *self._buffers()]
        return [piece for piece in pieces if piece.fragment.numel]

    def prepare_load(self, slots: Mapping[str, Mapping[str, str]]) -> None:
        """Make the slots of each flat partition those that ``slots`` names for any parameter in it.

        Missing ones are created with zeros, others dropped; where ``slots`` names one for some parameters of
        a partition only, the others' pieces become zeros.
        """
        for flat in self.flats():
            wanted = {slot: dtype for fqn in flat.fqns for slot, dtype in slots.get(fqn, {}).items()}
            fit_slots(self._base(), flat.tensor, wanted)
            for slot in self._state_of(flat)[0]:
                for place in flat.placements:
                    if slot not in slots.get(place.fqn, {}):
                        self._states()[flat.tensor][slot].narrow(0, place.offset, place.numel).zero_()

    def run_state(self) -> dict[str, Any]:
        """See :class:`monitor.adapters.base.Adapter`. The same on all ranks."""
        scalars: dict[str, dict[str, Any]] = {}
        slots: dict[str, list[str]] = {}
        for flat in self.flats():
            names, values = self._state_of(flat)
            for fqn in flat.fqns:
                slots[fqn], scalars[fqn] = list(names), copy.deepcopy(values)
        return {
            "optimizer": type(self._base()).__name__,
            "param_groups": [describe_group(fqns, group) for fqns, group in self._groups()],
            "scalars": scalars,
            "slots": slots,
            **engine_state(self.engine),
        }

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """See :class:`monitor.adapters.base.Adapter`. Call it on every rank, after :meth:`prepare_load`."""
        scalars = {flat.fqns: _common_scalars(flat.fqns, state) for flat in self.flats()}
        load_engine_state(self.engine, state)
        restore_groups(state["param_groups"], self._groups())
        for flat in self.flats():
            self._load_scalars(flat, scalars[flat.fqns], state)

    def layout_facts(self) -> dict[str, Any]:
        """See :class:`monitor.adapters.base.Adapter`."""
        return {**engine_facts(self.engine, self._inventory), **self._stage_facts()}

    # ---- shared parts

    def _base(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self._zero.optimizer
        return optimizer

    def _states(self) -> Any:
        return self._base().state

    def _groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        fqns: dict[int, list[str]] = {}
        for flat in self.flats():
            fqns.setdefault(flat.group, []).extend(flat.fqns)
        return [(fqns.get(index, []), group) for index, group in enumerate(self._base().param_groups)]

    def _flat_pieces(self) -> Iterator[Piece]:
        for flat in self.flats():
            tensors = {WEIGHTS: flat.tensor}
            state = self._states().get(flat.tensor, {})
            tensors |= {slot: state[slot] for slot in self._state_of(flat)[0]}
            for place in flat.placements:
                for slot, tensor in tensors.items():
                    fragment = Fragment(place.fqn, slot, place.start, place.numel)
                    yield Piece(fragment, tensor.detach().narrow(0, place.offset, place.numel))

    def _buffers(self) -> list[Piece]:
        return [whole(fqn, BUFFER, buffer) for fqn, buffer in self._inventory.buffers().items()]

    def _state_of(self, flat: Flat) -> tuple[list[str], dict[str, Any]]:
        """(slots, scalars) of a flat partition's optimizer state."""
        state = self._states().get(flat.tensor, {})
        slots, scalars = slots_of(state, flat.tensor), {}
        for key, value in state.items():
            if key in slots:
                continue
            if isinstance(value, torch.Tensor) and value.ndim:
                raise UnsupportedError(
                    f"{type(self._base()).__name__} keeps {key!r} of shape {tuple(value.shape)} for a flat partition "
                    f"of {flat.tensor.numel()} elements: it cannot be taken apart by parameter; use an optimizer with "
                    "state per element, such as AdamW"
                )
            scalars[key] = snapshot(value, f"optimizer state {key!r} of the partition with {flat.fqns[0]}")
        return slots, scalars

    def _load_scalars(self, flat: Flat, common: tuple[set[str], dict[str, Any]], saved: Mapping[str, Any]) -> None:
        slots, scalars = common
        if not complete_state(self._base(), flat.tensor, slots, bool(scalars)):
            return
        state = self._states()[flat.tensor]
        group = self._base().param_groups[flat.group]
        for key, value in scalars.items():
            state[key] = restore_scalar(
                key,
                value,
                live=state.get(key),
                optimizer=self._base(),
                saved_by=saved.get("optimizer"),
                device=scalar_device(value, group, flat.tensor),
            )

    def _refuse_what_is_not_data_parallel(self) -> None:
        engine = self.engine
        if getattr(engine, "has_moe_layers", False):
            raise UnsupportedError("DeepSpeed MoE (expert parallelism) is not handled yet; use a dense model")
        size = dist.get_world_size(self._zero.dp_process_group)
        if size != self._world_size:
            raise UnsupportedError(
                f"ZeRO partitions over {size} of {self._world_size} ranks: tensor, pipeline or other model "
                "parallelism is not handled yet; use data parallelism over all ranks"
            )
        if getattr(self._zero, "zenflow", False):
            raise UnsupportedError("ZenFlow is not handled; remove zero_optimization.zenflow")

    def _need(self, *attributes: str) -> None:
        for name in attributes:
            if not hasattr(self._zero, name):
                raise UnsupportedError(
                    f"{type(self._zero).__name__} of DeepSpeed {deepspeed.__version__} has no {name!r}: this release "
                    "is not handled; 0.19 is"
                )


def engine_adapter(engine: Any) -> Adapter:
    """The adapter for an engine's ZeRO stage. Raises UnsupportedError, naming it, for what is not handled."""
    for base in type(engine).__mro__:
        if base.__name__ in {"PipelineEngine", "DeepSpeedHybridEngine"}:
            raise UnsupportedError(f"{base.__name__} is not handled yet; use deepspeed.initialize on a plain module")
    if engine.optimizer is None or type(engine.optimizer).__name__ == "DummyOptim":
        raise UnsupportedError("the DeepSpeed engine has no optimizer, so there is nothing to checkpoint; give it one")
    stage, kind = int(engine.zero_optimization_stage()), type(engine.optimizer).__name__
    if kind in {"DeepSpeedZeroOptimizer", "BF16_Optimizer"}:
        from monitor.adapters.deepspeed_zero12 import Zero12Adapter

        return Zero12Adapter(engine)
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        from monitor.adapters.deepspeed_zero3 import Zero3Adapter

        return Zero3Adapter(engine)
    if stage == 0 and engine.optimizer is engine.basic_optimizer:
        return Stage0Adapter(engine)
    raise UnsupportedError(
        f"DeepSpeed's {kind} at ZeRO stage {stage} is not handled; use stage 1, 2 or 3 (or stage 0 in fp32)"
    )


class Stage0Adapter(PlainAdapter):
    """An engine without ZeRO, in fp32: replicas, with DeepSpeed's counters and scheduler."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        super().__init__(engine.module, engine.optimizer, engine.data_parallel_group)

    def completed_steps(self) -> int | None:
        """Steps at accumulation boundaries."""
        return int(self.engine.global_steps)

    def run_state(self) -> dict[str, Any]:
        """See :class:`monitor.adapters.base.Adapter`."""
        return {**super().run_state(), **engine_state(self.engine)}

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """See :class:`monitor.adapters.base.Adapter`."""
        load_engine_state(self.engine, state)
        super().load_run_state(state)

    def layout_facts(self) -> dict[str, Any]:
        """See :class:`monitor.adapters.base.Adapter`."""
        return {**super().layout_facts(), **engine_facts(self.engine, self._inventory)}


def engine_state(engine: Any) -> dict[str, Any]:
    """The engine's own run state: ``counters``, ``loss_scaler``, ``lr_scheduler``."""
    counters = {name: int(getattr(engine, name)) for name in _COUNTERS}
    counters["gradient_accumulation_steps"] = int(engine.gradient_accumulation_steps())
    scheduler = engine.lr_scheduler
    return {
        "counters": counters,
        "loss_scaler": _scaler_state(engine.optimizer),
        "lr_scheduler": None if scheduler is None else copy.deepcopy(scheduler.state_dict()),
    }


def load_engine_state(engine: Any, state: Mapping[str, Any]) -> None:
    """The inverse of :func:`engine_state`. State that no engine saved has its counters derived from ``step``."""
    counters = state.get("counters") or _counters_from_steps(engine, state)
    accumulation = int(engine.gradient_accumulation_steps())
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, int(counters[name]))
    # Gradients accumulated in part are not saved: the window starts anew, and boundaries must stay boundaries.
    windows = int(counters["micro_steps"]) // int(counters["gradient_accumulation_steps"])
    engine.micro_steps = windows * accumulation
    if state.get("lr_scheduler") is not None and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(copy.deepcopy(state["lr_scheduler"]))
    _load_scaler(engine.optimizer, state.get("loss_scaler"))


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


def _scaler_state(optimizer: Any) -> dict[str, Any] | None:
    autocast = getattr(optimizer, "torch_autocast_gradscaler", None)
    if autocast is not None:
        return {"class": type(autocast).__name__, **autocast.state_dict()}
    scaler = getattr(optimizer, "loss_scaler", None)
    if scaler is None:
        return None
    plain = {key: value for key, value in vars(scaler).items() if isinstance(value, bool | int | float)}
    return {"class": type(scaler).__name__, **plain}


def _load_scaler(optimizer: Any, saved: Mapping[str, Any] | None) -> None:
    if saved is None:
        return
    autocast = getattr(optimizer, "torch_autocast_gradscaler", None)
    scaler = getattr(optimizer, "loss_scaler", None) if autocast is None else autocast
    if scaler is None or type(scaler).__name__ != saved["class"]:
        return  # another precision scales in its own way, and starts with its own configuration
    if autocast is not None:
        autocast.load_state_dict({key: value for key, value in saved.items() if key != "class"})
    elif getattr(scaler, "dynamic", False):
        for name in _SCALER_STATE:
            setattr(scaler, name, saved[name])


def _common_scalars(fqns: Sequence[str], saved: Mapping[str, Any]) -> tuple[set[str], dict[str, Any]]:
    """(slots, scalars) that the parameters of a flat partition had in common; empty if none had any state.

    A flat partition has one step count for all of them. Raises ModelMismatchError where they differ.
    """
    scalars_of, slots_of = saved["scalars"], saved.get("slots", {})
    known = [fqn for fqn in fqns if scalars_of.get(fqn) or slots_of.get(fqn)]
    if not known:
        return set(), {}
    first = scalars_of.get(known[0], {})
    for fqn in known[1:]:
        other = scalars_of.get(fqn, {})
        if first.keys() != other.keys() or any(float(first[key]) != float(other[key]) for key in first):
            raise ModelMismatchError(
                f"{known[0]} and {fqn} share a flat partition but were saved with different optimizer scalars "
                f"({_brief(first)} and {_brief(other)}); resume with the param groups of the run that wrote them, or "
                "without ZeRO"
            )
    return {slot for fqn in known for slot in slots_of.get(fqn, ())}, dict(first)


def _brief(scalars: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={float(value):g}" for key, value in scalars.items()) or "none"


def engine_facts(engine: Any, inventory: Inventory) -> dict[str, Any]:
    """What a writer of DeepSpeed's own files needs from the engine, whatever the stage. JSON values."""
    optimizer = engine.optimizer
    return {
        "framework": "deepspeed",
        "ds_version": str(deepspeed.__version__),
        "zero_stage": int(engine.zero_optimization_stage()),
        "world_size": dist.get_world_size(),
        "mp_world_size": int(engine.mp_world_size),
        "dtype": _precision(engine),
        "ds_config": as_json(engine._config._param_dict),
        "zero_optimizer": type(optimizer).__name__,
        "optimizer": type(engine.basic_optimizer).__name__,
        "loss_scaler": _scaler_state(optimizer),
        "dynamic_loss_scale": bool(getattr(optimizer, "dynamic_loss_scale", False)),
        "clip_grad": float(getattr(optimizer, "clip_grad", 0.0)),
        "elastic_checkpoint": bool(getattr(optimizer, "elastic_checkpoint", False)),
        "state_dict_names": inventory.state_dict_names(),
        "buffer_names": list(engine._get_buffer_names()),
        "shared_params": {alias: fqn for fqn, names in inventory.aliases().items() for alias in names},
    }


def _precision(engine: Any) -> str:
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp16" if engine.fp16_enabled() else "fp32"


def as_json(value: Any) -> Any:
    """``value`` as it comes back from JSON; what JSON cannot say becomes a string."""
    return json.loads(json.dumps(value, default=str))
