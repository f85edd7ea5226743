"""Which units get time series of their own, where there are too many for all. Pure; the training thread's.

Series must not come and go: a layer that is shown stays shown. So it is not the most drifted of the moment that are
kept, but whole layers spread evenly over the model, from the first to the last, as many as fit into seven eighths of
the places. The last eighth is for units that stood out (not finite, a spike) and had no place: first come, first
served, and kept. What is counted over all units counts all of them, shown or not.
"""

from __future__ import annotations

from collections.abc import Iterable

from store.names import Unit


class Shown:
    """most: units at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._all: frozenset[Unit] = frozenset()
        self._shown: set[Unit] = set()

    @property
    def hidden(self) -> int:
        """Units without a place."""
        return len(self._all - self._shown)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._shown

    def __len__(self) -> int:
        return len(self._shown)

    def know(self, units: Iterable[Unit]) -> set[Unit]:
        """The units of the job, in model order. Those that lost their place, because they are not there any more.

        Nothing changes where they are the same as before."""
        order = list(units)
        if frozenset(order) == self._all:
            return set()
        self._all = frozenset(order)
        before = self._shown
        self._shown = before & self._all
        self._shown |= set(order) if len(order) <= self._most else self._spread(order)
        return before - self._shown

    def stood_out(self, unit: Unit) -> None:
        """Give a unit a place, if there is one."""
        if unit in self._all and len(self._shown) < self._most:
            self._shown.add(unit)

    def _spread(self, order: list[Unit]) -> set[Unit]:
        layers: dict[str, list[Unit]] = {}
        for unit in order:
            layers.setdefault(unit.layer, []).append(unit)
        names = list(layers)
        places = self._most - self._most // 8 - len(self._shown)
        for count in range(min(len(names), max(places, 0)), 0, -1):
            chosen = {names[round(i * (len(names) - 1) / max(count - 1, 1))] for i in range(count)}
            found = {unit for name in chosen for unit in layers[name]} - self._shown
            if len(found) <= places:
                return found
        return set()
