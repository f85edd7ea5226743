"""The certificate of what a resume would take, for a page: a row for each layer, a group of cells for each slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.cli.layers import slots_of
from deploy.cli.slots import max_drift, sizes, span
from deploy.cli.text import drift_text, kind_text, size_text
from deploy.report.scale import Scale, scale_for
from store.certificate import Certificate, CertifiedUnit, is_lossy, most


@dataclass(frozen=True)
class Cell:
    """One unit. level: colour of its drift, -1 for none. state: ``fresh``, ``stale``, ``fixed`` or ``fallback``."""

    step: int
    age: str
    drift: str
    level: int
    encoding: str
    error: str
    state: str


@dataclass(frozen=True)
class LayerRow:
    """cells: by slot, None where the layer has no such slot."""

    layer: str
    cells: Sequence[Cell | None]
    size: str


@dataclass(frozen=True)
class SlotRow:
    """All layers of a slot."""

    slot: str
    units: int
    oldest: str
    newest: str
    drift: str
    error: str
    size: str
    share: str
    encodings: str


@dataclass(frozen=True)
class Certified:
    """kind: exact, or how far from it. effective: where the weights stand, where that is not the step itself."""

    save: str
    step: int
    exact: bool
    kind: str
    effective: float | None
    slots: Sequence[str]
    rows: Sequence[LayerRow]
    totals: Sequence[SlotRow]
    rounded: bool
    fallbacks: bool


def certified(certificate: Certificate, parameters: int) -> Certified:
    """parameters: of the model."""
    units = certificate.units
    slots = slots_of(units)
    scale = scale_for([unit.drift for unit in units if unit.moving and unit.drift])
    by_layer: dict[str, dict[str, CertifiedUnit]] = {}
    for unit in units:
        by_layer.setdefault(unit.layer, {})[unit.slot] = unit
    rows = [
        LayerRow(
            layer,
            [_cell(found[slot], scale) if slot in found else None for slot in slots],
            size_text(sum(unit.nbytes for unit in found.values())),
        )
        for layer, found in by_layer.items()
    ]
    totals = [_total(slot, [unit for unit in units if unit.slot == slot], parameters) for slot in slots]
    totals += [_total("all", units, parameters)] if len(slots) > 1 else []
    return Certified(
        save=certificate.save,
        step=certificate.step,
        exact=certificate.exact,
        kind=kind_text(
            exact=certificate.exact,
            max_staleness=certificate.max_staleness,
            max_drift=certificate.max_drift,
            lossy=certificate.lossy,
        ),
        effective=None if certificate.effective_step == certificate.step else certificate.effective_step,
        slots=slots,
        rows=rows,
        totals=totals,
        rounded=bool(certificate.lossy),
        fallbacks=any(unit.fallback for unit in units),
    )


def _cell(unit: CertifiedUnit, scale: Scale) -> Cell:
    fixed = not unit.moving and not unit.fallback
    state = "fallback" if unit.fallback else "fixed" if fixed else "stale" if unit.staleness else "fresh"
    level = scale.level(unit.drift) if unit.moving and unit.drift else -1
    return Cell(
        step=unit.step,
        age="fixed" if fixed else str(unit.staleness),
        drift="" if fixed else drift_text(unit.drift),
        level=level,
        encoding=unit.encoding,
        error=drift_text(unit.error) if is_lossy(unit.encoding) else "",
        state=state,
    )


def _total(slot: str, units: Sequence[CertifiedUnit], parameters: int) -> SlotRow:
    oldest, newest = span(units)
    size, share = sizes(units, parameters)
    lossy = [unit for unit in units if is_lossy(unit.encoding)]
    encodings = ", ".join(dict.fromkeys(unit.encoding for unit in units))
    error = drift_text(most(unit.error for unit in lossy)) if lossy else ""
    return SlotRow(slot, len(units), oldest, newest, max_drift(units), error, size, share, encodings)
