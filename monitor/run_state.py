"""Capture and load run state: counters, random states and user objects.

Run state is everything a resume needs besides the tensors of the model and the optimizer, per rank: the random states
of torch, CUDA, numpy and python; the framework's counters and schedules (from the adapter); the user's objects.

``load_state_dict`` of user objects may raise halfway, consume random numbers or set learning rates. A resume therefore
calls it before any other state changes, and if it fails on any rank, all ranks undo it. Training thread.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from monitor.adapters.base import Adapter
from monitor.adapters.module_tensors import dtype_name, torch_dtype
from store.errors import ConfigError, ModelMismatchError, UsageError
from store.state_tree import Leaf, decode, encode

_log = logging.getLogger("driftpoint")


class UserState:
    """Holds the objects given as ``state=[...]``: with state_dict and load_state_dict, or a ``torch.Generator``."""

    def __init__(self, objects: Sequence[Any]) -> None:
        for index, item in enumerate(objects):
            if not isinstance(item, torch.Generator) and not _has_state(item):
                raise ConfigError(
                    f"state[{index}] is a {type(item).__name__} without state_dict() and load_state_dict(): add both "
                    "methods, or remove it from state=[...]"
                )
        self.objects = list(objects)

    def __len__(self) -> int:
        return len(self.objects)

    def capture(self) -> list[Any]:
        return [state_of(item) for item in self.objects]

    def require(self, states: Sequence[Any]) -> None:
        """Raise ModelMismatchError unless there are as many saved states as objects."""
        if len(states) != len(self.objects):
            raise ModelMismatchError(
                f"the store holds the state of {len(states)} objects, state=[...] has {len(self.objects)}: pass the "
                "same objects in the same order as when they were saved"
            )

    def named(self, states: Sequence[Any]) -> list[tuple[str, Any, Any]]:
        """Return (name for messages, object, its saved state) of each; call :meth:`require` first."""
        return [
            (f"state[{index}] (a {type(item).__name__})", item, state)
            for index, (item, state) in enumerate(zip(self.objects, states, strict=True))
        ]


def state_of(item: Any) -> Any:
    """Return the state of a user object, with its live tensors."""
    return item.get_state() if isinstance(item, torch.Generator) else item.state_dict()


def load_state(item: Any, state: Any) -> None:
    """Load a state from :func:`state_of`. Propagates exceptions of the object."""
    if isinstance(item, torch.Generator):
        item.set_state(state)
    else:
        item.load_state_dict(state)


def capture_rng() -> dict[str, Any]:
    """Return the state of every global random generator of this process."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore the global random generators from :func:`capture_rng`."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def capture_run_state(adapter: Adapter, user: UserState, rank: int) -> dict[str, Any]:
    """Return the current run state of this rank.

    The framework's state is the same on all ranks and names every parameter, so only rank 0 stores it: copies of
    thousands of ranks would add up to gigabytes."""
    framework = adapter.run_state() if rank == 0 else None
    return {"framework": framework, "rng": capture_rng(), "user": user.capture()}


def to_tree(state: Any) -> tuple[Any, list[Leaf]]:
    """Copy plain data and tensors into a JSON tree and leaves."""
    return encode(state, _tensor_leaf)


def from_tree(tree: Any, leaves: Sequence[Leaf]) -> Any:
    """Return the data of :func:`to_tree`, with tensors in host memory."""
    return decode(tree, leaves, _leaf_tensor)


def _has_state(item: Any) -> bool:
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def _tensor_leaf(value: Any) -> Leaf | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or type(value).__name__ == "DTensor":
        return None  # a local shard does not know which part of the DTensor it is
    host = value.detach().to("cpu", copy=True).contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""
    return Leaf(dtype_name(host.dtype), tuple(host.shape), data)


def _leaf_tensor(leaf: Leaf) -> torch.Tensor:
    dtype = torch_dtype(leaf.dtype)
    if not len(leaf.data):
        return torch.empty(leaf.shape, dtype=dtype)
    return torch.frombuffer(bytearray(leaf.data), dtype=dtype).reshape(leaf.shape)


class StateLoader:
    """Loads saved state into user objects and random generators, and can undo it. Construction changes nothing.

    Args:
        saved: The stored run state of this rank.
        adapter: Gives the framework's objects and run state.
        user: The user's objects.
        generators: Whether the saved random states belong to this rank.

    Raises:
        UsageError: The present state of an object cannot be captured.
    """

    def __init__(self, saved: Mapping[str, Any], adapter: Adapter, user: UserState, generators: bool) -> None:
        framework = saved["framework"]
        self._objects = [
            (f"the engine's {key} (a {type(item).__name__})", item, framework[key])
            for key, item in adapter.objects().items()
            if framework.get(key) is not None
        ]
        self._objects += [] if saved["user"] is None else user.named(saved["user"])
        self._rng = saved["rng"] if generators else None
        self._adapter = adapter
        self._before: list[Any] = [_copy_state(name, item) for name, item, _ in self._objects]
        self._framework_before = adapter.run_state()
        self._rng_before = capture_rng()
        self._attempted = 0

    def load(self) -> None:
        """Load every object, then the generators.

        Raises:
            UsageError: An object or a generator rejects its saved state; call :meth:`undo`.
        """
        for name, item, state in self._objects:
            self._attempted += 1
            try:
                load_state(item, state)
            except Exception as error:
                raise UsageError(
                    f"{name} cannot load its saved state: {error!r}. Nothing was resumed. Pass the object that was "
                    "saved at this position, or remove it from both runs"
                ) from error
        if self._rng is None:
            return
        try:
            restore_rng(self._rng)
        except Exception as error:
            raise UsageError(
                f"the random generators of this process cannot load their saved state: {error!r}. Nothing was resumed. "
                "Use the versions of python, torch and numpy of the run that saved it"
            ) from error

    def undo(self) -> None:
        """Restore everything that :meth:`load` changed, including param groups and generators."""
        attempted = list(zip(self._objects, self._before, strict=True))[: self._attempted]
        for (name, item, _), state in reversed(attempted):
            try:
                load_state(item, state)
            except Exception as error:  # noqa: BLE001 - logged, so that the other objects are restored
                _log.error("%s cannot load its state from before the resume either: %r", name, error)
        self._adapter.load_run_state(self._framework_before)
        restore_rng(self._rng_before)


def _copy_state(name: str, item: Any) -> Any:
    try:
        return from_tree(*to_tree(state_of(item)))
    except Exception as error:
        raise UsageError(
            f"the state of {name} cannot be captured, so a refused resume could not restore it: {error!r}"
        ) from error
