"""Decide whether and when to restart a job that died. Pure: no process, clock or file.

The store alone shows progress: an attempt made **progress** if it committed a step beyond all earlier ones. A new
commit of an old step (after a fallback) does not count, or a job that always dies at the same step would restart forever.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from store.errors import PREEMPTED
from store.names import SaveId

OK = 0
FAILED = 1
NO_PROGRESS = 93
INTERRUPTED = 130

BLAMED_AFTER = 2
"""Consecutive deaths without a commit after which the commit resumed from is suspect."""


@dataclass(frozen=True)
class Limits:
    """Limits of restarts.

    Attributes:
        restarts: in a row without progress.
        failures: in total, None for no limit.
        least, most: back-off in seconds.
    """

    restarts: int = 3
    failures: int | None = None
    least: float = 2.0
    most: float = 300.0


@dataclass(frozen=True)
class StoreSnapshot:
    """State of the store at one moment.

    Attributes:
        newest: newest commit, or snapshot in this node's memory.
        step: furthest step of them.
        resumes: commit or snapshot that a resume would take.
        instead: its replacement if ``resumes`` were suspect; None if there is none, or if an earlier job resumed from
            ``resumes`` and committed again, which clears it.
        epoch: newest epoch; every job that attaches claims one.
        trouble: why the store could not be read, ''; the other fields are then unset.
    """

    newest: SaveId | None = None
    step: int = -1
    resumes: SaveId | None = None
    instead: SaveId | None = None
    epoch: int = 0
    trouble: str = ""


@dataclass(frozen=True)
class Attempt:
    """One finished run of the command.

    Attributes:
        code: exit code of the process, negative for a signal.
        told_to: exit code demanded by a signal to the supervisor, None without one.
    """

    code: int
    before: StoreSnapshot
    after: StoreSnapshot
    told_to: int | None = None

    @property
    def committed(self) -> bool:
        """Return whether it made a commit, as far as known."""
        known = not (self.before.trouble or self.after.trouble) and self.after.newest is not None
        return known and (self.before.newest is None or self.after.newest > self.before.newest)  # type: ignore[operator]

    @property
    def attached(self) -> bool:
        """Return whether it attached to the store; earlier failures are not caused by a commit."""
        return not (self.before.trouble or self.after.trouble) and self.after.epoch > self.before.epoch

    @property
    def end(self) -> str:
        """Describe how it ended."""
        return ending(self.code)


@dataclass(frozen=True)
class RestartHistory:
    """Results of the attempts so far.

    Attributes:
        in_a_row: attempts without progress.
        step: furthest step committed.
        dying: commit from which the last attempts resumed and died, ``deaths`` times.
        marked: suspects not yet confirmed by progress.
    """

    in_a_row: int = 0
    failures: int = 0
    step: int = -1
    dying: SaveId | None = None
    deaths: int = 0
    marked: tuple[SaveId, ...] = ()


@dataclass(frozen=True)
class Restart:
    """Restart after ``seconds``, and mark ``suspect`` first."""

    seconds: float
    counted: bool
    suspect: SaveId | None = None


@dataclass(frozen=True)
class GiveUp:
    """Exit with ``code``. ``withdrawn``: suspects to clear, because falling back did not help."""

    code: int
    why: str
    withdrawn: tuple[SaveId, ...] = ()


def decide_restart(
    course: RestartHistory, attempt: Attempt, limits: Limits, draw: Callable[[], float]
) -> tuple[RestartHistory, Restart | GiveUp]:
    """Decide after an attempt, and return the updated history. ``draw`` returns a random number in [0, 1)."""
    if attempt.told_to is not None:
        return course, _told(attempt, attempt.told_to)
    if attempt.code == OK:
        return course, GiveUp(OK, "the command ended")
    if attempt.code == PREEMPTED and attempt.committed:
        return _preempted(course, attempt), Restart(0.0, counted=False)
    # Whoever only ever says that it was preempted, and saved nothing, must not be started again for ever.
    went = _unsaved(course, attempt) if attempt.code == PREEMPTED else _failed(course, attempt)
    stop = _limit(went, limits)
    return (went, stop) if stop is not None else _again(went, attempt, limits, draw)


def _limit(course: RestartHistory, limits: Limits) -> GiveUp | None:
    if limits.failures is not None and course.failures >= limits.failures:
        return GiveUp(FAILED, f"it failed {_times(course.failures)} in all, which is the limit", course.marked)
    if course.in_a_row > limits.restarts:
        row = " in a row" if course.in_a_row > 1 else ""
        return GiveUp(NO_PROGRESS, f"it died {_times(course.in_a_row)}{row} without getting further", course.marked)
    return None


def _again(
    course: RestartHistory, attempt: Attempt, limits: Limits, draw: Callable[[], float]
) -> tuple[RestartHistory, Restart | GiveUp]:
    seconds = backoff(course.in_a_row, limits, draw)
    blamed = course.dying
    if course.deaths < BLAMED_AFTER or attempt.after.instead is None or blamed is None:
        return course, Restart(seconds, counted=course.in_a_row > 0)
    marked = replace(course, dying=None, deaths=0, marked=(*course.marked, blamed))
    return marked, Restart(seconds, counted=True, suspect=blamed)


def backoff(in_a_row: int, limits: Limits, draw: Callable[[], float]) -> float:
    """Return the seconds to wait: doubled per attempt without progress, less up to half at random to spread nodes."""
    doubled = limits.least * 2.0 ** min(max(in_a_row - 1, 0), 64)
    return min(doubled, limits.most) * (1 - draw() / 2)


def ending(code: int) -> str:
    """Describe an exit code: ``exit code 3`` or ``SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _told(attempt: Attempt, told_to: int) -> GiveUp:
    if told_to == PREEMPTED and attempt.code == OK:
        return GiveUp(OK, "the command ended")
    return GiveUp(told_to, "interrupted" if told_to == INTERRUPTED else "preempted: start it again to go on")


def _progressed(course: RestartHistory, attempt: Attempt) -> bool:
    return attempt.committed and attempt.after.step > max(course.step, attempt.before.step)


def _preempted(course: RestartHistory, attempt: Attempt) -> RestartHistory:
    if _progressed(course, attempt):
        return RestartHistory(failures=course.failures, step=attempt.after.step)
    return replace(course, step=max(course.step, attempt.before.step))


def _unsaved(course: RestartHistory, attempt: Attempt) -> RestartHistory:
    """Count a preemption without a save: not a failure, but no progress either."""
    return replace(_preempted(course, attempt), in_a_row=course.in_a_row + 1)


def _failed(course: RestartHistory, attempt: Attempt) -> RestartHistory:
    failures = course.failures + 1
    if _progressed(course, attempt):
        return RestartHistory(failures=failures, step=attempt.after.step)
    dying, deaths = course.dying, course.deaths
    if attempt.attached:  # otherwise it says nothing of the commit
        dying = None if attempt.committed else attempt.before.resumes
        deaths = 0 if dying is None else deaths + 1 if dying == course.dying else 1
    step = max(course.step, attempt.before.step)
    return replace(course, in_a_row=course.in_a_row + 1, failures=failures, step=step, dying=dying, deaths=deaths)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
