"""Token buckets, spending, learned prices.

A token bucket: fills with time, holds so much at most, and may go into debt.

Spending only what is in it keeps what is spent in any ``t`` seconds within ``rate * t + capacity``. It starts empty,
so that a job that restarts over and over is not given a full bucket each time; a debt does not outlive the process.
It does not know what it holds (bytes, or seconds of work), nor how time passes: the clock is given. One thread.

What saving bytes costs, learned from the saves so far: bytes besides those of units, or seconds.

Pure but for its memory. Costs are lines in the bytes of units that a save is expected to take: a part that every save
costs, and a price a byte.

What saves may cost and have cost: a bucket for each thing that is limited, and the price a byte in each.

A save is charged with what it is expected to cost when it begins, and corrected to what it cost when it is committed;
one that fails stays charged. The first save of a store is full and free, for without it there is nothing to resume.
Pure but for its memory: the clock is in the buckets, so that a job and its simulation keep the same account.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


class TokenBucket:
    """rate: tokens a second, > 0. capacity: tokens, > 0. clock: seconds, never going back."""

    def __init__(self, rate: float, capacity: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._capacity = capacity
        self._clock = clock
        self._level = 0.0
        self._at = clock()

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self._rate

    @property
    def capacity(self) -> float:
        """The most that it holds."""
        return self._capacity

    def available(self) -> float:
        """Tokens in it now; below 0: what is owed."""
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
        return self._level

    def charge(self, tokens: float) -> None:
        """Take tokens out, even where there are not so many; below 0: give back, as far as there is room."""
        self._level = min(self._capacity, self.available() - tokens)

    def widen(self, capacity: float) -> None:
        """Hold at least so many."""
        self.available()  # what overflowed until now is gone
        self._capacity = max(self._capacity, capacity)


_MEMORY = 0.9
"""Share of its weight that an observation keeps at the next one: about ten count."""


class Pricing(Protocol):
    """A cost that is learned."""

    @property
    def known(self) -> bool:
        """Whether any save was seen."""
        ...

    def learn(self, nbytes: float, cost: float) -> None:
        """A save expected to take ``nbytes`` cost so much."""
        ...

    def cost(self, nbytes: float) -> float:
        """Of a save that is expected to take so many bytes; >= 0."""
        ...

    def affordable(self, purse: float) -> float:
        """The most bytes that cost no more than ``purse``; below 0 where not even an empty save is affordable."""
        ...


@dataclass
class Excess:
    """Bytes written: those of units, and what each save writes besides (the run state), kept as the least so far.

    What packed less well than before shows as an excess too, but not every time: hence the least."""

    least: float | None = None

    @property
    def known(self) -> bool:
        """True: bytes are bytes."""
        return True

    def learn(self, nbytes: float, cost: float) -> None:
        """See :class:`Pricing`."""
        excess = max(0.0, cost - nbytes)
        self.least = excess if self.least is None else min(self.least, excess)

    def cost(self, nbytes: float) -> float:
        """See :class:`Pricing`."""
        return nbytes + (self.least or 0.0)

    def affordable(self, purse: float) -> float:
        """See :class:`Pricing`."""
        return purse - (self.least or 0.0)


@dataclass
class Fitted:
    """Seconds: what a decision takes that saves nothing, and a line, by least squares, through what saves took beyond.

    Older observations fade. It never falls. Before anything was seen, everything is free."""

    _idle: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Of saves: of 1, bytes, seconds, bytes^2 and bytes * seconds."""

    @property
    def known(self) -> bool:
        """See :class:`Pricing`."""
        return self._sums[0] > 0.0

    def learn(self, nbytes: float, cost: float) -> None:
        """See :class:`Pricing`. Less than a byte: nothing was saved."""
        if nbytes < 1.0:
            self._idle = _MEMORY * self._idle + (1 - _MEMORY) * cost if self._idle else cost
            return
        seconds = max(0.0, cost - self._idle)
        news = (1.0, nbytes, seconds, nbytes * nbytes, nbytes * seconds)
        self._sums = [_MEMORY * old + new for old, new in zip(self._sums, news, strict=True)]

    def cost(self, nbytes: float) -> float:
        """See :class:`Pricing`."""
        fixed, price = self._line()
        return fixed + price * nbytes

    def affordable(self, purse: float) -> float:
        """See :class:`Pricing`."""
        fixed, price = self._line()
        if purse <= fixed:
            return min(purse - fixed, 0.0)
        return (purse - fixed) / price if price > 0.0 else math.inf

    def _line(self) -> tuple[float, float]:
        """(seconds of an empty save, seconds a byte), both >= 0."""
        count, bytes_, seconds, squares, products = self._sums
        if count == 0.0:
            return self._idle, 0.0
        spread = count * squares - bytes_ * bytes_
        price = (count * products - bytes_ * seconds) / spread if spread > 1e-9 * count * squares else -1.0
        fixed = (seconds - price * bytes_) / count
        if price < 0.0 or fixed < 0.0:  # all alike, or noise: everything is put down to the bytes
            fixed, price = 0.0, seconds / bytes_
        return self._idle + fixed, price


BYTES = "bytes"
"""Payload written, in bytes."""
STALL = "stall"
"""Time that training waits, in seconds."""
STORAGE = "storage"
"""Time that saves take beside training, in seconds."""


@dataclass
class _Limit:
    """charged: for the save under way; None where it is free, or settled. everything: bytes of a full save."""

    bucket: TokenBucket
    pricing: Pricing
    charged: float | None = None
    everything: float = math.inf

    def affordable(self) -> float:
        at_hand = self.bucket.available()
        if self.pricing.known or at_hand <= 0.0:
            return self.pricing.affordable(at_hand)
        # After a restart no price is known yet. A full save is taken to cost what the bucket holds.
        return self.everything * at_hand / self.bucket.capacity


@dataclass(frozen=True)
class Widened:
    """A bucket was too small for the largest unit, and was made larger. needs, held: tokens."""

    limit: str
    needs: float
    held: float


class Account:
    """buckets: by :data:`BYTES`, :data:`STALL` and :data:`STORAGE`; what has none is not limited."""

    def __init__(self, buckets: Mapping[str, TokenBucket]) -> None:
        self._limits = {
            name: _Limit(bucket, Excess() if name == BYTES else Fitted()) for name, bucket in buckets.items()
        }
        self._expected = 0.0
        self._stalled = 0.0
        self._begun = self._free = False

    @property
    def limited(self) -> bool:
        """Whether anything is."""
        return bool(self._limits)

    def at_hand(self, limit: str = BYTES) -> float | None:
        """Tokens in one bucket, below 0 where they are owed; None where that is not limited."""
        found = self._limits.get(limit)
        return None if found is None else found.bucket.available()

    def slowest(self, largest: float) -> float:
        """Seconds in which a unit of so many bytes is paid for, by the limit that takes longest."""
        waits = (limit.pricing.cost(largest) / limit.bucket.rate for limit in self._limits.values())
        return max(waits, default=0.0)

    def make_room(self, largest: float, everything: float) -> list[Widened]:
        """Let each bucket hold what a unit of ``largest`` bytes costs: it could never be saved otherwise.

        everything: bytes of a full save."""
        made = []
        for name, limit in self._limits.items():
            limit.everything = everything
            needs, held = limit.pricing.cost(largest), limit.bucket.capacity
            if needs > held:
                limit.bucket.widen(needs)
                made.append(Widened(name, needs, held))
        return made

    def offer(self) -> float | None:
        """Bytes of units that a save may take now, by the tightest limit; None where nothing is limited."""
        self._learn_stall()
        return min((limit.affordable() for limit in self._limits.values()), default=None)

    def begin(self, expected: float, free: bool) -> float:
        """A save expected to take so many bytes of units begins. The bytes of it that are not at hand."""
        beyond = 0.0 if free else max(0.0, expected - max(0.0, self._affordable()))
        self._expected, self._begun, self._free = expected, True, free
        for name, limit in self._limits.items():
            limit.charged = None if free or name == STALL else limit.pricing.cost(expected)
            limit.bucket.charge(limit.charged or 0.0)
        return beyond

    def stalled(self, seconds: float) -> None:
        """Training waited, for the save that began last or for a decision."""
        self._stalled += seconds
        if STALL in self._limits and not self._free:
            self._limits[STALL].bucket.charge(seconds)

    def committed(self, written: float, seconds: float) -> None:
        """The save that began last is committed: payload bytes over all ranks, and seconds beside training."""
        for name, took in ((BYTES, written), (STORAGE, seconds)):
            limit = self._limits.get(name)
            if limit is not None:
                limit.bucket.charge(took - limit.charged if limit.charged is not None else 0.0)
                limit.charged = None
                limit.pricing.learn(self._expected, took)

    def _affordable(self) -> float:
        return min((limit.affordable() for limit in self._limits.values()), default=math.inf)

    def _learn_stall(self) -> None:
        if STALL in self._limits and (self._begun or self._stalled):
            self._limits[STALL].pricing.learn(self._expected if self._begun else 0.0, self._stalled)
        self._stalled, self._begun, self._free = 0.0, False, False
