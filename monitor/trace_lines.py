"""From what a job decided, committed and measured to the lines of its trace. Pure; see :mod:`store.trace`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from monitor.decided import Decided, Sizes
from monitor.drift.base import drift_ratio
from monitor.ledger import Drawn
from monitor.units import UnitTable, is_moving
from store.names import Unit
from store.trace import CommitLine, DecisionLine, MovedLine, TracedUnit

_DIGITS = 6
"""Of a distance between two decisions: more than a sketch knows."""


def traced_units(table: UnitTable) -> tuple[TracedUnit, ...]:
    """The units of a job over all ranks, in the order of all that is shown of them."""
    return tuple(
        TracedUnit(
            layer=unit.layer,
            slot=unit.slot,
            position=table.layer(unit).position,
            block=table.layer(unit).block,
            nbytes=size.nbytes,
            numel=size.numel,
            moving=is_moving(unit),
        )
        for unit, size in table.sizes.items()
    )


def decision_line(line: DecisionLine, decided: Decided, begun: bool) -> DecisionLine:
    """``line`` with what was decided, bit for bit as the policy saw it. begun: the save was."""
    index = {one.unit: at for at, one in enumerate(decided.stats)}
    return line.model_copy(
        update={
            "offered": _number(decided.offered),
            "drift": tuple(_number(one.drift) for one in decided.stats),
            "staleness": tuple(one.staleness for one in decided.stats),
            "error": tuple(_largest(one.error) for one in decided.stats),
            "encoding": tuple(one.encoding for one in decided.stats),
            "stored_bytes": tuple(one.stored_bytes for one in decided.stats),
            "sick": tuple(index[one.unit] for one in decided.seen if not one.finite),
            "changed": tuple(index[one.unit] for one in decided.seen if one.changed_shape),
            "saved": {index[unit]: choice.encoding for unit, choice in decided.saved.items()} if begun else {},
            "forced": decided.forced,
            "preempted": decided.preempted,
        }
    )


def commit_line(line: CommitLine, units: Sequence[Unit], sizes: Sizes, untold: frozenset[Unit]) -> CommitLine:
    """``line`` with what was saved. untold: units whose drift is none, for lack of what to tell it from."""
    index = {unit: at for at, unit in enumerate(units)}
    found = {
        index[unit]: (nbytes, encoding, _largest(error), None if unit in untold else _number(drift))
        for unit, (nbytes, encoding, error, drift) in sizes.items()
        if unit in index
    }
    return line.model_copy(update={"sizes": found})


def moved_line(step: int, steps: Sequence[int], rows: torch.Tensor, places: Sequence[int | None]) -> MovedLine:
    """rows: as :class:`monitor.drift.ladder.Compared` has them, summed over ranks. places: the row of each unit, None
    for those that have none."""
    since = {}
    for then, found in zip(steps, rows.tolist(), strict=True):
        ratios = [_ratio(*row) for row in found]
        since[then] = tuple(None if place is None else ratios[place] for place in places)
    return MovedLine(step=step, since=since)


def committed_sizes(drawn: Drawn) -> Sizes:
    """The units that a commit holds anew."""
    manifest = drawn.manifest
    return {
        record.unit: (record.nbytes, record.encoding, record.error, drawn.drift.get(record.unit))
        for record in manifest.units
        if record.save == manifest.save.name
    }


def plain(value: Any) -> Any:
    """Settings as JSON has them; what it has not as text: they may hold anything that a policy of the user's takes."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else repr(value)


def _ratio(moved: float, reference: float, unknown: float) -> float | None:
    if unknown or not (math.isfinite(moved) and math.isfinite(reference)):
        return None
    found = _number(drift_ratio(moved, reference))
    return None if found is None else float(f"{found:.{_DIGITS}g}")


def _number(value: float | None) -> float | None:
    """JSON has neither infinities nor NaN."""
    return value if value is not None and math.isfinite(value) else None


def _largest(value: float) -> float:
    return value if math.isfinite(value) else sys.float_info.max
