"""The two heat maps of a run: how far each layer had drifted, and what was saved of it when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deploy.cli.text import drift_text, plural, printable
from deploy.report.heat import Grid, Map, heat_map
from deploy.report.history import History
from deploy.report.scale import LEVELS, Scale, scale_for, threshold_text
from store.names import WEIGHTS, Unit

_ACROSS = 3
"""Panels side by side."""

DRIFT_CLASSES = (*(f"d{level}" for level in range(LEVELS)), "nan")
SAVED_CLASSES = ("s1", "s2", "s3", "r1", "r2", "r3")

_Cells = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Maps:
    """Strips of panels. scale: legend of the drift, (class, text). merged: decisions in a column. rounding: whether
    anything was stored rounded; sick: whether anything was not finite."""

    drift: Sequence[Map]
    saved: Sequence[Map]
    scale: Sequence[tuple[str, str]]
    merged: int
    rounding: bool
    sick: bool
    known: bool


def maps_of(history: History) -> Maps:
    """Of the units that move; what does not is saved once and drifts nowhere."""
    bins = history.bins
    moving = [place for place, unit in enumerate(history.units) if unit in history.moving]
    values = bins.drift[moving]
    scale = scale_for(values[np.isfinite(values)].ravel().tolist())
    layers = list(dict.fromkeys(history.units[place].layer for place in moving))
    slots = sorted(dict.fromkeys(history.units[place].slot for place in moving), key=lambda slot: slot != WEIGHTS)
    table = {unit: place for place, unit in enumerate(history.units)}
    drift = [_drift_grid(history, table, layers, slot, scale) for slot in slots]
    saved = [_saved_grid(history, table, layers, slot) for slot in slots]
    return Maps(
        drift=_strips(history, drift, layers),
        saved=_strips(history, saved, layers),
        scale=_legend(scale),
        merged=bins.width,
        rounding=bool(bins.rounded.any()),
        sick=bool(bins.sick.any()),
        known=bool(np.isfinite(values).any()),
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


def _drift_grid(history: History, table: dict[Unit, int], layers: Sequence[str], slot: str, scale: Scale) -> Grid:
    bins = history.bins
    classes = np.full((len(layers), len(bins.columns)), -1, np.int64)
    hover = []
    for row, layer in enumerate(layers):
        place = table.get(Unit(layer, slot))
        if place is None:
            hover.append(f"{printable(layer)}: has no {printable(slot)}")
            continue
        values = bins.drift[place]
        known = np.isfinite(values)
        classes[row, known] = np.searchsorted(scale.thresholds, values[known], side="right")
        classes[row, bins.sick[place] > 0] = LEVELS
        hover.append(_drift_hover(layer, values[known]))
    return Grid(printable(slot), classes, DRIFT_CLASSES, hover)


def _drift_hover(layer: str, known: npt.NDArray[np.float64]) -> str:
    if not known.size:
        return f"{printable(layer)}: drift not known"
    return f"{printable(layer)}: drift last {drift_text(float(known[-1]))}, highest {drift_text(float(known.max()))}"


def _saved_grid(history: History, table: dict[Unit, int], layers: Sequence[str], slot: str) -> Grid:
    bins = history.bins
    per_column = np.array([one.decisions for one in bins.columns])
    classes: _Cells = np.full((len(layers), len(bins.columns)), -1, np.int64)
    hover = []
    for row, layer in enumerate(layers):
        place = table.get(Unit(layer, slot))
        if place is None:
            hover.append(f"{printable(layer)}: has no {printable(slot)}")
            continue
        count, lossy = bins.saved[place], bins.rounded[place]
        share = np.minimum(2, np.ceil(3 * count / np.maximum(1, per_column)).astype(np.int64) - 1)
        rounded = 2 * lossy > count
        classes[row] = np.where(count > 0, np.maximum(0, share) + 3 * rounded, -1)
        hover.append(f"{printable(layer)}: in {plural(int(count.sum()), 'save')} of {history.totals.saves}")
    return Grid(printable(slot), classes, SAVED_CLASSES, hover)


def _legend(scale: Scale) -> list[tuple[str, str]]:
    found = [("d0", f"below {threshold_text(scale.thresholds[0])}")]
    found += [(f"d{i + 1}", f"{threshold_text(value)}") for i, value in enumerate(scale.thresholds)]
    return found
