"""Optimizer state that is not a slot, in a shape that fits every framework: by parameter name.

Two parts: ``param_groups``, each with the fqns in it and its hyperparameters, and ``scalars``, what the
optimizer keeps for a parameter besides tensors of the parameter's shape (``step``, factored moments).
It does not know where a framework keeps either.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from store.errors import ModelMismatchError, UnsupportedError

_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""How a step is computed, not what it computes: a load leaves these as they were configured."""


def snapshot(value: Any, where: str) -> Any:
    """A copy on the host of plain values and tensors, nested at will. Raises UnsupportedError for others."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: snapshot(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([snapshot(item, where) for item in value])
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedError(f"{where} holds a {type(value).__name__}, which cannot be saved as plain data")


def describe_group(fqns: Iterable[str], group: Mapping[str, Any]) -> dict[str, Any]:
    """One param group of an optimizer: ``{"params": [fqn, ...], "hyper": {lr, betas, ...}}``."""
    hyper = {
        key: snapshot(value, f"hyperparameter {key!r} of an optimizer param group")
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
                _require_alike(index, key, group.get(key), value)
    return chosen


def restore_groups(saved: Sequence[Mapping[str, Any]], live: LiveGroups) -> None:
    """Put saved hyperparameters into live groups. Raises what :func:`match_groups` raises, before any change."""
    for (_, group), hyper in zip(live, match_groups(saved, live), strict=True):
        for key, value in hyper.items():
            if key not in _IMPLEMENTATION:
                group[key] = _like(group.get(key), value)


def _require_alike(index: int, key: str, live: Any, value: Any) -> None:
    if not isinstance(live, torch.Tensor):
        return
    number = isinstance(value, bool | int | float)
    shape = value.shape if isinstance(value, torch.Tensor) else torch.Size() if number else None
    if shape is None or not _fills(shape, live.shape):
        raise ModelMismatchError(
            f"{key!r} of param group {index} is a tensor of shape {tuple(live.shape)} here and was saved as "
            f"{value if shape is None or number else f'one of shape {tuple(shape)}'}; give the optimizer what it had "
            "in the run that wrote the state"
        )


def _fills(shape: torch.Size, live: torch.Size) -> bool:
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
