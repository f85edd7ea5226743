"""Detect preemption signals, and agree on the last step among ranks and on the deadline.

Signal handlers only record the time of the first signal, and replace default actions only: docs/preemption.md says
which signals are handled, and when. A second signal that is not an echo of the first, or any signal in a forked child,
has its previous effect; by default it ends the process.

At each step boundary every rank contributes to an asynchronous reduction that it reads at the next boundary, so no step
waits. A signal known to any rank at boundary n is known to all at boundary n + 1. No rank can be two boundaries ahead
of another, and a rank that exits waits until the others reach its last boundary.

Training thread and collective, except :meth:`Preemption.preempt`."""

import logging
import os
import signal
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from monitor.config.schema import PreemptionSettings
from monitor.distributed import Group
from store.errors import PREEMPTED, CollectiveError, ConfigError

_log = logging.getLogger("driftpoint")

ECHO = 1.0  # seconds in which a repeated signal is the same one: schedulers signal a process and its parents

_MARGIN = 0.05  # share of the grace period reserved for exiting
_MIN_MARGIN = 0.2  # seconds reserved for exiting at least

_EXPIRED = b"driftpoint: preempted: grace period expired before the save finished; earlier commits are intact\n"

_DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)

_SCHEDULERS = {"SLURM_JOB_ID": "Slurm", "KUBERNETES_SERVICE_HOST": "Kubernetes"}


class SignalWatcher:
    """Records when the first of the named signals arrived, until closed. clock: monotonic seconds."""

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.monotonic, ends: int = 0) -> None:
        """ends: a signal that has its previous effect if any other came more than ``ECHO`` seconds before. 0: none."""
        self._clock, self._ends = clock, ends
        self._owner = os.getpid()
        self._arrivals: dict[int, float] = {}
        self.first: float | None = None  # time of the first signal; None until one arrives
        if threading.current_thread() is threading.main_thread():
            for name in names:
                self._install(signal.Signals[name])
        elif names:
            _log.warning(
                "preemption: signals are not handled, because attach() was not called in the main thread; call "
                "ckpt.preempt() before the job ends"
            )

    def note(self) -> None:
        """Record the current time, unless a signal came before."""
        if self.first is None:
            self.first = self._clock()

    def close(self) -> None:
        """Restore the previous handlers, unless others listen, or another handler was installed since."""
        in_main = threading.current_thread() is threading.main_thread()
        for number in [number for number, watchers in _watchers.items() if self in watchers]:
            _watchers[number].discard(self)
            if not _watchers[number] and signal.getsignal(number) is _on_signal and in_main:
                signal.signal(number, _previous[number])

    def heard(self, number: int) -> bool:
        """Record a signal. Return False if it should have its previous effect instead."""
        if os.getpid() != self._owner:
            return False
        now = self._clock()
        first = self._arrivals.setdefault(number, now)
        if now - (min(self._arrivals.values()) if number == self._ends else first) > ECHO:
            return False
        self.note()
        return True

    def _install(self, number: signal.Signals) -> None:
        previous = signal.getsignal(number)
        if previous in _DEFAULT_HANDLERS:
            _previous[number] = previous
            signal.signal(number, _on_signal)
        if previous in _DEFAULT_HANDLERS or previous is _on_signal:
            _watchers[number].add(self)
        else:
            _log.warning(
                "preemption: %s already has a handler, which stays; call ckpt.preempt() in it, or set another signal "
                "in `preemption: {signals: [...]}`",
                number.name,
            )


_previous: dict[int, Any] = {}  # handlers that ours replaced
_watchers: defaultdict[int, weakref.WeakSet[SignalWatcher]] = defaultdict(weakref.WeakSet)
"""By signal. Weak, so that a dropped checkpointer stops listening."""


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Let all checkpointers of this process record a signal. If none does, it has its previous effect."""
    recorded = [watcher.heard(number) for watcher in list(_watchers[number])]
    if any(recorded):
        return
    if callable(_previous[number]):
        _previous[number](number, frame)
        return
    signal.signal(number, _previous[number])
    os.kill(os.getpid(), number)


@dataclass(frozen=True)
class Deadline:
    """Deadlines on this process's monotonic clock."""

    heard: float  # time of the first signal on any rank
    at: float  # when saves must be durable
    end: float  # when the process must have exited

    @property
    def left(self) -> float:
        """Seconds until saves must be durable, >= 0."""
        return max(0.0, self.at - time.monotonic())

    @property
    def passed(self) -> float:
        return time.monotonic() - self.heard

    @property
    def to_leave(self) -> float:
        """Seconds for closing after the last save."""
        return max(self.left, (self.end - self.at) / 4)

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Exit the process in time if the body of the ``with`` blocks."""
        timer = threading.Timer(self.left + (self.end - self.at) / 2, _exit)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def deadline(grace: float, passed: float) -> Deadline:
    """Return the deadline of a signal that came ``passed`` seconds ago, with ``grace`` seconds until the exit."""
    now = time.monotonic()
    end = now - passed + grace
    return Deadline(now - passed, end - max(_MIN_MARGIN, _MARGIN * grace), end)


def _exit() -> None:
    os.write(2, _EXPIRED)
    os._exit(PREEMPTED)


def with_scheduler(settings: PreemptionSettings, world_size: int) -> tuple[PreemptionSettings, str | None]:
    """Add SIGTERM to the settings under a scheduler that sends it. Return them and its name, or unchanged and None.

    Only if the job has one process, ``signals`` is not set, and the script has no handler. With several ranks, SIGTERM
    may also mean that another rank failed; ranks that wait for that one in a collective would then need a SIGKILL."""
    scheduler = next((name for variable, name in _SCHEDULERS.items() if os.environ.get(variable)), None)
    handler, given = signal.getsignal(signal.SIGTERM), settings.model_fields_set
    main = threading.current_thread() is threading.main_thread()
    free = main and (handler is signal.SIG_DFL or handler is _on_signal)
    if scheduler is None or world_size > 1 or "signals" in given or not free:
        return settings, None
    grace = settings.grace_seconds if "grace_seconds" in given else 25.0  # by default both kill after 30 s
    return settings.model_copy(update={"signals": [*settings.signals, "SIGTERM"], "grace_seconds": grace}), scheduler


class Preemption:
    """Watches for signals and agrees with the other ranks on the step to stop at. Construction is collective.

    active: False if nothing is saved."""

    def __init__(self, settings: PreemptionSettings, group: Group, active: bool = True) -> None:
        settings, scheduler = with_scheduler(settings, group.world_size) if active else (settings, None)
        self._settings = settings
        self._group = group
        self._active = active and bool(settings.signals)
        self._sum = group.async_sum() if self._active else None
        self._over = not self._active  # whether the ranks have agreed, or no longer take part
        self._watcher = SignalWatcher(settings.signals if self._active else (), ends=signal.SIGTERM if scheduler else 0)

    def preempt(self) -> None:
        """Record a preemption. Any thread."""
        if not self._active:
            raise ConfigError(
                "preempt(): preemption is off (`preemption: {signals: []}`, or policy observe, which saves nothing); "
                "set at least one signal to turn it on"
            )
        self._watcher.note()

    def agreed(self) -> bool:
        """Return whether the job stops at this step boundary: the same on all ranks, True at most once. Collective.

        With several ranks, the job stops one step after the one at which a rank was preempted: ranks do not wait."""
        if self._over:
            return False
        if self._sum is None:
            self._over = self.requested
        else:
            preempted_ranks = self._sum.finish()
            self._over = preempted_ranks is not None and bool(preempted_ranks.item())
            if not self._over:
                self._sum.start(torch.tensor([int(self.requested)], device="cpu"))
        return self._over

    def leave(self) -> None:
        """Stop taking part in the agreement, because a rank is late or gone. Not collective."""
        self._over = True

    @property
    def requested(self) -> bool:
        """Whether this rank was preempted. Not collective."""
        return self._watcher.first is not None

    def deadline(self, alone: bool = False) -> Deadline:
        """Return the deadline set by the earliest signal on any rank. Collective; if ``alone``, of this rank only."""
        first = self._watcher.first
        passed = 0.0 if first is None else time.monotonic() - first
        if not alone:
            with suppress(CollectiveError):  # the next collective raises
                passed = self._group.all_reduce_max([int(1e6 * passed)])[0] / 1e6
        return deadline(self._settings.grace_seconds, passed)

    def close(self, leaving: bool) -> None:
        """Restore the previous handlers. leaving: keep them, since the process exits and echoes must be ignored."""
        self._over = True
        if not leaving:
            self._watcher.close()
