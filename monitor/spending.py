"""What saves may cost and have cost: joins the token bucket with the decisions of policy ``budget``. Rank 0 only.

A save is charged with what it is expected to write when it begins, and corrected to what it wrote when it is
committed. A save that fails stays charged: it wrote, or may have. The first save of a store is full and free, for
without it there is nothing to resume.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from monitor.bucket import TokenBucket
from monitor.metrics import Metrics
from policies.base import Budget, Choice, UnitStats
from policies.options import expected_bytes
from store.names import Unit

_log = logging.getLogger("driftpoint")


class Spending:
    """The account of a job. Without a bucket everything may be spent."""

    def __init__(self, bucket: TokenBucket | None, metrics: Metrics) -> None:
        self._bucket = bucket
        self._metrics = metrics
        self._overhead: float | None = None
        self._charged: float | None = None
        self._expected = 0.0
        self._owing = False

    def offer(self, stats: Sequence[UnitStats]) -> Budget:
        """What a decision on these units may cost.

        The bucket is made to hold the largest of them at least: it could never be saved otherwise."""
        if self._bucket is None:
            return Budget()
        largest = max((one.nbytes for one in stats), default=0) + (self._overhead or 0.0)
        if largest > self._bucket.capacity:
            _log.warning(
                "budget: saving the largest layer slot takes %d bytes, more than the %.0f that budget.burst_seconds "
                "lets gather: that much may gather instead",
                largest,
                self._bucket.capacity,
            )
            self._bucket.widen(largest)
        at_hand = self._bucket.available()
        self._metrics.budget.set(at_hand)
        self._owing = self._owing and at_hand < 0
        return Budget(at_hand - (self._overhead or 0.0))

    def begin(self, step: int, stats: Sequence[UnitStats], saved: Mapping[Unit, Choice], first: bool) -> None:
        """A save of ``step`` begins. first: the store has no commit yet."""
        if self._bucket is None:
            return
        self._expected = sum(
            expected_bytes(one, choice.encoding)
            for one in stats
            if (choice := saved.get(one.unit)) is not None and choice.encoding is not None
        )
        self._charged = None
        if not first:
            self._charged = self._expected + (self._overhead or 0.0)
            self._tell_overdrawn(step, self._charged - max(0.0, self._bucket.available()))
            self._bucket.charge(self._charged)

    def committed(self, written: int) -> None:
        """The save that began last is committed and wrote so many payload bytes, over all ranks."""
        if self._bucket is None:
            return
        if self._charged is not None:
            self._bucket.charge(written - self._charged)
        # The run state, which the policy knows nothing of, is kept back from what it may spend. What packed less well
        # than before shows here too, but not every time: hence the least excess so far.
        excess = max(0.0, written - self._expected)
        self._overhead = excess if self._overhead is None else min(self._overhead, excess)
        self._metrics.budget.set(self._bucket.available())

    def _tell_overdrawn(self, step: int, beyond: float) -> None:
        if beyond < 1.0:
            return
        self._metrics.overdraft.inc(beyond)
        if not self._owing:
            _log.warning(
                "budget: the save of step %d takes %.0f bytes more than are at hand, since bounds, save() or a policy "
                "that failed demand it; "
                "nothing else is saved until they are paid back",
                step,
                beyond,
            )
        self._owing = True
