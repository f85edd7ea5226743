"""Report the supervisor's events: lines on the terminal, and an optional JSON file.

Owned by the supervisor's thread. A closed terminal or a full disk never ends the supervision: the line is dropped, and
the event file's failure is reported once."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploy.supervisor.restart_policy import NO_PROGRESS, Attempt, GiveUp, StoreSnapshot
from store.names import SaveId

_LISTED = 8


class EventLog:
    """Reports events as lines for people, and JSON lines in ``events``."""

    def __init__(self, line: Callable[[str], None], events: Path | None = None, root: Path | None = None) -> None:
        self._line, self._events, self._root = line, events, root
        self._ends: list[str] = []

    def message(self, text: str) -> None:
        with suppress(OSError, ValueError):  # stderr is closed, or the terminal is gone
            self._line(f"driftpoint run: {text}")

    def on_attempt_start(self, number: int, seconds: float, snapshot: StoreSnapshot) -> None:
        after = f" (after {seconds:.3g} s)" if number > 1 else ""
        self.message(f"attempt {number}{after}: {_from(snapshot)}")
        self._event("begin", attempt=number, commit=_name(snapshot.resumes), trouble=snapshot.trouble or None)

    def on_attempt_end(self, number: int, attempt: Attempt) -> None:
        newest = attempt.after.newest
        new = f"; committed up to step {newest.step}" if attempt.committed and newest is not None else ""
        unknown = f"; the store cannot be read: {attempt.after.trouble}" if attempt.after.trouble else ""
        self.message(f"attempt {number} ended: {attempt.end}{new}{unknown}")
        self._ends.append(f"attempt {number}: {attempt.end}, {_from(attempt.before)}")
        self._ends = self._ends[-_LISTED:]
        self._event("end", attempt=number, code=attempt.code, commit=_name(newest), committed=attempt.committed)

    def on_suspect_marked(self, save: SaveId, instead: SaveId | None, trouble: str) -> None:
        if trouble:
            self.message(f"commit {save} could not be marked as suspect: {trouble}")
            return
        to = "" if instead is None else f": falling back to step {instead.step}"
        self.message(f"commit {save} is suspect: two jobs that resumed from it died without a commit{to}")
        self._event("suspect", commit=save.name, instead=_name(instead))

    def on_suspect_withdrawn(self, save: SaveId, trouble: str) -> None:
        if trouble:
            self.message(f"commit {save} is not the cause, but its suspect mark could not be removed: {trouble}")
            return
        self.message(f"commit {save} is no longer suspect: falling back from it did not help")
        self._event("withdrawn", commit=save.name)

    def on_stop(self, stop: GiveUp) -> None:
        self._event("stop", code=stop.code, why=stop.why)
        if stop.code == 0:
            return
        self.message(f"stopped (exit code {stop.code}): {stop.why}")
        if stop.code == NO_PROGRESS:
            for end in self._ends:
                self.message(f"  {end}")
            self.message(
                "for the cause, see the command's output above. To inspect the commits: "
                f"`driftpoint show {self._root}`, `driftpoint verify {self._root}`. Then run the same command again"
            )

    def _event(self, kind: str, **facts: Any) -> None:
        if self._events is None:
            return
        now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        try:
            with self._events.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"event": kind, "time": now, **facts}) + "\n")
        except OSError as error:
            self._events = None
            self.message(f"cannot write events: {error}; no more are written")


def _from(snapshot: StoreSnapshot) -> str:
    if snapshot.trouble:
        return f"the store cannot be read: {snapshot.trouble}"
    if snapshot.resumes is None:
        return "from the beginning" if snapshot.newest is None else "no commit can be resumed"
    return f"resuming from step {snapshot.resumes.step}"


def _name(save: SaveId | None) -> str | None:
    return None if save is None else save.name
