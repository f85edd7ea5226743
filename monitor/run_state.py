"""Run state: counters, RNG, user objects; transactional load.

Run state: whatever a resume needs besides tensors of the model and the optimizer, rank by rank.

The random generators of torch, CUDA, numpy and python; the framework's counters and schedules (from the
adapter); and the objects that the user names. Turned into plain data here, stored by ``store.state_tree``.

Objects of other people's making: giving them their saved state, so that it can be taken back.

What ``load_state_dict`` of a scheduler or a sampler does is nobody's business here: it may raise half-way, draw random
numbers or set learning rates. So a resume calls it before anything of its own changes, and where any rank's object
raises, every rank puts its objects, its param groups and its generators back.
Knows the adapter, no store and no other rank. Training thread.
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


class UserState:
    """The objects given as ``state=[...]``: with state_dict and load_state_dict, or a ``torch.Generator``."""

    def __init__(self, objects: Sequence[Any]) -> None:
        for index, item in enumerate(objects):
            if not isinstance(item, torch.Generator) and not _has_state(item):
                raise ConfigError(
                    f"state[{index}] is a {type(item).__name__} without state_dict() and load_state_dict(): "
                    "give it both, or leave it out"
                )
        self._objects = list(objects)

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def objects(self) -> Sequence[Any]:
        """The objects themselves, in order."""
        return tuple(self._objects)

    def capture(self) -> list[Any]:
        """Their states, in order."""
        return [state_of(item) for item in self._objects]

    def require(self, states: Sequence[Any]) -> None:
        """ModelMismatchError where there is another number of objects than when it was saved."""
        if len(states) != len(self._objects):
            raise ModelMismatchError(
                f"the store holds the state of {len(states)} objects, state=[...] has {len(self._objects)}: "
                "pass the same objects in the same order as when it was saved"
            )

    def named(self, states: Sequence[Any]) -> list[tuple[str, Any, Any]]:
        """(name for people, object, its saved state) of each; :meth:`require` the states first."""
        return [
            (f"state[{index}] (a {type(item).__name__})", item, state)
            for index, (item, state) in enumerate(zip(self._objects, states, strict=True))
        ]


def state_of(item: Any) -> Any:
    """The state of an object of the user's, live tensors in it."""
    return item.get_state() if isinstance(item, torch.Generator) else item.state_dict()


def load_state(item: Any, state: Any) -> None:
    """The inverse of :func:`state_of`. Raises whatever the object raises."""
    if isinstance(item, torch.Generator):
        item.set_state(state)
    else:
        item.load_state_dict(state)


def capture_rng() -> dict[str, Any]:
    """The state of every global generator of this process."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put the generators back where they were."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def capture_run_state(adapter: Adapter, user: UserState, rank: int) -> dict[str, Any]:
    """All of this rank's run state now.

    The framework's is the same on all ranks and names every parameter, so rank 0 alone stores it: thousands of ranks
    would write, and a merge would read, gigabytes of the same text."""
    framework = adapter.run_state() if rank == 0 else None
    return {"framework": framework, "rng": capture_rng(), "user": user.capture()}


def to_tree(state: Any) -> tuple[Any, list[Leaf]]:
    """Plain data and tensors as a JSON tree and leaves; a snapshot, nothing live stays in it."""
    return encode(state, _tensor_leaf)


def from_tree(tree: Any, leaves: Sequence[Leaf]) -> Any:
    """The inverse of :func:`to_tree`, tensors in host memory."""
    return decode(tree, leaves, _leaf_tensor)


def _has_state(item: Any) -> bool:
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def _tensor_leaf(value: Any) -> Leaf | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or type(value).__name__ == "DTensor":
        return None  # a rank's part of a DTensor says nothing of which part it is
    host = value.detach().to("cpu", copy=True).contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""
    return Leaf(dtype_name(host.dtype), tuple(host.shape), data)


def _leaf_tensor(leaf: Leaf) -> torch.Tensor:
    dtype = torch_dtype(leaf.dtype)
    if not len(leaf.data):
        return torch.empty(leaf.shape, dtype=dtype)
    return torch.frombuffer(bytearray(leaf.data), dtype=dtype).reshape(leaf.shape)


_log = logging.getLogger("driftpoint")


class StateLoader:
    """One attempt. Making it changes nothing; UsageError where an object's present state cannot be had.

    saved: the run state of this rank as stored. generators: whether the saved random states are this rank's."""

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
        self._before: list[Any] = [_copied(name, item) for name, item, _ in self._objects]
        self._framework_before = adapter.run_state()
        self._rng_before = capture_rng()
        self._tried = 0

    def load(self) -> None:
        """Give every object its state, and see that the generators take theirs. UsageError from the first that
        refuses; :meth:`undo` it then."""
        for name, item, state in self._objects:
            self._tried += 1
            try:
                load_state(item, state)
            except Exception as error:
                raise UsageError(
                    f"{name} cannot load the state that was saved: {error!r}. Nothing was resumed; pass the object "
                    "that was saved in this place, or leave it out of both runs"
                ) from error
        if self._rng is None:
            return
        try:
            restore_rng(self._rng)
        except Exception as error:
            raise UsageError(
                f"the random generators of this process cannot take the state that was saved: {error!r}. Nothing was "
                "resumed; use the versions of python, torch and numpy that it was saved with"
            ) from error

    def undo(self) -> None:
        """Put back what :meth:`load` changed, and what the objects may have changed beside themselves."""
        tried = list(zip(self._objects, self._before, strict=True))[: self._tried]
        for (name, item, _), state in reversed(tried):
            try:
                load_state(item, state)
            except Exception as error:  # noqa: BLE001 - it raises on its own state: told, and the others are put back
                _log.error("%s cannot load the state either that it had before the resume: %r", name, error)
        self._adapter.load_run_state(self._framework_before)
        restore_rng(self._rng_before)


def _copied(name: str, item: Any) -> Any:
    try:
        return from_tree(*to_tree(state_of(item)))
    except Exception as error:
        raise UsageError(
            f"the state of {name} cannot be had, so it could not be put back if the resume were refused: {error!r}"
        ) from error
