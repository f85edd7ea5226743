"""Decide whether and when to restart a job that died. Pure: no process, clock or file.

The store alone shows progress: an attempt made **progress** if it committed a step beyond all earlier ones. A new
commit of an old step (after a fallback) does not count: otherwise a job that always dies at one step would restart
forever."""

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from store.errors import PREEMPTED
from store.names import SaveId

OK = 0
FAILED = 1
NO_PROGRESS = 93
INTERRUPTED = 130
SUSPECT_AFTER = 2  # consecutive deaths without a commit after which the commit resumed from is suspect


@dataclass(frozen=True)
class Limits:
    """Limits of restarts. ``least`` and ``most``: back-off in seconds."""

    restarts: int = 3  # in a row without progress
    failures: int | None = None  # in total, None for no limit
    least: float = 2.0
    most: float = 300.0


@dataclass(frozen=True)
class StoreSnapshot:
    """State of the store at one moment.

    ``instead``: the replacement if ``resumes`` were suspect; None if there is none, or if an earlier job resumed from
    ``resumes`` and committed again, which clears it."""

    newest: SaveId | None = None  # newest commit, or snapshot in this node's memory
    step: int = -1  # furthest step of them
    resumes: SaveId | None = None  # commit or snapshot that a resume would take
    instead: SaveId | None = None
    epoch: int = 0  # newest epoch; every job that attaches claims one
    trouble: str = ""  # why the store could not be read, ''; the other fields are then unset


@dataclass(frozen=True)
class Attempt:
    """One finished run of the command."""

    code: int  # exit code of the process, negative for a signal
    before: StoreSnapshot
    after: StoreSnapshot
    exit_request: int | None = None  # exit code demanded by a signal to the supervisor, None without one

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
        return ending(self.code)


@dataclass(frozen=True)
class RestartHistory:
    """Results of the attempts so far."""

    in_a_row: int = 0  # attempts without progress
    failures: int = 0
    step: int = -1  # furthest step committed
    suspected: SaveId | None = None  # commit from which the last attempts resumed and died, ``deaths`` times
    deaths: int = 0
    marked: tuple[SaveId, ...] = ()  # suspects not yet confirmed by progress


@dataclass(frozen=True)
class Restart:
    """Restart after ``seconds``, and mark ``suspect`` first."""

    seconds: float
    suspect: SaveId | None = None


@dataclass(frozen=True)
class GiveUp:
    """Exit with ``code``. ``withdrawn``: suspects to clear, because falling back did not help."""

    code: int
    why: str
    withdrawn: tuple[SaveId, ...] = ()


def decide_restart(
    history: RestartHistory, attempt: Attempt, limits: Limits, draw: Callable[[], float]
) -> tuple[RestartHistory, Restart | GiveUp]:
    """Decide after an attempt, and return the updated history. ``draw`` returns a random number in [0, 1)."""
    if attempt.code == OK and attempt.exit_request in (None, PREEMPTED):
        return history, GiveUp(OK, "the command ended")
    if attempt.exit_request is not None:
        why = "interrupted" if attempt.exit_request == INTERRUPTED else "preempted: start it again to continue"
        return history, GiveUp(attempt.exit_request, why)
    if attempt.code == PREEMPTED and attempt.committed:
        return _preempted(history, attempt), Restart(0.0)
    if attempt.code == PREEMPTED:  # without a save: no failure, but no progress either, so it must not go on forever
        went = replace(_preempted(history, attempt), in_a_row=history.in_a_row + 1)
    else:
        went = _failed(history, attempt)
    if (stop := _limit(went, limits)) is not None:
        return went, stop
    seconds, suspect = backoff(went.in_a_row, limits, draw), went.suspected
    if went.deaths < SUSPECT_AFTER or attempt.after.instead is None or suspect is None:
        return went, Restart(seconds)
    return replace(went, suspected=None, deaths=0, marked=(*went.marked, suspect)), Restart(seconds, suspect)


def _limit(history: RestartHistory, limits: Limits) -> GiveUp | None:
    if limits.failures is not None and history.failures >= limits.failures:
        return GiveUp(FAILED, f"the command failed {_times(history.failures)}, which is the limit", history.marked)
    if history.in_a_row > limits.restarts:
        row = " in a row" if history.in_a_row > 1 else ""
        return GiveUp(NO_PROGRESS, f"the command died {_times(history.in_a_row)}{row} without progress", history.marked)
    return None


def backoff(in_a_row: int, limits: Limits, draw: Callable[[], float]) -> float:
    """Return the seconds to wait: doubled per attempt without progress, less up to half at random to spread nodes."""
    return min((limits.least * 2.0 ** min(max(in_a_row - 1, 0), 64)), limits.most) * (1 - draw() / 2)


def ending(code: int) -> str:
    """Describe an exit code: ``exit code 3`` or ``SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _progressed(history: RestartHistory, attempt: Attempt) -> bool:
    return attempt.committed and attempt.after.step > max(history.step, attempt.before.step)


def _preempted(history: RestartHistory, attempt: Attempt) -> RestartHistory:
    if _progressed(history, attempt):
        return RestartHistory(failures=history.failures, step=attempt.after.step)
    return replace(history, step=max(history.step, attempt.before.step))


def _failed(history: RestartHistory, attempt: Attempt) -> RestartHistory:
    failures = history.failures + 1
    if _progressed(history, attempt):
        return RestartHistory(failures=failures, step=attempt.after.step)
    suspected, deaths = history.suspected, history.deaths
    if attempt.attached:  # otherwise it says nothing of the commit
        suspected = None if attempt.committed else attempt.before.resumes
        deaths = 0 if suspected is None else deaths + 1 if suspected == history.suspected else 1
    step, in_a_row = max(history.step, attempt.before.step), history.in_a_row + 1
    return replace(history, in_a_row=in_a_row, failures=failures, step=step, suspected=suspected, deaths=deaths)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
