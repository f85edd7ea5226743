"""One decision's measurements: every unit over all ranks, and what the policy is shown.

Joins the meter (distances on this rank), the group (sums over ranks) and the ledger (versions, on rank 0).
Training thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from monitor.drift.base import DriftMeter, Measure, drift_ratio
from monitor.group import Group
from monitor.ledger import Ledger
from monitor.units import LocalUnit, UnitTable, is_gated, is_moving
from policies.base import UnitStats
from store.names import Unit
from store.schema import MeasureRecord


@dataclass(frozen=True)
class Measured:
    """A unit over all ranks. drift is None where it is not finite."""

    drift: float | None
    finite: bool


def measure_all(
    meter: DriftMeter, group: Group, units: Collection[Unit], local: Mapping[Unit, LocalUnit]
) -> tuple[dict[Unit, Measured], dict[Unit, Measure]]:
    """Measure ``units`` (the same on all ranks) on live tensors: over all ranks, and on this one. Collective."""
    mine = {unit: meter.measure(unit, local[unit].tensors) for unit in units if unit in local}
    rows = torch.tensor([_row(mine.get(unit)) for unit in units], dtype=torch.float64).reshape(-1, 3)
    summed = group.total(rows).tolist()
    measured = {}
    for unit, (moved, reference, sick) in zip(units, summed, strict=True):
        finite = sick == 0
        measured[unit] = Measured(drift_ratio(moved, reference) if finite else None, finite)
    return measured, mine


def unit_stats(table: UnitTable, ledger: Ledger, step: int, measured: Mapping[Unit, Measured]) -> tuple[UnitStats, ...]:
    """What the policy is shown. A unit that was not measured has a version but no drift."""
    shown = []
    for unit, size in table.sizes.items():
        layer = table.layer(unit)
        staleness = ledger.staleness(unit, step)
        found = measured.get(unit)
        version = ledger.versions.get(unit)
        shown.append(
            UnitStats(
                unit=unit,
                position=layer.position,
                block=layer.block,
                nbytes=size.nbytes,
                drift=found.drift if found is not None and staleness is not None else None,
                staleness=staleness,
                finite=found is None or found.finite or not is_gated(unit),
                # A buffer with infinities has no drift to tell whether it stands still: it takes its turn.
                moving=is_moving(unit) or (found is not None and not found.finite),
                changed_shape=version is not None and version.numel != size.numel,
            )
        )
    return tuple(shown)


def measure_record(unit: Unit, measure: Measure) -> MeasureRecord:
    """A local measure as the part keeps it."""
    return MeasureRecord(
        layer=unit.layer,
        slot=unit.slot,
        moved_sq=measure.moved_sq if measure.finite else 0.0,
        reference_sq=measure.reference_sq if measure.finite else 0.0,
        finite=measure.finite or not is_gated(unit),
    )


def _row(measure: Measure | None) -> list[float]:
    if measure is None:
        return [0.0, 0.0, 0.0]
    if not measure.finite:
        return [0.0, 0.0, 1.0]
    return [measure.moved_sq, measure.reference_sq, 0.0]
