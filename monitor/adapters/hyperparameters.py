"""Capture and restore the hyperparameters of param groups; compare those of a script with those that were saved.

Training moves some of them: schedulers move ``lr``, OneCycleLR moves ``betas``. So a save records, beside the values of
its step, those that the script had constructed before training, and a resume compares constructed with constructed."""

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import lru_cache, partial, reduce
from itertools import islice
from types import FunctionType, MethodType
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from monitor.adapters.base import Groups, LiveValue
from monitor.adapters.optimizer_state import equal, to_host
from store.errors import ModelMismatchError
from store.schema import digest
from store.text import listed

IMPLEMENTATION: Final = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters that choose an implementation of the same step: a load keeps them as configured."""

_LIVE = IMPLEMENTATION | {"param_names"}  # what a load keeps; names belong to the live grouping
_CYCLED = frozenset({"betas", "momentum"})  # what OneCycleLR and CyclicLR move besides the learning rate
_NOT_COMPARED = frozenset({"initial_lr", "param_names"})  # the first is compared as ``lr``
_SCRIPTS = "the script's is used"
_KEPT = "the store's is used; `resume: {hyperparameters: script}` takes the script's"
_LONGEST = 80  # characters of a value in a message
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
_FEW = 64  # elements of a value that are looked at while training waits
Prefer = Literal["store", "script"]
Hyperparameters = Mapping[str, Mapping[str, Any]]  # by fqn
LiveGroups = Sequence[tuple[Sequence[str], dict[str, Any]]]  # (fqns, param group) of each group of a live optimizer


def is_schedule(item: Any) -> bool:
    """Return whether a user object is a learning-rate schedule, which counts steps and not data."""
    if isinstance(item, torch.optim.lr_scheduler.LRScheduler) or getattr(item, "counts_steps", False):
        return True
    if hasattr(item, "step_with_optimizer"):  # Accelerate's wrapper
        return is_schedule(item.scheduler)
    return any(base.__module__ == "deepspeed.runtime.lr_schedules" for base in type(item).__mro__)


class Constructed(NamedTuple):
    """What a script constructed: hyperparameters by fqn, and the settings of schedules by label."""

    groups: Hyperparameters
    schedules: Mapping[str, Any]


_COUNTERS = frozenset({"last_epoch", "_step_count", "last_batch_iteration"})  # in a schedule: where it stands
_STEPS = tuple(dict.fromkeys(int(1.03**power) for power in range(470)))  # up to a million, 3 % apart


def settings_of(schedule: Any, prefix: str = "") -> dict[str, Any]:
    """Return the settings of a schedule by path, as plain data: functions by what they compute."""
    found: dict[str, Any] = {}
    for key, value in getattr(getattr(schedule, "scheduler", schedule), "__dict__", found).items():
        items = enumerate(value) if isinstance(value, list | tuple) else ()
        inner = {key: value} if is_schedule(value) else {f"{key}.{at}": one for at, one in items if is_schedule(one)}
        for name, one in inner.items():
            found |= settings_of(one, f"{prefix}{name}.")
        if not inner and key not in _COUNTERS and (setting := _setting(value)) is not None:
            found[f"{prefix}{key}"] = setting
    return found


def _setting(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return list(map(_setting, value))
    if isinstance(value, dict):
        return {key: _setting(item) for key, item in value.items()}
    if isinstance(value, FunctionType | MethodType | partial):
        factors: list[str] = []
        with suppress(Exception):  # a table ends somewhere
            factors += (f"{float(value(step)):.6g}" for step in _STEPS)
        return f"a function ({digest(repr(factors).encode())[:8]})"
    return to_host(value, "") if isinstance(value, bool | int | float | str | torch.Tensor) else None


_DERIVED = frozenset({"base_lrs", "_last_lr", "_schedule_phases"})  # in a schedule: the values of param groups, lengths


def constructed(framework: Mapping[str, Any]) -> Hyperparameters:
    """Return the hyperparameters in a framework's run state of before training; ``lr`` as no scheduler had moved it."""
    return {fqn: _unmoved(group["hyper"]) for group in framework["param_groups"] for fqn in group["params"]}


def hyperparameters_digest(groups: Iterable[Mapping[str, Any]]) -> str:
    """Return a digest of what a load restores into param groups, as far as :func:`host_value` tells."""
    return digest("".join(map(_group_digest, groups)).encode())


def _group_digest(group: Mapping[str, Any]) -> str:
    items = tuple(item for item in group.items() if item[0] not in _LIVE and item[0] != "params")
    fixed = all(type(one) in _PLAIN or (type(one) is tuple and _PLAIN.issuperset(map(type, one))) for _, one in items)
    return _digest_of(items) if fixed else _digest_of.__wrapped__(items)


@lru_cache(1 << 13)  # groups with different values
def _digest_of(items: tuple[tuple[str, Any], ...]) -> str:
    return digest(repr(sorted([str(key), repr(host_value(value))] for key, value in items)).encode())


def host_value(value: Any, depth: int = 3) -> Any:
    """Return numbers, texts and bytes, and the first ones in collections, arrays and tensors; equal ones alike.

    None for others, and for tensors on a device, since reading one waits."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not (value.is_quantized or value.is_nested)
    if plain and value.is_cpu and value.layout is torch.strided:
        with suppress(RuntimeError):  # a dtype that has no numbers in Python
            few = value.detach()
            while few.numel() > _FEW and not few.is_contiguous() and few.ndim > 1:
                few = few[0]  # to flatten it would copy all of it
            value = few.flatten()[:_FEW].tolist() if value.ndim else few.item()
    if isinstance(value, np.ndarray | np.generic):
        value = value.ravel()[:_FEW].tolist() if value.ndim else value.item()
    if type(value) is int and abs(value) >= 1 << 53:
        return hex(value)  # a float would round it
    if type(value) in (bool, int, float):
        return value + 0.0  # -0.0 equals 0.0
    if isinstance(value, dict):
        value = [len(value), *((key, value[key]) for key in sorted(value, key=str)[:_FEW])]
    if isinstance(value, set | frozenset):
        value = sorted((one for one in value if type(one) in _PLAIN), key=repr)
    if isinstance(value, list | tuple | deque):
        return [len(value), *(host_value(one, depth - 1) for one in islice(value, _FEW + 1))] if depth else None
    return value if type(value) in _PLAIN else None


def _of_group(values: Hyperparameters, group: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((values[fqn] for fqn in group["params"] if fqn in values), None)


def with_constructed(framework: Mapping[str, Any], values: Constructed) -> dict[str, Any]:
    """Return the framework's run state with constructed values in it: None for a group that was added later."""
    groups = [{**group, "constructed": _of_group(values.groups, group)} for group in framework["param_groups"]]
    return {**framework, "param_groups": groups, **({"schedules": values.schedules} if values.schedules else {})}


def _unmoved(hyper: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return hyperparameters without those that a scheduler is known to have moved."""
    kept = {key: value for key, value in hyper.items() if key not in _CYCLED or "max_momentum" not in hyper}
    return {**kept, "lr": hyper["initial_lr"]} if "initial_lr" in hyper else kept


def reconcile(
    framework: Mapping[str, Any], live: Sequence[Mapping[str, Any]], script: Hyperparameters, prefer: Prefer
) -> tuple[Mapping[str, Any], Hyperparameters, tuple[str, ...]]:
    """Choose between the store's hyperparameters and those of the script. Changes nothing.

    The script's are those that it changed and training had not moved; ``lr`` is moved in proportion. Returns the run
    state to go on with, what later saves record as constructed, and a line for each difference.

    framework: the framework's run state in the store. live: the param groups of the job, as in a run state. script:
    what the script constructed. Raises ModelMismatchError if that needs other optimizer state than the store holds."""
    lines: dict[str, list[str]] = {}
    groups, kept = list[Mapping[str, Any]](), dict(script)
    saved = {fqn: group for group in framework["param_groups"] for fqn in group["params"]}
    for index, group in enumerate(live):
        if (found := _of_group(saved, group)) is not None:
            now = _of_group(script, group) or _unmoved(group["hyper"])
            older = {key: value for key, value in _unmoved(found["hyper"]).items() if key in now}
            before = found.get("constructed") or {**now, **older}
            if prefer == "script":
                _require_same_state(before, now, str(found.get("optimizer") or framework.get("optimizer")))
            hyper, own = _choose(f"param group {index}", found["hyper"], before, now, prefer=prefer, lines=lines)
            groups.append({**group, "hyper": hyper})
            kept |= dict.fromkeys(group["params"], own)
    if prefer == "script":
        framework = {**framework, "param_groups": groups}
    return framework, kept, tuple(line.replace("{}", listed(labels, 8), 1) for line, labels in lines.items())


def _choose(
    label: str,
    saved: Mapping[str, Any],
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    prefer: Prefer,
    lines: dict[str, list[str]],
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the values to go on with, and those to record as constructed. Each difference is added to ``lines``."""
    computed = {key: now[key] for key in IMPLEMENTATION & now.keys()}
    absent = dict.fromkeys((before.keys() ^ now.keys()) - _CYCLED, ...)
    old, new = {**absent, **before}, {**absent, **now}
    changed = {key for key in old.keys() & new.keys() if not equal(old[key], new[key])}
    used = saved
    if prefer == "script":
        taken = {key: new[key] for key in changed & saved.keys() if equal(saved[key], old[key])}
        used = {**saved, **taken, **_moved_lr(saved, before, now)}
        used = {key: value for key, value in used.items() if value is not ...}
    after = {**new, **used, **computed}
    for key in (key for key in old if key in changed and key not in _NOT_COMPARED):
        end = _KEPT
        if prefer == "script" or key in computed or key not in used:
            end = f"{_shown(after[key])} is used, since training had moved it"
            end = _SCRIPTS if equal(after[key], new[key]) else end
        lines.setdefault(_difference(f"{key} of {{}}", old[key], new[key], end), []).append(label)
    return used, now if prefer == "script" else {**now, **before, **computed}


def reconcile_schedule(
    label: str, saved: Any, live: Any, *, before: Mapping[str, Any] | None, now: Mapping[str, Any], prefer: Prefer
) -> tuple[Any, Mapping[str, Any], list[str]]:
    """Choose between a schedule's settings in the store and in the script: return state to load, and as `reconcile`.

    saved, live: its states in the store and in the script. before: None in stores of older releases."""
    state, recorded, lines = copy.deepcopy(saved), dict(now), list[str]()
    before = before or {**now, **{key: _at(saved, key.split(".")) for key in now if key.endswith("base_lrs")}}
    for key in (key for key in before if key in now and not equal(before[key], now[key])):
        *path, last = key.split(".")
        old, new = _at(saved, (*path, last)), _at(live, (*path, last))
        script = equal(old, new) or (prefer == "script" and equal(old, before[key]))
        if script and new is not None:
            _at(state, path)[last] = new
        elif not script and prefer == "store":
            recorded[key] = before[key]
        end = _SCRIPTS if script else _KEPT if prefer == "store" else f"{_shown(old)} is used"
        if last not in _DERIVED:
            lines.append(_difference(f"{key} of {label}", before[key], now[key], end))
    return state, recorded, lines


def _at(state: Any, path: Sequence[str]) -> Any:
    try:
        return reduce(lambda one, key: one[int(key) if isinstance(one, list) else key], path, state)
    except (LookupError, TypeError):
        return None


def _difference(name: str, before: Any, now: Any, end: str) -> str:
    return f"{name} is {_shown(before)} in the store and {_shown(now)} in this script: {end}"


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


def _shown(value: Any) -> str:
    text = str(value.tolist()) if isinstance(value, torch.Tensor) else "absent" if value is ... else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def describe_group(fqns: Iterable[str], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group as ``{"params": [fqn, ...], "hyper": {lr, betas, ...}}``."""
    items = ((key, value) for key, value in group.items() if key != "params")
    hyper = {key: to_host(value, f"hyperparameter {key!r} of an optimizer param group") for key, value in items}
    return {"params": list(fqns), "hyper": hyper}


def group_values(groups: Iterable[Mapping[str, Any]], name: str, first: int = 0) -> Iterator[LiveValue]:
    """Return the hyperparameters of live param groups, and where :func:`describe_group` puts them in the run state.

    first: the index there of the first one."""
    for index, group in enumerate(groups):
        for key, value in group.items():
            if key != "params":
                stored = ("framework", "param_groups", first + index, "hyper", key)
                yield LiveValue(f"{name}[{index}][{key!r}]", value, stored=stored)


def other_members(
    saved: Groups, live: Groups, held: Set[str], before: Mapping[str, str], now: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return notes on parameters that only saved or only live groups have, and on those with another kind.

    held: in the live groups of all ranks. before, now: kinds. A frozen parameter may be in a group or not."""
    known = before.keys() & now.keys()
    old, own = ({fqn for group in groups for fqn in group["params"]} & known for groups in (saved, live))
    gone = sorted(fqn for fqn in old - held if before[fqn] == "trainable")
    new = sorted(fqn for fqn in own - old if now[fqn] == "trainable" and old)
    lost = [f"the optimizer of the save had {listed(gone)}, and this one does not"] if gone else []
    lost += [f"the optimizer has {listed(new)}, and that of the save did not"] if new else []
    other = sorted(fqn for fqn in old & own if before[fqn] != now[fqn])
    if not other:
        return lost, []
    return lost, [f"requires_grad of {listed(other)} is not as saved, which matters unless the loop sets it again"]


def match_groups(saved: Groups, live: LiveGroups) -> list[Mapping[str, Any]]:
    """Return the saved hyperparameters of each live group, matched by the parameters in it, not by position.

    A group without parameters is matched by position, if there are as many groups. Changes nothing. Raises
    ModelMismatchError if a group has no parameter in the saved state, parameters that were saved with different values,
    or a tensor that the saved value does not fit."""
    hyper_of = {fqn: group["hyper"] for group in saved for fqn in group["params"]}
    empty = [{} if group["params"] else group["hyper"] for group in saved]
    empty = empty if len(saved) == len(live) else [{}] * len(live)
    matched = [_hyper_for(at, fqns, hyper_of) if fqns else empty[at] for at, (fqns, _) in enumerate(live)]
    for index, ((_, group), hyper) in enumerate(zip(live, matched, strict=True)):
        for key, value in hyper.items():
            if key not in _LIVE:
                _check_same_shape(index, key, group.get(key), value)
    return matched


def restore_groups(saved: Groups, live: LiveGroups) -> None:
    """Restore saved hyperparameters of live groups. Raises the errors of :func:`match_groups` before any change."""
    taken: dict[tuple[str, int], Any] = {}  # saved values of tensors, which torch may have given to several groups
    for (_, group), hyper in zip(live, match_groups(saved, live), strict=True):
        for key, value in hyper.items():
            if key not in _LIVE:
                own = group.get(key)
                if isinstance(own, torch.Tensor) and not equal(taken.setdefault((key, id(own)), value), value):
                    own = own.detach().clone().requires_grad_(own.requires_grad)
                group[key] = _like(own, value)


def _check_same_shape(index: int, key: str, live: Any, value: Any) -> None:
    if not isinstance(live, torch.Tensor):
        return
    number = isinstance(value, bool | int | float)
    shape = value.shape if isinstance(value, torch.Tensor) else torch.Size() if number else None
    # copy_() broadcasts what fits, as it does for a number.
    ends = () if shape is None else zip(reversed(shape), reversed(live.shape), strict=False)
    if shape is None or len(shape) > live.ndim or any(size not in (1, whole) for size, whole in ends):
        raise ModelMismatchError(
            f"{key!r} of param group {index} is a tensor of shape {tuple(live.shape)} here and was saved as "
            f"{value if shape is None or number else f'one of shape {tuple(shape)}'}; configure the optimizer as "
            "in the run that was saved"
        )


def _hyper_for(index: int, fqns: Sequence[str], hyper_of: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    known = [fqn for fqn in fqns if fqn in hyper_of]
    if not known:
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
    """Return the saved value with the type of the live one: a list becomes a tuple again (JSON has no tuples).

    Live tensors are filled, also in lists: others may be views of them."""
    if isinstance(live, torch.Tensor):
        with torch.no_grad():
            return live.copy_(torch.as_tensor(value, device="cpu"))
    if type(live) in (list, tuple) and isinstance(value, list | tuple):
        forms = [[(one.dtype, one.shape) for one in both if isinstance(one, torch.Tensor)] for both in (live, value)]
        if forms[0] == forms[1] and len(forms[0]) == len(live) == len(value):
            return type(live)(map(_like, live, value))
    return tuple(value) if isinstance(live, tuple) and isinstance(value, list) else copy.deepcopy(value)
