"""Tells the account of a job what decisions and saves cost, and people what it says. Rank 0 only.

The rules are those of :mod:`policies.accounting`; here they meet units, metrics and the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from typing_extensions import override

from monitor.events import CommitEvent, DecisionEvent, SaveBeginEvent, SaveListener
from monitor.telemetry.metrics import Metrics
from policies.accounting import BYTES, STALL, STORAGE, Account, Widened
from policies.base import Budget, Choice, UnitStats
from policies.deadline import WriteEstimate
from policies.encodings import expected_bytes
from store.names import Unit

_log = logging.getLogger("driftpoint")

_PATIENCE = 20
"""Decisions in debt, one after the other, after which that is told."""

_LONG = 3600.0
"""Seconds of saving up for one unit, from which on that is told."""

_UNITS = {BYTES: "bytes", STALL: "seconds of stall", STORAGE: "seconds of writing"}


class BudgetTracker(SaveListener):
    """The account of a job, kept from the training thread, and what it learns about the speed of saves."""

    def __init__(self, account: Account, metrics: Metrics) -> None:
        self._account = account
        self._metrics = metrics
        self._owing = False
        self._in_debt = 0
        self._told_slow = False
        self._widened: set[str] = set()
        self.writing = WriteEstimate()
        """Time that units took to become durable."""

    def offer(self, stats: Sequence[UnitStats]) -> Budget:
        """What a decision on these units may cost."""
        if not self._account.limited:
            return Budget()
        sizes = [one.nbytes for one in stats]
        for widened in self._account.make_room(max(sizes, default=0), sum(sizes)):
            self._tell_widened(widened)
        self._tell_slow(max(sizes, default=0))
        bytes_ = self._account.offer()
        self._show(bytes_)
        in_debt = bytes_ is not None and bytes_ < 0
        self._owing = self._owing and in_debt
        self._in_debt = self._in_debt + 1 if in_debt else 0
        if self._in_debt == _PATIENCE:
            _log.warning(
                "budget: at the last %d decisions there was nothing to spend. What bounds demand, or deciding itself, "
                "takes as much as is allowed: raise the limit, or decide less often (`every`)",
                _PATIENCE,
            )
        return Budget(bytes_)

    def begin(self, step: int, stats: Sequence[UnitStats], saved: Mapping[Unit, Choice], first: bool) -> None:
        """A save of ``step`` begins. first: the store has no commit yet."""
        if not self._account.limited:
            return
        expected = sum(
            expected_bytes(one, choice.encoding)
            for one in stats
            if (choice := saved.get(one.unit)) is not None and choice.encoding is not None
        )
        self._tell_overdrawn(step, self._account.begin(expected, free=first))

    def stalled(self, seconds: float) -> None:
        """Training waited, for a decision or for copies of the save that began last."""
        self._account.stalled(seconds)

    def committed(self, written: int, seconds: float) -> None:
        """The save that began last is committed: payload bytes over all ranks; from its beginning to the commit."""
        self._account.committed(written, seconds)
        self._show(None)

    @override
    def on_save_begin(self, event: SaveBeginEvent) -> None:
        self.begin(event.step, event.decided.stats, event.decided.saved, event.first)

    @override
    def on_decision(self, event: DecisionEvent) -> None:
        self.stalled(event.stall)

    @override
    def on_copy_wait(self, seconds: float) -> None:
        self.stalled(seconds)

    @override
    def on_commit(self, event: CommitEvent) -> None:
        self.committed(event.written_bytes, event.seconds)
        units = event.drawn.manifest.units
        self.writing.learn(sum(one.nbytes for one in units if one.save == event.save.name), event.seconds)

    def _tell_slow(self, largest: float) -> None:
        seconds = self._account.slowest(largest)
        if seconds < _LONG or self._told_slow:
            return
        self._told_slow = True
        _log.warning(
            "budget: the largest layer slot, %d bytes raw, is paid for in %.3g hours, and what was saved up ends with "
            "the process: raise the limit, or set `encoding: compact`",
            largest,
            seconds / 3600,
        )

    def _tell_widened(self, widened: Widened) -> None:
        if widened.limit in self._widened:
            return
        self._widened.add(widened.limit)
        _log.warning(
            "budget: saving the largest layer slot takes %.4g %s, more than the %.4g that budget.burst_seconds lets "
            "gather: that much may gather instead",
            widened.needs,
            _UNITS[widened.limit],
            widened.held,
        )

    def _show(self, offered: float | None) -> None:
        at_hand = self._account.at_hand()
        shown = at_hand if at_hand is not None else offered
        if shown is not None:
            self._metrics.gauge("budget_bytes").set(shown)

    def _tell_overdrawn(self, step: int, beyond: float) -> None:
        if beyond < 1.0:
            return
        self._metrics.counter("budget_overdraft_bytes").inc(beyond)
        if not self._owing:
            _log.warning(
                "budget: the save of step %d takes %.0f bytes more than are at hand, since bounds, save() or a policy "
                "that failed demand it; nothing else is saved until they are paid back",
                step,
                beyond,
            )
        self._owing = True
