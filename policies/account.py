"""What saves may cost and have cost: a bucket for each thing that is limited, and the price a byte in each.

A save is charged with what it is expected to cost when it begins, and corrected to what it cost when it is committed;
one that fails stays charged. The first save of a store is full and free, for without it there is nothing to resume.
Pure but for its memory: the clock is in the buckets, so that a job and its simulation keep the same account.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from policies.bucket import TokenBucket
from policies.pricing import Excess, Fitted, Pricing

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
