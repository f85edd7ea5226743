"""Carry or refuse what an optimizer keeps in attributes of its own, which its state dict lacks."""

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from monitor.adapters.identity import version_of
from store.errors import UnstorableError
from store.state_tree import CONTAINERS

_HELD, _CONSTANT = {"state", "param_groups", "optimizer"}, {"_numel_cache", "name2qmap"}
_OTHERS = {"_step_count", "_opt_called", "grad_scale", "found_inf", "_zero_grad_profile_name"}
_IGNORED = _HELD | _CONSTANT | _OTHERS | {"_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused"}
"""What a save holds, constants of LBFGS and bitsandbytes, and what schedulers, gradient scalers and torch set."""
_INNER = "another optimizer, with state"


class OptimizerAttributes:
    """The attributes of an optimizer, or of a wrapper around it. Loaded like an object in ``state=``.

    Plain values that changed since the first look are the state: numbers, strings, None, containers of them. A tensor,
    an array or a generator that appears or changes is refused, and so is another optimizer with state. The attributes
    of other objects are not looked into."""

    def __init__(self, holder: Any, optimizer: torch.optim.Optimizer) -> None:
        self.kind, self.optimizer = type(holder).__name__, optimizer
        self._values: dict[str, Any] = getattr(holder, "__dict__", {})
        self._first, self._seen = copy.deepcopy(self._plain()), self._marks()
        self.check()

    def check(self) -> None:
        """Raise UnstorableError if there is state that cannot be carried. Call it at every decision."""
        state, inner = self._values.get("state"), type(self.optimizer).__name__
        if isinstance(state, Mapping) and state is not self.optimizer.state and any(state.values()):
            raise UnstorableError(
                f"{self.kind} around {inner} keeps state of its own, which would not be saved: attach the {inner} "
                "itself and pass the wrapper's state as an object in state=[...], or remove the wrapper"
            )
        for name, mark in self._marks().items():
            if mark is _INNER or mark != self._seen.get(name):
                raise UnstorableError(
                    f"{self.kind} keeps {_INNER if mark is _INNER else 'a value that changes'}, in its attribute "
                    f"{name}, which a save does not hold, so it would not come back: keep it in optimizer.state or the "
                    "param groups, or attach inner optimizers, attach((model, [first, second]))"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the plain values that changed since the first look."""
        return {
            name: value for name, value in self._plain().items() if repr(value) != repr(self._first.get(name, self))
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the values in ``state``, and others that changed as at the first look."""
        for name in self.state_dict():
            del self._values[name]
            if name in self._first:
                self._values[name] = copy.deepcopy(self._first[name])
        self._values.update(state)

    def _plain(self) -> dict[str, Any]:
        return {name: value for name, value in self._values.items() if name not in _IGNORED and _is_plain(value)}

    def _marks(self) -> dict[str, Any]:
        """Return what differs once a value that is not plain has changed, by name."""
        found = dict(_parts({key: item for key, item in self._values.items() if key not in _IGNORED}))
        if any(isinstance(value, torch.Tensor) for value in found.values()):
            own = {id(one) for group in self.optimizer.param_groups for one in (*group["params"], *group.values())}
            own |= {id(value) for state in self.optimizer.state.values() for value in state.values()}
            found = {
                name: one for name, one in found.items() if not isinstance(one, torch.Tensor) or id(one) not in own
            }
        return {name: _mark(one) for name, one in found.items()}


def _is_plain(value: Any) -> bool:
    if type(value) in CONTAINERS:
        values = value.values() if isinstance(value, Mapping) else ()
        return all(map(_is_plain, value)) and all(map(_is_plain, values))
    if type(value) is int:
        return abs(value) < 1 << 32  # larger ones may be the id() of an object, which another process does not have
    return type(value) in (bool, float, str, type(None)) or isinstance(value, np.generic)


def _parts(values: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield what may change of attributes that are not plain, also in containers, by name."""
    kinds = (int, float, np.ndarray, torch.Tensor, torch.Generator, torch.optim.Optimizer)
    for index, (key, value) in enumerate(values.items()):
        name = f"{prefix}[{index if isinstance(key, torch.Tensor) else key!r}]" if prefix else str(key)
        if isinstance(value, kinds) and (prefix or not _is_plain(value)):
            yield name, value
        elif isinstance(value, Mapping | list | tuple | deque | set) and depth < 3 and not _is_plain(value):
            yield from _parts(value if isinstance(value, Mapping) else dict(enumerate(value)), name, depth + 1)


def _mark(value: Any) -> Any:
    if isinstance(value, torch.optim.Optimizer):
        return _INNER if any(value.state.values()) else None
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    value = value.get_state().numpy() if isinstance(value, torch.Generator) else value
    return value.tobytes() if isinstance(value, np.ndarray) else repr(value)
