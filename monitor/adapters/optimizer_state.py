"""Optimizer slots, scalars and hyperparameters.

Optimizer state that is not a slot, in a shape that fits every framework: by parameter name.

Two parts: ``param_groups``, each with the fqns in it and its hyperparameters, and ``scalars``, what the
optimizer keeps for a parameter besides tensors of the parameter's shape (``step``, factored moments).
It does not know where a framework keeps either.

What a torch optimizer keeps for one tensor: slots (tensors of its shape) and scalars (all else).

The tensor is a parameter, or a flat partition of many. It does not know which.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from monitor.adapters.module_tensors import torch_dtype
from store.errors import ModelMismatchError, UnsupportedError
from store.names import BUFFER, FROZEN, WEIGHTS

_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""How a step is computed, not what it computes: a load leaves these as they were configured."""


def to_host(value: Any, where: str) -> Any:
    """A copy on the host of plain values and tensors, nested at will. Raises UnsupportedError for others."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: to_host(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([to_host(item, where) for item in value])
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedError(f"{where} holds a {type(value).__name__}, which cannot be saved as plain data")


def describe_group(fqns: Iterable[str], group: Mapping[str, Any]) -> dict[str, Any]:
    """One param group of an optimizer: ``{"params": [fqn, ...], "hyper": {lr, betas, ...}}``."""
    hyper = {
        key: to_host(value, f"hyperparameter {key!r} of an optimizer param group")
        for key, value in group.items()
        if key != "params"
    }
    return {"params": list(fqns), "hyper": hyper}


LiveGroups = Sequence[tuple[Sequence[str], dict[str, Any]]]
"""Each param group of a live optimizer, after the fqns in it."""


def match_groups(saved: Sequence[Mapping[str, Any]], live: LiveGroups) -> list[Mapping[str, Any]]:
    """The saved hyperparameters for each live group, matched by the parameters in them, not by position.

    Changes nothing. Raises ModelMismatchError when a group has no parameter in the saved state, parameters with
    different values, or a tensor that cannot take the saved value.
    """
    hyper_of = {fqn: group["hyper"] for group in saved for fqn in group["params"]}
    chosen = [_hyper_for(index, fqns, hyper_of) for index, (fqns, _) in enumerate(live)]
    for index, ((_, group), hyper) in enumerate(zip(live, chosen, strict=True)):
        for key, value in hyper.items():
            if key not in _IMPLEMENTATION:
                _check_same_shape(index, key, group.get(key), value)
    return chosen


def restore_groups(saved: Sequence[Mapping[str, Any]], live: LiveGroups) -> None:
    """Put saved hyperparameters into live groups. Raises what :func:`match_groups` raises, before any change."""
    for (_, group), hyper in zip(live, match_groups(saved, live), strict=True):
        for key, value in hyper.items():
            if key not in _IMPLEMENTATION:
                group[key] = _like(group.get(key), value)


def _check_same_shape(index: int, key: str, live: Any, value: Any) -> None:
    if not isinstance(live, torch.Tensor):
        return
    number = isinstance(value, bool | int | float)
    shape = value.shape if isinstance(value, torch.Tensor) else torch.Size() if number else None
    if shape is None or not _can_broadcast(shape, live.shape):
        raise ModelMismatchError(
            f"{key!r} of param group {index} is a tensor of shape {tuple(live.shape)} here and was saved as "
            f"{value if shape is None or number else f'one of shape {tuple(shape)}'}; give the optimizer what it had "
            "in the run that wrote the state"
        )


def _can_broadcast(shape: torch.Size, live: torch.Size) -> bool:
    """Whether copying would stretch ``shape`` to ``live``, as it does for a number."""
    return len(shape) <= len(live) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(live), strict=False))


def _hyper_for(index: int, fqns: Sequence[str], hyper_of: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    known = [fqn for fqn in fqns if fqn in hyper_of]
    if not known:
        if not fqns:
            return {}
        raise ModelMismatchError(
            f"param group {index} (with {fqns[0]}) has no parameter in the saved state; resume with the model and "
            "the optimizer of the run that wrote it"
        )
    first = hyper_of[known[0]]
    for fqn in known[1:]:
        differing = [key for key in first if not equal(first[key], hyper_of[fqn].get(key))]
        if differing:
            raise ModelMismatchError(
                f"param group {index} joins {known[0]} and {fqn}, which were saved with different "
                f"{', '.join(differing)}; split the param group as it was in the run that wrote the state"
            )
    return first


def equal(one: Any, other: Any) -> bool:
    """Whether two plain values or tensors are the same; lists and tuples, tensors and numbers compare by value."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def _like(live: Any, value: Any) -> Any:
    """The saved value in the kind of container in which the live one comes (JSON knows no tuples)."""
    if isinstance(live, torch.Tensor):
        with torch.no_grad():
            return live.copy_(torch.as_tensor(value))
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(live, tuple) and isinstance(value, list):
        return tuple(value)
    return copy.deepcopy(value)


_NOT_STATE = frozenset({WEIGHTS, FROZEN, BUFFER})

_INT_STEP = frozenset({"SparseAdam", "LBFGS"})
"""Optimizers of torch whose step count is not a tensor."""


def slots_of(state: Mapping[str, Any], parameter: torch.Tensor) -> list[str]:
    """The entries of a parameter's optimizer state that are slots, sorted: tensors of the parameter's shape.

    ``step`` never is one, not even for a parameter without dimensions.
    """
    return sorted(
        key
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != "step"
    )


def planned_slots(state: Mapping[str, Any], parameter: torch.Tensor, wanted: Mapping[str, str]) -> dict[str, torch.dtype]:
    """The slots, with their dtypes, that :func:`fit_slots` makes of a parameter's state. Changes nothing.

    wanted: slot -> dtype as stored; a slot that is there already keeps the dtype it has. UnsupportedError for a
    dtype that is not known.
    """
    live = slots_of(state, parameter)
    return {
        slot: state[slot].dtype if slot in live else torch_dtype(dtype)
        for slot, dtype in wanted.items()
        if slot not in _NOT_STATE
    }


def require_by_parameter(optimizer: torch.optim.Optimizer) -> None:
    """UnsupportedError where an optimizer keeps state under anything but a tensor: it is nobody's slot nor scalar."""
    states: Mapping[Any, Any] = optimizer.state
    for key, value in states.items():
        if not isinstance(key, torch.Tensor) and value:
            raise UnsupportedError(
                f"{type(optimizer).__name__} keeps state under {key!r}, which is no parameter, so it would not be "
                "saved; keep it in its param groups, or use an optimizer with state per parameter, such as AdamW"
            )


def fit_slots(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, wanted: Mapping[str, str]) -> None:
    """Make the slots in the optimizer's state of ``parameter`` those in ``wanted`` (slot: dtype).

    Missing ones are created with zeros, on the parameter's device; others are dropped.
    """
    state = optimizer.state.get(parameter, {})
    planned, live = planned_slots(state, parameter, wanted), slots_of(state, parameter)
    for slot in live if parameter.numel() else ():  # of no elements nothing is stored, and nothing is lost
        if slot not in planned:
            del state[slot]
    for slot, dtype in planned.items():
        if slot not in live:
            optimizer.state[parameter][slot] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def complete_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, slots: Collection[str], scalars: bool
) -> bool:
    """Whether the state of ``parameter`` can take the scalars that were saved beside ``slots``.

    Half a state would break the optimizer's next step. So slots that were not kept become zeros where others
    were kept; and where none was, or there was no state at all, the state is dropped: a fresh start.
    """
    state = optimizer.state.get(parameter, {})
    kept = [slot for slot in slots if slot in state]
    if not (kept if slots else scalars):
        optimizer.state.pop(parameter, None)
        return False
    for slot in slots:
        if slot not in state:
            state[slot] = torch.zeros_like(parameter, requires_grad=False)
    return True


def restore_scalar(
    key: str, value: Any, *, live: Any, optimizer: torch.optim.Optimizer, saved_by: str | None, device: torch.device
) -> Any:
    """What to put in the optimizer's state for a saved scalar.

    live: what is there now, or None. device: where a new tensor goes. Kept exactly (kind and dtype) when
    the same optimizer class saved it. Otherwise a step count becomes what this class counts with: a number
    where a class expects a tensor would silently never be increased.
    """
    if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.to(device=live.device, dtype=live.dtype, copy=True)
    if key == "step" and (live is not None or saved_by != type(optimizer).__name__):
        value = _step_like(value, live, optimizer)
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _step_like(value: Any, live: Any, optimizer: torch.optim.Optimizer) -> Any:
    kind = type(optimizer)
    as_tensor = isinstance(live, torch.Tensor) or (
        live is None and kind.__module__.startswith("torch.optim") and kind.__name__ not in _INT_STEP
    )
    return torch.tensor(float(value), dtype=torch.float32) if as_tensor else int(value)


def scalar_device(value: Any, group: Mapping[str, Any], parameter: torch.Tensor) -> torch.device:
    """Where torch's optimizers want a scalar of the state: step counts on the host, unless the step is
    fused or captured; anything with elements beside its parameter."""
    if isinstance(value, torch.Tensor) and value.ndim:
        return parameter.device
    return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


def common_scalars(fqns: Sequence[str], saved: Mapping[str, Any]) -> tuple[set[str], dict[str, Any]]:
    """(slots, scalars) that the parameters of a flat partition had in common; empty if none had any state.

    A flat partition has one step count for all of them. Raises ModelMismatchError where they differ.
    """
    scalars_of, names_of = saved["scalars"], saved.get("slots", {})
    known = [fqn for fqn in fqns if scalars_of.get(fqn) or names_of.get(fqn)]
    if not known:
        return set(), {}
    first = scalars_of.get(known[0], {})
    for key, value in first.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            raise UnsupportedError(
                f"optimizer state {key!r} of {known[0]} has a shape of its own, {tuple(value.shape)}, and cannot be "
                "laid out in a flat partition; resume without ZeRO"
            )
    for fqn in known[1:]:
        other = scalars_of.get(fqn, {})
        if not equal(first, other):
            raise ModelMismatchError(
                f"{known[0]} and {fqn} share a flat partition but were saved with different optimizer scalars "
                f"({_brief(first)} and {_brief(other)}); resume with the param groups of the run that wrote them, or "
                "without ZeRO"
            )
    return {slot for fqn in known for slot in names_of.get(fqn, ())}, dict(first)


def _brief(scalars: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in scalars.items()) or "none"
