"""Colours for drift: round thresholds on a logarithmic scale, as many as there are colours. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LEVELS = 9
"""Colours, least drift first. One more than there are thresholds."""

_FINE, _COARSE = (1, 2, 5), (1, 3)
"""Digits of round thresholds."""


@dataclass(frozen=True)
class Scale:
    """thresholds: rising; level i holds values from thresholds[i - 1] on, level 0 what is below all."""

    thresholds: tuple[float, ...]

    def level(self, value: float) -> int:
        """Of a drift >= 0; NaN is nobody's."""
        return sum(1 for threshold in self.thresholds if value >= threshold)


def scale_for(values: Iterable[float]) -> Scale:
    """Thresholds that cover most of the values that are finite and above 0; where all is too much, the highest."""
    found = sorted(value for value in values if value > 0 and math.isfinite(value))
    if not found:
        return Scale((0.001, 0.01, 0.1))
    low, high = found[len(found) // 20], found[-1]
    steps = _steps(low, high, _FINE)
    if len(steps) > LEVELS - 1:
        steps = _steps(low, high, _COARSE)
    return Scale(tuple(steps[-(LEVELS - 1) :]))


def _steps(low: float, high: float, digits: tuple[int, ...]) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found = [float(f"{digit}e{power}") for power in range(first, last + 1) for digit in digits]
    above = [value for value in found if low < value <= high]
    return above or [min(found, key=lambda value: abs(value - high))]


def threshold_text(value: float) -> str:
    """As a legend has it."""
    return f"{value:g}" if value >= 0.001 else f"{value:.0e}".replace("e-0", "e-")
