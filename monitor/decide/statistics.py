"""Measure units over all ranks and build the statistics shown to the policy. Training thread."""

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from monitor.distributed import Group
from monitor.ledger import Ledger
from monitor.observe.drift_meter import DriftMeter, Measure, drift_ratio
from monitor.observe.units import LocalUnit, UnitTable
from policies.base import UnitStats
from store.names import Unit

_log = logging.getLogger("driftpoint")


@dataclass(frozen=True)
class Measured:
    """Measurement of a unit over all ranks. ``drift`` is None if it is not finite."""

    drift: float | None
    finite: bool


def measure_all(
    meter: DriftMeter, group: Group, units: Collection[Unit], local: Mapping[Unit, LocalUnit]
) -> tuple[dict[Unit, Measured], dict[Unit, Measure]]:
    """Measure ``units`` on live tensors. Return the results over all ranks, and those of this rank. Collective.

    The drift of a unit that a rank cannot measure, for lack of memory for example, is unknown on all ranks. ``units``
    must be the same on all ranks."""
    if not units:
        return {}, {}
    mine, unknown = dict[Unit, Measure](), set[Unit]()
    for unit in units:
        try:
            if unit in local:
                mine[unit] = meter.measure(unit, local[unit].tensors)
        except (MemoryError, RuntimeError) as error:  # raised, it would leave the other ranks waiting below
            _log.warning("%s cannot be measured, so its drift is unknown at this decision: %r", unit, error)
            unknown.add(unit)
    rows = torch.tensor(
        [_UNKNOWN if unit in unknown else _row(mine.get(unit)) for unit in units], dtype=torch.float64
    ).reshape(-1, 4)
    summed = group.all_reduce_sum(rows).tolist()
    measured = {}
    for unit, (moved, reference, nonfinite, unmeasured) in zip(units, summed, strict=True):
        drift = drift_ratio(moved, reference) if not (nonfinite or unmeasured) else None
        measured[unit] = Measured(drift if drift is None or math.isfinite(drift) else None, nonfinite == 0)
    return measured, mine


def unit_stats(table: UnitTable, ledger: Ledger, step: int, measured: Mapping[Unit, Measured]) -> tuple[UnitStats, ...]:
    """Return the statistics shown to the policy. Units that were not measured have no drift."""
    stats, versions = [], ledger.versions
    for unit, layer, size, moving in table.rows:
        version, measurement = versions.get(unit), measured.get(unit)
        # A version of a later step does not count: the job resumed from an earlier step.
        age = -1 if version is None else step - version.version.step
        staleness = age if age >= 0 else None
        known = measurement is not None and staleness is not None
        stats.append(
            UnitStats(
                unit,
                layer.position,
                layer.block,
                size.nbytes,
                drift=measurement.drift if known and measurement is not None else None,
                staleness=staleness,
                finite=measurement is None or measurement.finite,
                moving=moving,
                changed_shape=version is not None
                and (version.members != size.members or (not moving and _is_unverified(table, unit, measurement))),
                error=version.error if version is not None else 0.0,
                numel=size.numel,
                encoding=version.encoding if version is not None else None,
                stored_bytes=version.nbytes if version is not None else 0,
            )
        )
    return tuple(stats)


def _is_unverified(table: UnitTable, unit: Unit, measured: Measured | None) -> bool:
    """Return whether a frozen unit may have changed, since its drift is unknown. It must be saved then."""
    return unit in table.lost or (measured is not None and measured.finite and measured.drift is None)


_UNKNOWN = [0.0, 0.0, 0.0, 1.0]


def _row(measure: Measure | None) -> list[float]:
    if measure is None:
        return [0.0, 0.0, 0.0, 0.0]
    if not measure.finite:
        return [0.0, 0.0, 1.0, 0.0]
    if not (math.isfinite(measure.moved_sq) and math.isfinite(measure.reference_sq)):
        return _UNKNOWN
    return [measure.moved_sq, measure.reference_sq, 0.0, 0.0]
