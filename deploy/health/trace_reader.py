"""Describe the newest state of a job in its drift trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from store.names import Unit
from store.trace import JobLine

Severity = Literal["plain", "look", "bad"]

SKIPPED: Mapping[str | None, tuple[Severity, str]] = {
    "busy": ("plain", "the previous one was still being written"),
    "withheld": ("bad", "layers that were never saved contain NaN or Inf"),
    "storage": ("look", "the store could not be claimed"),
    "unreachable": ("bad", "a rank was later than the job's timeout, or is gone: restart the job"),
    "disagree": ("bad", "the ranks are at different steps"),
    "unsupported": ("bad", "the job changed after attach"),
    "fenced": ("bad", "another job took over the store"),
}
"""Why a decision began no save where it should have, and how bad that is."""


@dataclass(frozen=True)
class LastDecision:
    """A decision. ``at`` is Unix time."""

    step: int
    at: float
    skipped: str | None


@dataclass(frozen=True)
class LastSave:
    """A commit. ``full``: raw bytes of a full save."""

    at: float
    written: int
    full: int


@dataclass(frozen=True)
class JobStatus:
    """State of the newest incarnation of a job."""

    job: JobLine
    last_seen: float
    newest: LastDecision | None
    sick: frozenset[Unit]  # with NaN or Inf at the last decision that measured, then or when its save was staged
    saves: Sequence[LastSave]  # the last few, newest last
    failed: tuple[str, ...]  # reasons of the saves that failed since the newest commit
    step_seconds: float | None  # seconds per step, None if unknown
    decision_gap: float | None
    interval: int | None
    full_bytes: int  # raw bytes of a save of everything that changes

    @property
    def save_gap(self) -> float | None:
        """Return the median seconds between commits, None with fewer than two."""
        gaps = [later.at - earlier.at for earlier, later in pairwise(self.saves)]
        return median(gaps) if gaps else None

    @property
    def next_gap(self) -> float | None:
        """Return the announced seconds to the next decision. With ``every: auto`` intervals grow up to fourfold at a
        time."""
        return None if self.interval is None or self.step_seconds is None else self.interval * self.step_seconds

    def step_at(self, now: float) -> float | None:
        """Estimate the job's step at ``now``, at most the step of its next decision."""
        last = self.newest
        if last is None or self.step_seconds is None:
            return None if last is None else float(last.step)
        ahead = max(0.0, now - last.at) / self.step_seconds if self.step_seconds else 0.0
        return last.step + min(ahead, float(self.interval if self.interval is not None else ahead))
