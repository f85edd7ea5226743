"""Capture and restore the hyperparameters of param groups; compare those of a script with those that were saved.

Training moves some of them: schedulers move ``lr``, OneCycleLR moves ``betas``. So a save records, beside the values of
its step, those that the script had constructed before training, and a resume compares constructed with constructed."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch

from monitor.adapters.base import LiveValue
from monitor.adapters.optimizer_state import equal, to_host
from store.errors import ModelMismatchError
from store.text import listed

IMPLEMENTATION: Final = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters that choose an implementation of the same step: a load keeps them as configured."""

_LIVE = IMPLEMENTATION | {"param_names"}  # what a load keeps; names belong to the live grouping

_NOT_COMPARED = frozenset({"initial_lr", "param_names"})  # the first is compared as ``lr``
_LONGEST = 80  # characters of a value in a message

Prefer = Literal["store", "script"]
LiveGroups = Sequence[tuple[Sequence[str], dict[str, Any]]]  # (fqns, param group) of each group of a live optimizer


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

    groups: hyperparameters by fqn, ``lr`` without what a scheduler made of it. schedules: the state of the engine's
    schedule, and of those among the objects in ``state=``; None for others."""

    groups: Mapping[str, Mapping[str, Any]]
    schedules: Sequence[Any]

    @classmethod
    def of(cls, framework: Mapping[str, Any], objects: Sequence[Any], states: Sequence[Any]) -> "Constructed":
        """Take them from the framework's run state and the states of the objects, before training."""
        groups = {fqn: _unmoved(group["hyper"]) for group in framework["param_groups"] for fqn in group["params"]}
        schedules = [_schedule(*pair) for pair in zip(objects, states, strict=True)]
        return cls(groups, copy.deepcopy([framework.get("lr_scheduler"), *schedules]))

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
    if not keys and not is_schedule(item):
        return None
    return {key: state[key] for key in keys or state} if isinstance(state, Mapping) else None


def _unmoved(hyper: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return hyperparameters without those that a scheduler is known to have moved."""
    cycled = {"betas", "momentum"} if "max_momentum" in hyper else set[str]()
    kept = {key: value for key, value in hyper.items() if key not in cycled}
    return {**kept, "lr": hyper["initial_lr"]} if "initial_lr" in hyper else kept


def reconcile(
    framework: Mapping[str, Any],
    schedules: Sequence[tuple[str, Any, Any]],
    live: Sequence[Mapping[str, Any]],
    script: Constructed,
    prefer: Prefer,
) -> tuple[Mapping[str, Any], Sequence[Any], Constructed, tuple[str, ...]]:
    """Choose between the store's hyperparameters and schedules, and those of the script. Changes nothing.

    Of the script's are taken those that it changed and training had not moved; ``lr`` is moved in proportion. Returns
    the framework's run state and the states of the schedules to go on with, what later saves record as constructed, and
    a line for each difference.

    Args:
        framework: the framework's run state in the store.
        schedules: label, state, and state when constructed, of each object in ``state=``, as the store has them.
        live: the param groups of the job, as in a run state.
        script: what the script constructed.

    Raises:
        ModelMismatchError: A value of the script needs other optimizer state than the store holds."""
    lines: dict[str, list[str]] = {}
    choose = partial(_choose, prefer=prefer, lines=lines)
    groups, kept = list[Mapping[str, Any]](), dict(script.groups)
    saved = {fqn: group for group in framework["param_groups"] for fqn in group["params"]}
    for index, group in enumerate(live):
        found = next((saved[fqn] for fqn in group["params"] if fqn in saved), None)
        if found is not None:
            before, now = found.get("constructed"), script.of_group(group)
            before, now = before or _unmoved(found["hyper"]), now or _unmoved(group["hyper"])
            if prefer == "script":
                _require_same_state(before, now, str(found.get("optimizer") or framework.get("optimizer")))
            hyper, own = choose(f"param group {index}", found["hyper"], before, now)
            groups.append({**group, "hyper": hyper})
            kept |= dict.fromkeys(group["params"], own)
    first = [*framework.get("constructed_schedules", ()), None][0]
    pairs = zip((("the engine", framework.get("lr_scheduler"), first), *schedules), script.schedules, strict=False)
    chosen = [choose(*one, now) for one, now in pairs]
    if prefer == "script":
        framework = {**framework, "param_groups": groups, "lr_scheduler": chosen[0][0]}
    rates = any(line.startswith("lr ") for line in lines)  # which base_lrs repeats
    notes = [line.replace("{}", listed(labels, 8), 1) for line, labels in lines.items()]
    notes = [note for note in notes if not (rates and "base_lrs of " in note)]
    return framework, [state for state, _ in chosen[1:]], Constructed(kept, [own for _, own in chosen]), tuple(notes)


def _choose(
    label: str, saved: Any, before: Any, now: Any, *, prefer: Prefer, lines: dict[str, list[str]]
) -> tuple[Any, Any]:
    """Return the values to go on with, and those to record as constructed. Each difference is added to ``lines``."""
    if saved is None or before is None or now is None:
        return saved, now
    used = {**_merged(saved, before, now), **_moved_lr(saved, before, now)} if prefer == "script" else saved
    computed = {key: now[key] for key in IMPLEMENTATION & now.keys()}
    for path, old, new, taken in _differences(before, now, {**used, **computed}):
        end = "the store's is used; `resume: {hyperparameters: script}` takes the script's"
        if prefer == "script" or path in computed:
            end = f"{_shown(taken)} is used, since training had moved it"
            end = "the script's is used" if equal(taken, new) else end
        line = f"{path} of {{}} is {_shown(old)} in the store and {_shown(new)} in this script: {end}"
        lines.setdefault(line, []).append(label)
    return used, now if prefer == "script" else {**now, **before, **computed}


def _require_same_state(before: Mapping[str, Any], now: Mapping[str, Any], optimizer: str) -> None:
    for key in ("amsgrad", "centered", "momentum"):
        old, new = (bool(values[key]) if key in values else None for values in (before, now))
        if None not in (old, new) and old != new and not (key == "momentum" and optimizer == "SGD"):
            raise ModelMismatchError(
                f"{key} is {before[key]} in the store and {now[key]} in this script, and decides which state "
                f"{optimizer} keeps, so the script's cannot be taken: construct the optimizer with the store's, or "
                "leave out `resume: {hyperparameters: script}`"
            )


def _moved_lr(saved: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the learning rate if the script changed it, moved by the factor that training had moved the saved one."""
    if "lr" not in now or "lr" not in before or equal(now["lr"], before["lr"]):
        return {}
    moved = not equal(saved["lr"], before["lr"]) and bool(before["lr"])
    rate = now["lr"] * (saved["lr"] / before["lr"]) if moved else now["lr"]
    return {"lr": rate, **({"initial_lr": now["lr"]} if "initial_lr" in saved else {})}


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
    """Yield (path, before, now, used) of what differs. A key that begins with ``_`` is a schedule's position."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in (key for key in before if key in now and key in used and key not in _NOT_COMPARED):
            if key == "_schedulers" or not str(key).startswith("_"):
                yield from _differences(before[key], now[key], used[key], f"{path}.{key}" if path else str(key))
    elif isinstance(before, list) and before and isinstance(before[0], Mapping):
        for index, parts in enumerate(zip(before, now, used, strict=False)):
            yield from _differences(*parts, f"{path}[{index}]")
    elif not equal(before, now):
        yield path, before, now, used


def _shown(value: Any) -> str:
    text = str(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def describe_group(fqns: Iterable[str], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group as ``{"params": [fqn, ...], "hyper": {lr, betas, ...}}``."""
    hyper = {
        key: to_host(value, f"hyperparameter {key!r} of an optimizer param group")
        for key, value in group.items()
        if key != "params"
    }
    return {"params": list(fqns), "hyper": hyper}


def group_values(groups: Iterable[Mapping[str, Any]], name: str, first: int = 0) -> Iterator[LiveValue]:
    """Return the hyperparameters of live param groups, and where :func:`describe_group` puts them in the run state.

    first: the index there of the first one."""
    for index, group in enumerate(groups):
        for key, value in group.items():
            if key != "params":
                stored = ("framework", "param_groups", first + index, "hyper", key)
                yield LiveValue(f"{name}[{index}][{key!r}]", value, stored=stored)


def match_groups(saved: Sequence[Mapping[str, Any]], live: LiveGroups) -> list[Mapping[str, Any]]:
    """Return the saved hyperparameters of each live group, matched by the parameters in it, not by position.

    Changes nothing. Raises ModelMismatchError if a group has no parameter in the saved state, parameters that were
    saved with different values, or a tensor that the saved value does not fit."""
    hyper_of = {fqn: group["hyper"] for group in saved for fqn in group["params"]}
    matched = [_hyper_for(index, fqns, hyper_of) for index, (fqns, _) in enumerate(live)]
    for index, ((_, group), hyper) in enumerate(zip(live, matched, strict=True)):
        for key, value in hyper.items():
            if key not in _LIVE:
                _check_same_shape(index, key, group.get(key), value)
    return matched


def restore_groups(saved: Sequence[Mapping[str, Any]], live: LiveGroups) -> None:
    """Restore saved hyperparameters of live groups. Raises the errors of :func:`match_groups` before any change."""
    for (_, group), hyper in zip(live, match_groups(saved, live), strict=True):
        for key, value in hyper.items():
            if key not in _LIVE:
                group[key] = _like(group.get(key), value)


def _check_same_shape(index: int, key: str, live: Any, value: Any) -> None:
    if not isinstance(live, torch.Tensor):
        return
    number = isinstance(value, bool | int | float)
    shape = value.shape if isinstance(value, torch.Tensor) else torch.Size() if number else None
    if shape is None or not _can_broadcast(shape, live.shape):
        raise ModelMismatchError(
            f"{key!r} of param group {index} is a tensor of shape {tuple(live.shape)} here and was saved as "
            f"{value if shape is None or number else f'one of shape {tuple(shape)}'}; configure the optimizer as "
            "in the run that was saved"
        )


def _can_broadcast(shape: torch.Size, live: torch.Size) -> bool:
    """Return whether ``copy_`` would broadcast ``shape`` to ``live``, as it does for a number."""
    return len(shape) <= len(live) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(live), strict=False))


def _hyper_for(index: int, fqns: Sequence[str], hyper_of: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    known = [fqn for fqn in fqns if fqn in hyper_of]
    if not known:
        if not fqns:
            return {}
        raise ModelMismatchError(
            f"param group {index} (with {fqns[0]}) has no parameter in the saved state; resume with the model and "
            "the optimizer that wrote it"
        )
    first = hyper_of[known[0]]
    for fqn in known[1:]:
        same = hyper_of[fqn] is first  # as of one saved group
        differing = [] if same else [k for k in first if k not in _LIVE and not equal(first[k], hyper_of[fqn].get(k))]
        if differing:
            raise ModelMismatchError(
                f"param group {index} joins {known[0]} and {fqn}, which were saved with different "
                f"{', '.join(differing)}; split the param group as in the run that was saved"
            )
    return first


def _like(live: Any, value: Any) -> Any:
    """Return the saved value with the type of the live one: a list becomes a tuple again (JSON has no tuples)."""
    if isinstance(live, torch.Tensor):
        with torch.no_grad():
            return live.copy_(torch.as_tensor(value))
    if isinstance(value, torch.Tensor):
        return value.clone()
    return tuple(value) if isinstance(live, tuple) and isinstance(value, list) else copy.deepcopy(value)
