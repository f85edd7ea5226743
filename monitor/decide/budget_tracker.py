"""Charge decisions and saves to the budget account, and report its state in metrics and the log. Rank 0 only."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from monitor.events import CommitEvent, DecisionEvent, SaveBeginEvent, SaveListener
from monitor.telemetry.metrics import Metrics
from policies.accounting import BYTES, STALL, STORAGE, Account, Widened
from policies.base import Budget, Choice, UnitStats
from policies.deadline import WriteEstimate
from policies.encodings import expected_bytes
from store.names import Unit

_log = logging.getLogger("driftpoint")

_DEBT_WARNING = 20  # consecutive decisions in debt that cause a warning

_SLOW_WARNING = 3600.0  # seconds to pay for one unit that cause a warning

_UNITS = {BYTES: "bytes", STALL: "seconds of stall", STORAGE: "seconds of writing"}


class BudgetTracker(SaveListener):
    """Keeps the budget account of a job and learns the write speed of saves. Training thread."""

    def __init__(self, account: Account, metrics: Metrics) -> None:
        self._account = account
        self._metrics = metrics
        self._overdrawn = False
        self._in_debt = 0
        self._warned_slow = False
        self._widened: set[str] = set()
        self.writing = WriteEstimate()  # learned from the time that units took to become durable

    def offer(self, stats: Sequence[UnitStats], step: int, reserve: Callable[[], float] = lambda: 0.0) -> Budget:
        """Return what a decision on these units, at ``step``, may cost.

        ``reserve``: bytes to keep back, as far as the bucket has room for them: all of a full one is offered."""
        if not self._account.limited:
            return Budget()
        sizes = [one.nbytes for one in stats]
        for widened in self._account.make_room(max(sizes, default=0), sum(sizes)):
            self._warn_widened(widened)
        self._warn_if_slow(max(sizes, default=0))
        bytes_ = self._account.offer()
        self._update_gauge(bytes_)
        in_debt = bytes_ is not None and bytes_ < 0
        self._overdrawn = self._overdrawn and in_debt
        self._in_debt = self._in_debt + 1 if in_debt else 0
        if self._in_debt == _DEBT_WARNING:
            _log.warning(
                "budget: there was nothing to spend at the last %d decisions, because bounds or the decisions "
                "themselves use the whole budget: raise the limit, or decide less often (`every`)",
                _DEBT_WARNING,
            )
        budget = self._account.budget(step, bytes_)
        if bytes_ is None or not 0.0 < bytes_ < math.inf:
            return budget
        room = max(0.0, self._account.most() - bytes_)
        return replace(budget, bytes=max(0.0, bytes_ - min(reserve(), room)))

    def begin(self, step: int, stats: Sequence[UnitStats], saved: Mapping[Unit, Choice], first: bool) -> None:
        """Charge the expected cost of a save. first: the store has no commit yet."""
        if not self._account.limited:
            return
        expected = sum(
            expected_bytes(one, choice.encoding)
            for one in stats
            if (choice := saved.get(one.unit)) is not None and choice.encoding is not None
        )
        overdraft = self._account.begin(expected, free=first)
        if overdraft < 1.0:
            return
        self._metrics.counter("budget_overdraft_bytes").inc(overdraft)
        if not self._overdrawn:
            _log.warning(
                "budget: the save of step %d exceeds the budget by %.0f bytes, because bounds, save() or a failed "
                "policy require it; optional units are not saved until this is repaid",
                step,
                overdraft,
            )
        self._overdrawn = True

    def committed(self, written: int, seconds: float) -> None:
        """Settle the last save: payload bytes over all ranks, and seconds from its beginning to the commit."""
        self._account.committed(written, seconds)
        self._update_gauge(None)

    def on_save_begin(self, event: SaveBeginEvent) -> None:
        self.begin(event.step, event.decided.stats, event.decided.saved, event.first)

    def on_decision(self, event: DecisionEvent) -> None:
        self._account.stalled(event.stall)

    def on_copy_wait(self, seconds: float) -> None:
        self._account.stalled(seconds)

    def on_commit(self, event: CommitEvent) -> None:
        self.committed(event.written_bytes, event.seconds)
        units, save = event.drawn.manifest.units, event.save.name
        self.writing.learn(sum([one.nbytes for one in units if one.save == save]), event.seconds)

    def _warn_if_slow(self, largest: float) -> None:
        seconds = self._account.slowest(largest)
        if seconds < _SLOW_WARNING or self._warned_slow:
            return
        self._warned_slow = True
        _log.warning(
            "budget: at the configured rate the largest unit, %d bytes raw, can be saved every %.3g hours, and a "
            "restart begins with an empty budget: raise the limit, or set `encoding: compact`",
            largest,
            seconds / 3600,
        )

    def _warn_widened(self, widened: Widened) -> None:
        if widened.limit in self._widened:
            return
        self._widened.add(widened.limit)
        text = (
            "budget: saving the largest unit takes %.4g %s, more than the %.4g that budget.burst_seconds allows: the "
            "burst limit was raised to that"
        )
        _log.warning(text, widened.needs, _UNITS[widened.limit], widened.held)

    def _update_gauge(self, offered: float | None) -> None:
        available = self._account.at_hand()
        shown = available if available is not None else offered
        if shown is not None:
            self._metrics.gauge("budget_bytes").set(shown)
