"""What saving bytes costs, learned from the saves so far: bytes besides those of units, or seconds.

Pure but for its memory. Costs are lines in the bytes of units that a save is expected to take: a part that every save
costs, and a price a byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

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
