"""One decision's measurements: every unit over all ranks, and what the policy is shown.

Joins the meter (distances on this rank), the group (sums over ranks) and the ledger (versions, on rank 0).
Training thread only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from monitor.distributed import Group
from monitor.ledger import Ledger
from monitor.observe.drift_meter import DriftMeter, Measure, drift_ratio
from monitor.observe.units import LocalUnit, UnitTable, is_moving
from policies.base import UnitStats
from store.names import Unit


@dataclass(frozen=True)
class Measured:
    """A unit over all ranks. drift is None where it is not finite."""

    drift: float | None
    finite: bool


def measure_all(
    meter: DriftMeter, group: Group, units: Collection[Unit], local: Mapping[Unit, LocalUnit]
) -> tuple[dict[Unit, Measured], dict[Unit, Measure]]:
    """Measure ``units`` (the same on all ranks) on live tensors: over all ranks, and on this one. Collective."""
    if not units:
        return {}, {}
    mine = {unit: meter.measure(unit, local[unit].tensors) for unit in units if unit in local}
    rows = torch.tensor([_row(mine.get(unit)) for unit in units], dtype=torch.float64).reshape(-1, 4)
    summed = group.all_reduce_sum(rows).tolist()
    measured = {}
    for unit, (moved, reference, sick, unknown) in zip(units, summed, strict=True):
        drift = drift_ratio(moved, reference) if not (sick or unknown) else None
        measured[unit] = Measured(drift if drift is None or math.isfinite(drift) else None, sick == 0)
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
                finite=found is None or found.finite,
                moving=is_moving(unit),
                error=version.error if version is not None else 0.0,
                numel=size.numel,
                encoding=version.encoding if version is not None else None,
                stored_bytes=version.nbytes if version is not None else 0,
                changed_shape=version is not None and (version.members != size.members or _untold(table, unit, found)),
            )
        )
    return tuple(shown)


def _untold(table: UnitTable, unit: Unit, found: Measured | None) -> bool:
    """Whether something that should stand still cannot be told to do so: then it has to be saved."""
    return not is_moving(unit) and (unit in table.lost or (found is not None and found.finite and found.drift is None))


def _row(measure: Measure | None) -> list[float]:
    if measure is None:
        return [0.0, 0.0, 0.0, 0.0]
    if not measure.finite:
        return [0.0, 0.0, 1.0, 0.0]
    if not (math.isfinite(measure.moved_sq) and math.isfinite(measure.reference_sq)):
        return [0.0, 0.0, 0.0, 1.0]
    return [measure.moved_sq, measure.reference_sq, 0.0, 0.0]
