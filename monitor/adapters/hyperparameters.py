"""Compare the hyperparameters and schedules of a script with those of the run that was saved.

Training moves some of them: schedulers move ``lr``, OneCycleLR moves ``betas``. So a save records, beside the values of
its step, those that the script had constructed before training, and a resume compares constructed with constructed.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from monitor.adapters.optimizer_state import IMPLEMENTATION, equal
from store.errors import ModelMismatchError
from store.text import listed

_STATE_MAKING = frozenset({"amsgrad", "centered"})
"""Hyperparameters that decide which state an optimizer keeps. So does ``momentum``, except in SGD."""

_CYCLED = frozenset({"betas", "momentum"})  # by OneCycleLR and CyclicLR, which add ``max_momentum``
_NOT_COMPARED = frozenset({"initial_lr", "param_names"})  # the first is compared as ``lr``
_LONGEST = 80  # characters of a value in a message

Prefer = Literal["store", "script"]


def is_schedule(item: Any) -> bool:
    """Return whether a user object is a learning-rate schedule, which counts steps and not data."""
    if isinstance(item, torch.optim.lr_scheduler.LRScheduler) or getattr(item, "counts_steps", False):
        return True
    if hasattr(item, "step_with_optimizer"):  # Accelerate's wrapper
        return is_schedule(item.scheduler)
    return any(base.__module__ == "deepspeed.runtime.lr_schedules" for base in type(item).__mro__)


@dataclass(frozen=True)
class Constructed:
    """Values as a script constructed them, before training.

    groups: hyperparameters by fqn, ``lr`` without what a scheduler made of it. schedules: the states of the schedules
    among the objects in ``state=``, None for others, and of the engine's as the last one."""

    groups: Mapping[str, Mapping[str, Any]]
    schedules: Sequence[Any]

    @classmethod
    def of(cls, framework: Mapping[str, Any], objects: Sequence[Any], states: Sequence[Any]) -> "Constructed":
        """Take them from the framework's run state and the states of the objects, before training."""
        groups = {fqn: _unmoved(group["hyper"]) for group in framework["param_groups"] for fqn in group["params"]}
        schedules = [_schedule(*pair) for pair in zip(objects, states, strict=True)]
        return cls(groups, copy.deepcopy([*schedules, framework.get("lr_scheduler")]))

    def of_group(self, group: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the values of a param group in a run state; None if it was added later."""
        return next((self.groups[fqn] for fqn in group["params"] if fqn in self.groups), None)

    def joined(self, framework: Mapping[str, Any]) -> dict[str, Any]:
        """Return the framework's run state with these values in it; those of a group that was added later are None."""
        groups = [{**group, "constructed": self.of_group(group)} for group in framework["param_groups"]]
        return {**framework, "param_groups": groups, "constructed_schedules": self.schedules}


def _schedule(item: Any, state: Any) -> Any:
    """Return the part of an object's state that is a schedule's; None if it is none."""
    keys = getattr(item, "schedules", ())
    return {key: state[key] for key in keys} if keys else state if is_schedule(item) else None


def _unmoved(hyper: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**hyper, "lr": hyper["initial_lr"]} if "lr" in hyper and "initial_lr" in hyper else hyper


def _constructed_before(group: Mapping[str, Any], framework: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values that the saved run had constructed; of older stores, those that no schedule can have moved."""
    if group.get("constructed") is not None:
        known: Mapping[str, Any] = group["constructed"]
        return known
    hyper = _unmoved(group["hyper"])
    moved = _CYCLED if "max_momentum" in hyper else frozenset[str]()
    if framework.get("lr_scheduler") is not None and "initial_lr" not in hyper:
        moved |= {"lr"}
    return {key: value for key, value in hyper.items() if key not in moved}


class SavedSchedule(NamedTuple):
    """A schedule's state in the store, at the save and as the run that was saved had constructed it."""

    label: str
    state: Any
    constructed: Any


@dataclass(frozen=True)
class Reconciled:
    """What a resume goes on with."""

    framework: Mapping[str, Any]
    schedules: Sequence[Any]  # states, by index
    constructed: Constructed  # recorded by later saves
    notes: tuple[str, ...]  # a line for each difference


def reconcile(
    framework: Mapping[str, Any],
    schedules: Sequence[SavedSchedule],
    live: Sequence[Mapping[str, Any]],
    script: Constructed,
    prefer: Prefer,
) -> Reconciled:
    """Choose between the store's hyperparameters and schedules, and those of the script. Changes nothing.

    Of the script's are taken those that it changed and training had not moved; ``lr`` is moved in proportion.

    Args:
        framework: the framework's run state in the store.
        schedules: what the store has of those of ``script``, one for each; not the engine's.
        live: the param groups of the job, as in a run state.
        script: what the script constructed.

    Raises:
        ModelMismatchError: A value of the script needs other optimizer state than the store holds.
    """
    groups, kept, lines = _reconcile_groups(framework, live, script, prefer)
    notes = [line.replace("{}", listed(indices, 8), 1) for line, indices in lines.items()]
    engine = SavedSchedule(
        "the engine", framework.get("lr_scheduler"), [None, *framework.get("constructed_schedules", ())][-1]
    )
    states, own = [one.state for one in (*schedules, engine)], list(script.schedules)
    for index, (label, state, before) in enumerate((*schedules, engine)):
        now = own[index]
        if before is None or now is None or state is None:
            continue
        if prefer == "script":
            states[index] = _merged(state, before, now)
        else:
            own[index] = before
        notes += [
            _line(f"{path} of {label}", *values, prefer)
            for path, *values in _differences(before, now, states[index])
            if not (lines and path.endswith("base_lrs"))
        ]
    if prefer == "script":
        framework = {**framework, "param_groups": groups, "lr_scheduler": states[-1]}
    return Reconciled(framework, states[:-1], Constructed(kept, own), tuple(notes))


def _reconcile_groups(
    framework: Mapping[str, Any], live: Sequence[Mapping[str, Any]], script: Constructed, prefer: Prefer
) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Mapping[str, Any]], Mapping[str, Sequence[int]]]:
    """Return the param groups to go on with, the constructed values by fqn, and lines with the groups they hold for."""
    saved = {fqn: group for group in framework["param_groups"] for fqn in group["params"]}
    groups, kept, lines = list[Mapping[str, Any]](), dict(script.groups), dict[str, list[int]]()
    for index, group in enumerate(live):
        found = next((saved[fqn] for fqn in group["params"] if fqn in saved), None)
        if found is None:
            continue
        before, now = _constructed_before(found, framework), script.of_group(group) or _unmoved(group["hyper"])
        both = [key for key in now if key in before and key not in _NOT_COMPARED]
        changed, hyper = [key for key in both if not equal(before[key], now[key])], dict(found["hyper"])
        own = {**now, **before, **{key: now[key] for key in IMPLEMENTATION & now.keys()}}
        if prefer == "script":
            _require_same_state(changed, before, now, str(framework.get("optimizer")))
            hyper |= {key: _merged(hyper.get(key), before[key], now[key]) for key in changed}
            if "lr" in changed:
                hyper |= _moved_lr(found["hyper"], before["lr"], now["lr"])
            own = dict(now)
        for key in changed:
            name, computed = f"{key} of param group {{}}", key in IMPLEMENTATION
            used = now[key] if computed else hyper.get(key)
            line = _line(name, before[key], now[key], used, "script" if computed else prefer)
            lines.setdefault(line, []).append(index)
        groups.append({**group, "hyper": hyper})
        kept |= dict.fromkeys(group["params"], own)
    return groups, kept, lines


def _require_same_state(
    changed: Sequence[str], before: Mapping[str, Any], now: Mapping[str, Any], optimizer: str
) -> None:
    for key in changed:
        switched = key == "momentum" and optimizer != "SGD" and bool(before[key]) != bool(now[key])
        if key in _STATE_MAKING or switched:
            raise ModelMismatchError(
                f"{key} is {before[key]} in the store and {now[key]} in this script, and decides which state "
                f"{optimizer} keeps, so the script's cannot be taken: construct the optimizer with the store's, or "
                "leave out `resume: {hyperparameters: script}`"
            )


def _moved_lr(saved: Mapping[str, Any], before: Any, now: Any) -> dict[str, Any]:
    """Return the script's ``lr``, moved by the factor that training had moved the saved one by."""
    moved = now if equal(saved["lr"], before) or not before else now * (saved["lr"] / before)
    return {"lr": moved, **({"initial_lr": now} if "initial_lr" in saved else {})}


def _merged(saved: Any, before: Any, now: Any) -> Any:
    """Return ``saved`` with what the script changed from ``before`` to ``now`` and training had not moved."""
    parts = (saved, before, now)
    if equal(before, now):
        return saved
    if all(isinstance(part, Mapping) for part in parts):
        both = before.keys() & now.keys()
        return {key: _merged(item, before[key], now[key]) if key in both else item for key, item in saved.items()}
    if all(isinstance(part, list | tuple) and len(part) == len(saved) for part in parts):
        return type(saved)(map(_merged, saved, before, now))
    return now if equal(saved, before) else saved


def _differences(before: Any, now: Any, used: Any, path: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield (path, before, now, used) of the settings of a schedule that differ; its position begins with ``_``."""
    if equal(before, now):
        return
    nested = isinstance(before, list) and isinstance(now, list) and len(before) == len(now) and before
    if nested and isinstance(before[0], Mapping):
        for index, pair in enumerate(zip(before, now, used, strict=False)):
            yield from _differences(*pair, f"{path}[{index}]")
    elif isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in (key for key in before if key in now and key in used):
            if key == "_schedulers" or not str(key).startswith("_"):
                yield from _differences(before[key], now[key], used[key], f"{path}.{key}" if path else str(key))
    else:
        yield path, before, now, used


def _line(name: str, before: Any, now: Any, used: Any, prefer: Prefer) -> str:
    if prefer == "store":
        end = "the store's is used; `resume: {hyperparameters: script}` takes the script's"
    else:
        end = "the script's is used" if equal(used, now) else f"{_shown(used)} is used, since training had moved it"
    return f"{name} is {_shown(before)} in the store and {_shown(now)} in this script: {end}"


def _shown(value: Any) -> str:
    text = str(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
