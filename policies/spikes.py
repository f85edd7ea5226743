"""Weights that moved further at once than they ever do: an early sign of silent corruption. Pure; no clock, no I/O.

A flipped bit in an exponent, a device that computes wrongly or a bad restore changes *one* layer's weights by far more
than an optimizer would. So each layer is compared with its own past, and that with all others:

    bound(t)  = median over its last readings (s, d) of  d * max(1, staleness / s)
    jump(t)   = (drift / bound) / max(1, median of the same over all layers read together)

``bound`` is what drift could be at this staleness if the layer moved as before: distances add up at most in proportion
to steps, so a longer way was allowed for, and a shorter one is not held against it. Dividing by the median of all
layers lets a learning rate that warms up, or starts again, pass: it moves all of them. A jump is a **spike** from
``FACTOR`` on, where it is also ``SIGMAS`` robust standard deviations above what jumps of this layer are otherwise, with
at least ``LEAST`` readings. Only the first reading of a stretch above is told.

Moments are not judged: one large gradient moves them like this by nature. What corrupts them shows in the weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from store.names import Unit

FACTOR = 4.0
SIGMAS = 6.0
LEAST = 8
WINDOW = 32
_CROWD = 3
"""Layers read together, from which on their median says anything."""

_NORMAL = 1.4826
"""Standard deviation of normal values by their median absolute deviation."""


@dataclass(frozen=True)
class Reading:
    """drift of a unit, as a fraction, at a staleness of so many steps."""

    drift: float
    staleness: int


@dataclass(frozen=True)
class Spike:
    """A unit moved ``jump`` times as far as it used to."""

    unit: Unit
    drift: float
    jump: float


@dataclass
class _Past:
    readings: deque[Reading] = field(default_factory=lambda: deque(maxlen=WINDOW))
    jumps: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    above: bool = False


class Spikes:
    """Remembers a few readings of every unit. jumps: of each unit's newest reading, where there was enough to say."""

    def __init__(self) -> None:
        self._past: dict[Unit, _Past] = {}
        self.jumps: dict[Unit, float] = {}

    def read(self, readings: Mapping[Unit, Reading]) -> list[Spike]:
        """Take readings of one moment. Those that are spikes, furthest first."""
        usable = {unit: one for unit, one in readings.items() if one.staleness > 0 and math.isfinite(one.drift)}
        raw = {unit: found for unit, one in usable.items() if (found := self._raw(unit, one)) is not None}
        crowd = max(1.0, median(raw.values())) if len(raw) >= _CROWD else 1.0
        spikes = [
            spike
            for unit, found in raw.items()
            if (spike := self._judged(unit, usable[unit], found / crowd)) is not None
        ]
        for unit, one in usable.items():
            self._past.setdefault(unit, _Past()).readings.append(one)
        return sorted(spikes, key=lambda one: -one.jump)

    def _raw(self, unit: Unit, now: Reading) -> float | None:
        past = self._past.get(unit)
        if past is None or len(past.readings) < LEAST:
            return None
        bound = median(one.drift * max(1.0, now.staleness / one.staleness) for one in past.readings)
        if bound > 0.0:
            return now.drift / bound
        return math.inf if now.drift > 0.0 else None  # it never moved so far

    def _judged(self, unit: Unit, now: Reading, jump: float) -> Spike | None:
        past = self._past[unit]
        was_above, past.above = past.above, jump >= max(FACTOR, _usual(past.jumps))
        self.jumps[unit] = jump
        if math.isfinite(jump) and jump > 0.0:
            past.jumps.append(jump)
        return Spike(unit, now.drift, jump) if past.above and not was_above else None


def _usual(jumps: deque[float]) -> float:
    """How far up jumps of a unit go, on the logarithmic scale on which ratios are symmetric."""
    if len(jumps) < LEAST:
        return 0.0
    logs = [math.log(one) for one in jumps]
    middle = median(logs)
    spread = _NORMAL * median(abs(one - middle) for one in logs)
    return math.exp(min(middle + SIGMAS * spread, 700.0))
