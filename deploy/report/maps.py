"""The two heat maps of a run: how far each layer had drifted, and what was saved of it when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deploy.cli.text import drift_text, plural, printable
from deploy.report.heat import Grid, Map, heat_map
from deploy.report.history import History
from deploy.report.scale import LEVELS, scale_for, threshold_text
from store.names import WEIGHTS

_ACROSS = 3
"""Panels side by side."""

DRIFT_CLASSES = (*(f"d{level}" for level in range(LEVELS)), "nan")
SAVED_CLASSES = ("s1", "s2", "s3", "r1", "r2", "r3")

_Cells = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Maps:
    """Strips of panels. merged: decisions in a column. rounding: whether anything was stored rounded; sick: whether
    anything was not finite; known: whether any drift is."""

    drift: Sequence[Map]
    saved: Sequence[Map]
    merged: int
    rounding: bool
    sick: bool
    known: bool


def maps_of(history: History) -> Maps:
    """Of the units that move; what does not is saved once and drifts nowhere."""
    bins = history.bins
    moving = [unit for unit in history.units if unit in history.moving]
    layers = list(dict.fromkeys(unit.layer for unit in moving))
    slots = sorted(dict.fromkeys(unit.slot for unit in moving), key=lambda slot: slot != WEIGHTS)
    return Maps(
        drift=_strips(history, [_drift_grid(history, layers, slot) for slot in slots], layers),
        saved=_strips(history, [_saved_grid(history, layers, slot) for slot in slots], layers),
        merged=bins.width,
        rounding=bool(bins.rounded.any()),
        sick=bool(bins.sick.any()),
        known=bool(np.isfinite(bins.drift).any()),
    )


def ticks_of(history: History) -> list[tuple[float, str]]:
    """Where to write steps below a picture: the beginning, the end, and in between."""
    columns = history.bins.columns
    if not columns:
        return []
    places = sorted({round(share * (len(columns) - 1)) for share in (0, 0.25, 0.5, 0.75, 1)})
    found = [(float(place), f"{columns[place].first_step}") for place in places[:-1]]
    end = (float(len(columns)), f"{columns[-1].last_step}")
    return [*found, end] if len(columns) > 1 else [(0.0, f"{columns[0].first_step}")]


def marks_of(history: History) -> list[float]:
    """Restarts, in columns."""
    return [number / history.bins.width for number in history.restarts]


def _strips(history: History, grids: Sequence[Grid], layers: Sequence[str]) -> list[Map]:
    strong = [layer not in history.blocks for layer in layers]
    names = [printable(layer) for layer in layers]
    return [
        heat_map(grids[start : start + _ACROSS], names, strong, ticks_of(history), marks_of(history))
        for start in range(0, len(grids), _ACROSS)
    ]


def _title(slot: str) -> str:
    return f"{slot} (weights)" if slot == WEIGHTS else printable(slot)


def _rows(history: History, layers: Sequence[str], slot: str) -> dict[int, int]:
    """Row of a panel -> row of the bins, of the layers that have the slot."""
    table = {unit.layer: place for place, unit in enumerate(history.units) if unit.slot == slot}
    return {row: table[layer] for row, layer in enumerate(layers) if layer in table}


def _drift_grid(history: History, layers: Sequence[str], slot: str) -> Grid:
    """On a scale of its own: weights and moments differ by powers of ten."""
    bins, rows = history.bins, _rows(history, layers, slot)
    values = bins.drift[list(rows.values())]
    scale = scale_for(values[np.isfinite(values)].tolist())
    classes = np.full((len(layers), len(bins.columns)), -1, np.int64)
    hover = ["none"] * len(layers)
    for row, place in rows.items():
        known = np.isfinite(bins.drift[place])
        found = bins.drift[place][known]
        classes[row, known] = np.searchsorted(scale.thresholds, found, side="right")
        classes[row, bins.sick[place] > 0] = LEVELS
        hover[row] = (
            f"last {drift_text(float(found[-1]))}, most {drift_text(float(found.max()))}" if found.size else "?"
        )
    legend = [("d0", ""), *((f"d{i + 1}", threshold_text(value)) for i, value in enumerate(scale.thresholds))]
    return Grid(_title(slot), classes, DRIFT_CLASSES, hover, legend if values.size else ())


def _saved_grid(history: History, layers: Sequence[str], slot: str) -> Grid:
    bins, rows = history.bins, _rows(history, layers, slot)
    per_column = np.array([one.decisions for one in bins.columns])
    classes: _Cells = np.full((len(layers), len(bins.columns)), -1, np.int64)
    hover = ["none"] * len(layers)
    for row, place in rows.items():
        count, lossy = bins.saved[place], bins.rounded[place]
        share = np.minimum(2, np.ceil(3 * count / np.maximum(1, per_column)).astype(np.int64) - 1)
        classes[row] = np.where(count > 0, np.maximum(0, share) + 3 * (2 * lossy > count), -1)
        hover[row] = f"in {int(count.sum())} of {plural(history.totals.saves, 'save')}"
    return Grid(_title(slot), classes, SAVED_CLASSES, hover)
