"""A ``TrainerState`` as JSON text, for a run state that is taken at every save, and in memory perhaps at every step.

The history of logs grows for as long as a job lives, and turning all of it into text again each time would hold
training for seconds in the end. So entries that have been there for a while are turned into text once. Knows no file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_UNSETTLED = 64
"""The newest entries are turned into text anew: callbacks add to them what they have measured."""


class StateText:
    """Of one training."""

    def __init__(self) -> None:
        self._history: list[Any] | None = None
        self._settled: list[str] = []

    def of(self, state: Any, exported: Mapping[str, Any]) -> str:
        """JSON. exported: states of callbacks, in place of those that the state has of the same name."""
        fields = dict(vars(state))
        history = fields.pop("log_history")
        fields["stateful_callbacks"] = {**(fields.get("stateful_callbacks") or {}), **exported}
        return f'{_text(fields)[:-1]}, "log_history": [{self._entries(history)}]}}'

    def _entries(self, history: list[Any]) -> str:
        if history is not self._history or len(history) < len(self._settled):
            self._history, self._settled = history, []
        for entry in history[len(self._settled) : -_UNSETTLED]:
            self._settled.append(_text(entry))
        return ", ".join([*self._settled, *map(_text, history[len(self._settled) :])])


def _text(value: Any) -> str:
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """What scripts log beside numbers: arrays and tensors as numbers, anything else as it prints."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else str(value)
