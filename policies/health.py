"""Which layers hold non-finite values, and which units there is any use in saving.

The gate works on whole layers: weights and moments belong together, and a layer whose second moment has
overflowed has weights that the next step will spoil.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.base import UnitStats
from store.names import Unit


def sick_slots(stats: Sequence[UnitStats]) -> Mapping[str, tuple[str, ...]]:
    """For every layer with NaN or infinity: the slots that have them, sorted by name."""
    found: dict[str, list[str]] = {}
    for one in stats:
        if not one.finite:
            found.setdefault(one.unit.layer, []).append(one.unit.slot)
    return {layer: tuple(sorted(slots)) for layer, slots in found.items()}


def worth_saving(stats: Sequence[UnitStats]) -> frozenset[Unit]:
    """The units that move and whose layer is finite: the others are held back whatever a policy says."""
    sick = sick_slots(stats)
    return frozenset(one.unit for one in stats if one.moving and one.unit.layer not in sick)
