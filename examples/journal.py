"""What a run tells of itself: one JSON object a line, appended by rank 0, read by whoever shows it.

Lines survive the death of the writer: each is handed to the system as soon as it is written. A reader ignores a
last line that is not complete yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monitor import StepReport


class Journal:
    """Appends to a file, or, without a path, does nothing: then a script needs no other branch for it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, event: str, **fields: Any) -> None:
        """One line: ``event`` and its fields."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, **fields}) + "\n")


class Reader:
    """Reads a journal as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """The lines completed since the last call. None while there is no file."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):
                self._offset += len(line)
                yield json.loads(line)


def decision(report: StepReport) -> dict[str, Any]:
    """A decision as the journal keeps it: what was measured of every unit, and what was chosen."""
    saved = report.saved or {}
    return {
        "step": report.step,
        "skipped": report.skipped,
        "stall_seconds": report.stall_seconds,
        "units": [
            {
                "layer": one.unit.layer,
                "slot": one.unit.slot,
                "nbytes": one.nbytes,
                "drift": one.drift,
                "staleness": one.staleness,
                "saved": one.unit in saved,
                "reason": report.choices[one.unit].reason if report.choices else "",
            }
            for one in report.stats
        ],
    }
