"""What a torch optimizer keeps for one tensor: slots (tensors of its shape) and scalars (all else).

The tensor is a parameter, or a flat partition of many. It does not know which.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from monitor.adapters.hyper import equal
from monitor.dtypes import torch_dtype
from store.errors import ModelMismatchError, UnsupportedError
from store.names import BUFFER, FROZEN, WEIGHTS

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


def slots_to_be(state: Mapping[str, Any], parameter: torch.Tensor, wanted: Mapping[str, str]) -> dict[str, torch.dtype]:
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
    planned, live = slots_to_be(state, parameter, wanted), slots_of(state, parameter)
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
