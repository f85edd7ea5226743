"""Limit the cost of saves with token buckets, and learn the price per byte.

Spending only what is in a bucket keeps the cost in any ``t`` seconds below ``rate * t + capacity``. Buckets start
empty, so repeated restarts do not get a full one each; a debt ends with the process. A save is charged its expected
cost when it begins, corrected when committed; a failed one stays charged. The first save of a store is full and free:
without it there is nothing to resume. The clock is an argument, so a job and its replay account alike. One thread."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from policies.base import Budget


class TokenBucket:
    """A token bucket. rate: tokens per second, > 0. capacity: tokens, > 0. clock: monotonic seconds."""

    def __init__(self, rate: float, capacity: float, clock: Callable[[], float]) -> None:
        self.rate, self.capacity, self._clock = rate, capacity, clock
        self._level, self._at = 0.0, clock()

    def available(self) -> float:
        """Return the tokens available now; below 0: a debt."""
        now = self._clock()
        self._level = min(self.capacity, self._level + (now - self._at) * self.rate)
        self._at = now
        return self._level

    def charge(self, tokens: float) -> None:
        """Take tokens, even more than are available; a negative number gives tokens back, up to the capacity."""
        self._level = min(self.capacity, self.available() - tokens)

    def widen(self, capacity: float) -> None:
        """Raise the capacity to at least ``capacity``."""
        self.available()  # tokens that overflowed so far are lost
        self.capacity = max(self.capacity, capacity)


_MEMORY = 0.9  # share of its weight that an observation keeps at the next one, so that about ten count


@dataclass
class Excess:
    """Learns the bytes that saves write: those of units plus those of the run state, the least excess so far.

    Units that compress worse than expected add to the excess too, but not every time: hence the least."""

    least: float | None = None

    known: ClassVar[bool] = True

    def learn(self, nbytes: float, cost: float) -> None:
        """Record the cost of a save that was expected to take ``nbytes``."""
        excess = max(0.0, cost - nbytes)
        self.least = excess if self.least is None else min(self.least, excess)

    def cost(self, nbytes: float) -> float:
        """Return the expected cost of a save of ``nbytes``, >= 0."""
        return nbytes + (self.least or 0.0)

    def affordable(self, available: float) -> float:
        """Return the most bytes that cost at most ``available``; below 0 if not even an empty save is affordable."""
        return available - (self.least or 0.0)


@dataclass
class Fitted:
    """Learns seconds: the time of a decision that saves nothing, plus a least-squares line through the rest.

    Older observations fade. The line never falls. Before the first observation everything is free."""

    _idle: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # of 1, bytes, seconds, bytes^2, bytes * seconds

    @property
    def known(self) -> bool:
        """Whether a price is known."""
        return self._sums[0] > 0.0

    def learn(self, nbytes: float, cost: float) -> None:
        """Record a save; with less than a byte, a decision that saved nothing."""
        if nbytes < 1.0:
            self._idle = _MEMORY * self._idle + (1 - _MEMORY) * cost if self._idle else cost
            return
        seconds = max(0.0, cost - self._idle)
        added = (1.0, nbytes, seconds, nbytes * nbytes, nbytes * seconds)
        self._sums = [_MEMORY * old + new for old, new in zip(self._sums, added, strict=True)]

    def cost(self, nbytes: float) -> float:
        fixed, price = self._line()
        return fixed + price * nbytes

    def affordable(self, available: float) -> float:
        fixed, price = self._line()
        if available <= fixed:
            return min(available - fixed, 0.0)
        return (available - fixed) / price if price > 0.0 else math.inf

    def _line(self) -> tuple[float, float]:
        """Return (seconds of an empty save, seconds per byte), both >= 0."""
        count, bytes_, seconds, squares, products = self._sums
        if count == 0.0:
            return self._idle, 0.0
        spread = count * squares - bytes_ * bytes_
        price = (count * products - bytes_ * seconds) / spread if spread > 1e-9 * count * squares else -1.0
        fixed = (seconds - price * bytes_) / count
        if price < 0.0 or fixed < 0.0:  # saves of one size, or noise: attribute all time to the bytes
            fixed, price = 0.0, seconds / bytes_
        return self._idle + fixed, price


BYTES = "bytes"  # payload written, in bytes
STALL = "stall"  # time that training waits, in seconds
STORAGE = "storage"  # time that saves take beside training, in seconds


@dataclass
class _Limit:
    bucket: TokenBucket
    pricing: Excess | Fitted
    charged: float | None = None  # for the save under way; None if it is free or settled
    everything: float = math.inf  # bytes of a full save

    def affordable(self) -> float:
        available = self.bucket.available()
        if self.pricing.known or available <= 0.0:
            return self.pricing.affordable(available)
        # After a restart no price is known yet: assume that a full save costs the capacity.
        return self.everything * available / self.bucket.capacity

    def most(self) -> float:
        """Return the bytes of units that a full bucket pays for."""
        return self.pricing.affordable(self.bucket.capacity) if self.pricing.known else self.everything


@dataclass(frozen=True)
class Widened:
    """A bucket that was enlarged from ``held`` to ``needs`` tokens, to fit the largest unit."""

    limit: str
    needs: float
    held: float


class Account:
    """The account of a job. buckets: by :data:`BYTES`, :data:`STALL` and :data:`STORAGE`; others are unlimited."""

    def __init__(self, buckets: Mapping[str, TokenBucket]) -> None:
        self._limits = {key: _Limit(bucket, Excess() if key == BYTES else Fitted()) for key, bucket in buckets.items()}
        self._expected = 0.0
        self._stalled = 0.0
        self._begun = self._free = False
        self._first: tuple[float, int] | None = None  # bytes offered at first less bytes saved since; the steps then
        self._step: int | None = None  # of the last decision
        self._steps = 0  # since the first decision of this process
        self._made_first = False  # whether this process made the first save of the store

    @property
    def limited(self) -> bool:
        return bool(self._limits)

    def at_hand(self, limit: str = BYTES) -> float | None:
        """Return the tokens in a bucket, below 0 in debt; None if it is not limited."""
        return self._limits[limit].bucket.available() if limit in self._limits else None

    def slowest(self, largest: float) -> float:
        """Return the seconds that the slowest bucket takes to earn the cost of a unit of ``largest`` bytes."""
        return max((limit.pricing.cost(largest) / limit.bucket.rate for limit in self._limits.values()), default=0.0)

    def make_room(self, largest: float, everything: float) -> list[Widened]:
        """Enlarge each bucket to hold the cost of a unit of ``largest`` bytes, which could never be saved otherwise.

        everything: bytes of a full save."""
        widened = []
        for name, limit in self._limits.items():
            limit.everything = everything
            needs, held = limit.pricing.cost(largest), limit.bucket.capacity
            if needs > held:
                limit.bucket.widen(needs)
                widened.append(Widened(name, needs, held))
        return widened

    def offer(self) -> float | None:
        """Return the bytes of units that every bucket can pay for now; None if unlimited."""
        if STALL in self._limits and (self._begun or self._stalled):
            self._limits[STALL].pricing.learn(self._expected if self._begun else 0.0, self._stalled)
        self._stalled, self._begun, self._free = 0.0, False, False
        return min((limit.affordable() for limit in self._limits.values()), default=None)

    def budget(self, step: int, offered: float | None) -> Budget:
        """Return the budget of a decision. ``offered``: the bytes at hand. Call it once at each decision.

        ``per_step`` is the growth of the bytes at hand per step, with the bytes of saves added back. The cost of
        decisions themselves, and what overflowed a full bucket, are not part of it."""
        self._steps += max(0, step - (step if self._step is None else self._step))
        self._step, per_step = step, None
        if offered is not None and math.isfinite(offered):
            if self._first is None:
                self._first = offered, self._steps
            earned, steps = offered - self._first[0], self._steps - self._first[1]
            per_step = earned / steps if steps and earned > 0.0 else None
        return Budget(offered, frozenset(), per_step, self.most(), None if self._made_first else self._steps)

    def most(self) -> float:
        """Return the most bytes of units that one save can ever pay for."""
        return min((limit.most() for limit in self._limits.values()), default=math.inf)

    def begin(self, expected: float, free: bool) -> float:
        """Charge a save of ``expected`` bytes of units. Return the bytes of it that exceed the budget."""
        affordable = min((limit.affordable() for limit in self._limits.values()), default=math.inf)
        beyond = 0.0 if free else max(0.0, expected - max(0.0, affordable))
        self._expected, self._begun, self._free = expected, True, free
        self._made_first |= free
        if self._first is not None and not free:
            self._first = self._first[0] - expected, self._first[1]
        for name, limit in self._limits.items():
            limit.charged = None if free or name == STALL else limit.pricing.cost(expected)
            limit.bucket.charge(limit.charged or 0.0)
        return beyond

    def stalled(self, seconds: float) -> None:
        """Charge seconds that training waited, for the last save or for a decision."""
        self._stalled += seconds
        if STALL in self._limits and not self._free:
            self._limits[STALL].bucket.charge(seconds)

    def committed(self, written: float, seconds: float) -> None:
        """Settle the last save: payload bytes over all ranks, and seconds beside training."""
        for name, took in ((BYTES, written), (STORAGE, seconds)):
            if (limit := self._limits.get(name)) is not None:
                limit.bucket.charge(took - limit.charged if limit.charged is not None else 0.0)
                limit.charged = None
                limit.pricing.learn(self._expected, took)
