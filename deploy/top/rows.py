"""The layers of a frame: how old each slot's version is, how far it drifted, and how drift went lately. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.cli.layers import slots_of
from deploy.safety.facts import Facts
from store.certificate import CertifiedUnit
from store.names import BUFFER, FROZEN, Unit

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Slot:
    """age: steps from the version to where training is now; None: never saved. drift: at the last decision that
    measured it, else at the commit; None: not known. state: ``fresh``, ``stale``, ``fallback`` or ``sick``."""

    age: int | None
    drift: float | None
    state: str


@dataclass(frozen=True)
class LayerRow:
    """slots: by name. course: drift of the first slot at the last decisions, oldest first, None where not measured."""

    layer: str
    slots: Mapping[str, Slot]
    course: Sequence[float | None]


def moving_slots(facts: Facts) -> list[str]:
    """Slots that move, weights first."""
    certificate = None if facts.status is None else facts.status.certificate
    if certificate is not None:
        return slots_of([unit for unit in certificate.units if unit.moving])
    if facts.current is not None:
        return list(dict.fromkeys(one.slot for one in facts.current.job.units if one.moving))
    return []


def layer_rows(facts: Facts, slots: Sequence[str]) -> list[LayerRow]:
    """In the order of the model."""
    certificate = None if facts.status is None else facts.status.certificate
    units = {} if certificate is None else {Unit(one.layer, one.slot): one for one in certificate.units}
    pulse = facts.current
    layers = dict.fromkeys(unit.layer for unit in units if unit.slot not in (FROZEN, BUFFER))
    if pulse is not None and not layers:
        layers = dict.fromkeys(one.layer for one in pulse.job.units if one.moving)
    measured = [] if pulse is None else [decided for decided in pulse.decisions if decided.drift]
    drifts: dict[Unit, float] = {}
    for decided in measured:
        drifts.update(decided.drift)
    sick = frozenset() if pulse is None else pulse.sick
    at = None if pulse is None or not facts.running else pulse.step_at(facts.now)
    rows = []
    for layer in layers:
        found = {
            slot: _slot(units.get(Unit(layer, slot)), drifts.get(Unit(layer, slot)), at, Unit(layer, slot) in sick)
            for slot in slots
            if Unit(layer, slot) in units or Unit(layer, slot) in drifts
        }
        first = Unit(layer, slots[0]) if slots else None
        course = [] if first is None else [decided.drift.get(first) for decided in measured]
        rows.append(LayerRow(layer, found, course))
    return rows


def by_drift(rows: Sequence[LayerRow], slots: Sequence[str]) -> list[LayerRow]:
    """Those that drifted furthest first, by the first slot."""

    def key(row: LayerRow) -> tuple[bool, float]:
        slot = row.slots.get(slots[0]) if slots else None
        return (slot is None or slot.state not in ("sick", "fallback"), -((slot.drift or 0.0) if slot else 0.0))

    return sorted(rows, key=key)


def _slot(unit: CertifiedUnit | None, drift: float | None, at: float | None, sick: bool) -> Slot:
    if unit is None:
        return Slot(None, drift, "sick" if sick else "stale")
    age = unit.staleness if at is None else max(0, round(at - unit.step))
    state = "sick" if sick else "fallback" if unit.fallback else "stale" if unit.staleness else "fresh"
    return Slot(age, unit.drift if unit.fallback or drift is None else drift, state)


def spark(course: Sequence[float | None], width: int, low: float, high: float) -> str:
    """Small bars on a logarithmic scale from ``low`` to ``high``, alike for all layers; blank where not measured."""
    shown = list(course)[-width:]
    span = math.log(high / low) if 0 < low < high else 1.0
    return "".join(_bar(value, low, span) for value in shown).rjust(width)


def _bar(value: float | None, low: float, span: float) -> str:
    if value is None or not math.isfinite(value):
        return " "
    if value <= low:
        return _BARS[0]
    return _BARS[min(len(_BARS) - 1, int(math.log(value / low) / span * len(_BARS)))]


def course_range(rows: Sequence[LayerRow]) -> tuple[float, float]:
    """Of all that is drawn: at most four powers of ten below the largest."""
    found = [value for row in rows for value in row.course if value is not None and value > 0 and math.isfinite(value)]
    high = max(found, default=1.0)
    return max(min(found, default=high / 10), high / 1e4), high * 1.0001
