"""Objects of other people's making: giving them their saved state, so that it can be taken back.

What ``load_state_dict`` of a scheduler or a sampler does is nobody's business here: it may raise half-way, draw random
numbers or set learning rates. So a resume calls it before anything of its own changes, and where any rank's object
raises, every rank puts its objects, its param groups and its generators back.
Knows the adapter, no store and no other rank. Training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from monitor.adapters.base import Adapter
from monitor.run_state import UserState, capture_rng, from_tree, put_state, restore_rng, state_of, to_tree
from store.errors import UsageError

_log = logging.getLogger("driftpoint")


class Loading:
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
                put_state(item, state)
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
                put_state(item, state)
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
