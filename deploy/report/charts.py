"""Compute heat maps and bar charts as SVG geometry: drift and saves of every layer, and the cost of saving.

Colours are CSS classes of the page, and names are text for the page to escape. Cells of one colour form one path, so
that 126 layers over any number of decisions take a few hundred kilobytes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deploy.format import drift_text, plural, printable, share_text, size_text, span_text, tail
from deploy.report.history import History
from store.names import WEIGHTS

_GAP = 14.0
_NAMES = 132.0
_TOP, _BOTTOM, _BAR = 20.0, 20.0, 30.0
_LETTER = 6.1  # width of a letter of a layer's name, in a monospaced font
_ROOM = 11.0  # height of a name
WIDTH = 1128.0
_LEFT, _BAR_TOP, _BODY, _BAR_BOTTOM = 76.0, 10.0, 110.0, 20.0
_TICKS = 3
LEVELS = 9  # number of colours, least drift first; one more than thresholds
_FINE, _COARSE = (1, 2, 5), (1, 3)  # digits of round thresholds
_ACROSS = 3  # panels side by side
DRIFT_CLASSES = (*(f"d{level}" for level in range(LEVELS)), "nan")
SAVED_CLASSES = ("s1", "s2", "s3", "r1", "r2", "r3")


@dataclass(frozen=True)
class Label:
    """Text at a position, with its SVG anchor."""

    x: float
    y: float
    text: str
    anchor: str = "end"


@dataclass(frozen=True)
class Swatch:
    """Piece of a colour bar with its class."""

    x: float
    width: float
    name: str


@dataclass(frozen=True)
class Panel:
    """Heat map of one slot.

    ``bar`` and ``levels``: colour bar and its labels, empty if the page explains the colours."""

    title: str
    x: float
    width: float
    each: float  # width of a column
    paths: Mapping[str, str]  # path data by colour class, in columns and rows
    marks: Sequence[float]  # x of restarts
    ticks: Sequence[Label]
    bar: Sequence[Swatch]
    levels: Sequence[Label]


@dataclass(frozen=True)
class Map:
    """Strip of panels with common rows."""

    height: float
    cell: float  # height of a row; ``body``: of all rows
    body: float
    bar: float  # y of the colour bars
    panels: Sequence[Panel]
    labels: Sequence[Label]
    hover: Sequence[str]  # text for each row
    width: float = WIDTH
    left: float = _NAMES
    top: float = _TOP


@dataclass(frozen=True)
class Grid:
    """Content of a panel."""

    title: str
    classes: npt.NDArray[np.int64]  # (layers, columns), index into ``names`` of each cell's colour class, -1 for none
    names: Sequence[str]
    hover: Sequence[str]  # text for each layer
    legend: Sequence[tuple[str, str]] = ()  # (class, lower bound) of the colour bar


def heat_map(
    grids: Sequence[Grid],
    layers: Sequence[str],
    strong: Sequence[bool],
    ticks: Sequence[tuple[float, str]],
    marks: Sequence[float],
) -> Map:
    """Lay out a strip of panels, one for each of ``grids``, with a row for each of ``layers``.

    ``strong``: rows to label first. ``ticks``: (column, text) below each panel. ``marks``: columns before which a line
    is drawn."""
    cell = _cell(len(layers))
    body = len(layers) * cell
    width = (WIDTH - _NAMES - _GAP * (len(grids) - 1)) / max(1, len(grids))
    below = _TOP + body
    panels = [
        _panel(grid, _NAMES + place * (width + _GAP), width, below, ticks=ticks, marks=marks)
        for place, grid in enumerate(grids)
    ]
    hover = [
        " · ".join((layer, *(f"{grid.title}: {grid.hover[row]}" for grid in grids))) for row, layer in enumerate(layers)
    ]
    return Map(
        height=below + _BOTTOM + (_BAR if any(grid.legend for grid in grids) else 0.0),
        cell=cell,
        body=body,
        bar=below + _BOTTOM + 4,
        panels=panels,
        labels=_labels(layers, strong, cell),
        hover=hover,
    )


def _cell(rows: int) -> float:
    """Return the height of a row: whole pixels, so that edges are sharp."""
    if rows > 200:
        return float(max(1, 1200 // rows))
    return float(22 if rows <= 16 else 14 if rows <= 40 else 9 if rows <= 80 else 6)


def _panel(
    grid: Grid, x: float, width: float, below: float, *, ticks: Sequence[tuple[float, str]], marks: Sequence[float]
) -> Panel:
    columns = max(1, grid.classes.shape[1])
    each = width / columns
    shown = [Label(x + column * each, below + 14, text, _anchor(column, columns)) for column, text in ticks]
    piece = width / max(1, len(grid.legend))
    bar = [Swatch(round(x + i * piece, 1), round(piece, 1), name) for i, (name, _) in enumerate(grid.legend)]
    levels = [
        Label(x + i * piece, below + _BOTTOM + 24, text, "middle")
        for i, (_, text) in enumerate(grid.legend)
        if i and text
    ]
    return Panel(
        title=grid.title,
        x=round(x, 2),
        width=round(width, 2),
        each=round(each, 4),
        paths={name: path for i, name in enumerate(grid.names) if (path := _path(grid.classes == i))},
        marks=[round(x + mark * each, 1) for mark in marks],
        ticks=apart(shown),
        bar=bar,
        levels=apart(levels),
    )


def _anchor(column: float, columns: int) -> str:
    return "start" if column < 0.15 * columns else "end" if column > 0.85 * columns else "middle"


def apart(labels: Sequence[Label]) -> list[Label]:
    """Drop labels that overlap the one before."""
    kept: list[Label] = []
    edge = -1.0
    for label in labels:
        wide = _LETTER * len(label.text)
        left = label.x - (0 if label.anchor == "start" else wide if label.anchor == "end" else wide / 2)
        if left > edge + 8:
            kept.append(label)
            edge = left + wide
    return kept


def _path(cells: npt.NDArray[np.bool_]) -> str:
    """Return strokes along rows, one for each run of cells."""
    parts: list[str] = []
    for row in np.flatnonzero(cells.any(axis=1)):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], cells[row].astype(np.int8), [0]))))
        parts += [f"M{start} {row}h{stop - start}" for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    return "".join(parts)


def _labels(layers: Sequence[str], strong: Sequence[bool], cell: float) -> list[Label]:
    """Place names that fit: the first, the last, the strong ones, then others at equal distances."""
    every = next(
        (n for n in (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 50) if n * cell >= (_ROOM if n == 1 else 2 * _ROOM)), 100
    )
    begin = next((i for i, one in enumerate(strong) if not one), 0)
    order = [0, len(layers) - 1, *(i for i, one in enumerate(strong) if one), *range(begin, len(layers), every)]
    taken: list[int] = []
    for index in dict.fromkeys(order):
        if 0 <= index < len(layers) and all(abs(index - other) * cell >= _ROOM for other in taken):
            taken.append(index)
    fits = int((_NAMES - 10) / _LETTER)
    return [Label(_NAMES - 8, _TOP + (i + 0.5) * cell + 3.5, tail(layers[i], fits)) for i in sorted(taken)]


@dataclass(frozen=True)
class Bars:
    """Bar chart. ``path``: the bars; ``beside``: the bars compared with, '' for none; ``levels``: scale with labels."""

    path: str
    beside: str
    marks: Sequence[float]
    levels: Sequence[Label]
    ticks: Sequence[Label]
    width: float = WIDTH
    height: float = _BAR_TOP + _BODY + _BAR_BOTTOM
    left: float = _LEFT
    top: float = _BAR_TOP
    body: float = _BODY


def bars(
    values: Sequence[float],
    beside: Sequence[float],
    text: Callable[[float], str],
    ticks: Sequence[tuple[float, str]],
    marks: Sequence[float],
    *,
    unit: float = 1.0,
) -> Bars:
    """Lay out a bar chart with a column for each of ``values``; those of ``beside``, if any, are to compare with.

    ``text``: format of the scale, which is round in ``unit``. ``ticks``: (column, text) below the chart. ``marks``:
    columns of restarts."""
    count = max(1, len(values))
    each = (WIDTH - _LEFT) / count
    top = nice_top(max((*values, *beside), default=0.0) / unit) * unit
    levels = [
        Label(_LEFT - 8, _BAR_TOP + _BODY * (1 - i / (_TICKS - 1)) + 4, text(top * i / (_TICKS - 1)))
        for i in range(_TICKS)
    ]
    below = [
        Label(
            _LEFT + column * each,
            _BAR_TOP + _BODY + 16,
            label,
            "start" if column < 1 else "end" if column > count - 2 else "middle",
        )
        for column, label in ticks
    ]
    return Bars(
        path=_bar_path(values, each, _BODY / top),
        beside=_bar_path(beside, each, _BODY / top),
        marks=[round(_LEFT + mark * each, 1) for mark in marks],
        levels=levels,
        ticks=apart(below),
    )


def nice_top(value: float) -> float:
    """Round up to 1, 2, 3, 4, 6 or 8 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** len(str(int(value))) / 10 if value >= 1 else 1.0
    while power > value:
        power /= 10
    return next(step * power for step in (1, 2, 3, 4, 6, 8, 10, 20) if step * power >= value)


def _bar_path(values: Sequence[float], each: float, scale: float) -> str:
    gap = 1.0 if each > 4 else 0.0
    foot = _BAR_TOP + _BODY
    return "".join(
        f"M{_LEFT + i * each + gap / 2:.1f} {foot:.0f}v{-max(1.0, value * scale):.1f}h{each - gap:.1f}V{foot:.0f}z"
        for i, value in enumerate(values)
        if value > 0
    )


def scale_for(values: Iterable[float]) -> tuple[float, ...]:
    """Return rising thresholds that cover most of the finite positive values, the highest ones of too many.

    Level i holds the values from threshold i - 1 on, level 0 those below all."""
    found = sorted(value for value in values if value > 0 and math.isfinite(value))
    if not found:
        return 0.001, 0.01, 0.1
    low, high = found[len(found) // 20], found[-1]
    steps = _steps(low, high, _FINE)
    if len(steps) > LEVELS - 1:
        steps = _steps(low, high, _COARSE)
    return tuple(steps[-(LEVELS - 1) :])


def _steps(low: float, high: float, digits: tuple[int, ...]) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found = [float(f"{digit}e{power}") for power in range(first, last + 1) for digit in digits]
    above = [value for value in found if low < value <= high]
    return above or [min(found, key=lambda value: abs(value - high))]


def threshold_text(value: float) -> str:
    """Format a threshold for the legend."""
    return f"{value:g}" if value >= 0.001 else f"{value:.0e}".replace("e-0", "e-")


def maps_of(history: History) -> Mapping[str, Any]:
    """Build the heat maps of the units that training changes. A column holds ``merged`` decisions."""
    bins = history.bins
    moving = [unit for unit in history.units if unit in history.moving]
    layers = list(dict.fromkeys(unit.layer for unit in moving))
    slots = sorted(dict.fromkeys(unit.slot for unit in moving), key=lambda slot: slot != WEIGHTS)
    return {
        "drift": _strips(history, [_drift_grid(history, layers, slot) for slot in slots], layers),
        "saved": _strips(history, [_saved_grid(history, layers, slot) for slot in slots], layers),
        "merged": bins.width,
        "rounding": bool(bins.rounded.any()),
        "sick": bool(bins.sick.any()),
        "known": bool(np.isfinite(bins.drift).any()),
    }


def ticks_of(history: History) -> list[tuple[float, str]]:
    """Return the steps to write below a chart."""
    columns = history.bins.columns
    if not columns:
        return []
    places = sorted({round(share * (len(columns) - 1)) for share in (0, 0.25, 0.5, 0.75, 1)})
    found = [(float(place), f"{columns[place].first_step}") for place in places[:-1]]
    end = (float(len(columns)), f"{columns[-1].last_step}")
    return [*found, end] if len(columns) > 1 else [(0.0, f"{columns[0].first_step}")]


def marks_of(history: History) -> list[float]:
    """Return the columns of restarts."""
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
    """Map rows of a panel to rows of the bins."""
    table = {unit.layer: place for place, unit in enumerate(history.units) if unit.slot == slot}
    return {row: table[layer] for row, layer in enumerate(layers) if layer in table}


def _drift_grid(history: History, layers: Sequence[str], slot: str) -> Grid:
    """Build the drift grid, with a scale per slot: weights and moments differ by powers of ten."""
    bins, rows = history.bins, _rows(history, layers, slot)
    values = bins.drift[list(rows.values())]
    scale = scale_for(values[np.isfinite(values)].tolist())
    classes = np.full((len(layers), len(bins.columns)), -1, np.int64)
    hover = ["none"] * len(layers)
    for row, place in rows.items():
        known = np.isfinite(bins.drift[place])
        found = bins.drift[place][known]
        classes[row, known] = np.searchsorted(scale, found, side="right")
        classes[row, bins.sick[place] > 0] = LEVELS
        hover[row] = (
            f"last {drift_text(float(found[-1]))}, most {drift_text(float(found.max()))}" if found.size else "?"
        )
    legend = [("d0", ""), *((f"d{i + 1}", threshold_text(value)) for i, value in enumerate(scale))]
    return Grid(_title(slot), classes, DRIFT_CLASSES, hover, legend if values.size else ())


def _saved_grid(history: History, layers: Sequence[str], slot: str) -> Grid:
    bins, rows = history.bins, _rows(history, layers, slot)
    per_column = np.array([one.decisions for one in bins.columns])
    classes: npt.NDArray[np.int64] = np.full((len(layers), len(bins.columns)), -1, np.int64)
    hover = ["none"] * len(layers)
    for row, place in rows.items():
        count, lossy = bins.saved[place], bins.rounded[place]
        share = np.minimum(2, np.ceil(3 * count / np.maximum(1, per_column)).astype(np.int64) - 1)
        classes[row] = np.where(count > 0, np.maximum(0, share) + 3 * (2 * lossy > count), -1)
        hover[row] = f"in {int(count.sum())} of {plural(history.totals.saves, 'save')}"
    return Grid(_title(slot), classes, SAVED_CLASSES, hover)


def cost_of(history: History) -> Mapping[str, Any]:
    """Build the cost charts of a run with at least one save. A column holds ``merged`` decisions."""
    columns, ticks, marks = history.bins.columns, ticks_of(history), marks_of(history)
    largest = max(max(one.written, one.full) for one in columns)
    unit = float(1 << (10 * max(0, (int(largest).bit_length() - 1) // 10)))
    written, full = [float(one.written) for one in columns], [float(one.full) for one in columns]
    stalls = [one.longest for one in columns]
    return {
        "figures": _figures(history),
        "written": bars(written, full, lambda value: size_text(round(value)), ticks, marks, unit=unit),
        "stalled": bars(stalls, [], lambda value: span_text(value) if value else "0", ticks, marks),
        "merged": history.bins.width,
        "observing": history.totals.observing,
    }


def _figures(history: History) -> list[tuple[str, str, str]]:
    """Return the name, value and note of each figure."""
    totals = history.totals
    share = totals.written / totals.full if totals.full else 0.0
    stall = totals.stall / totals.seconds if totals.seconds else 0.0
    stalled = f"{share_text(stall)} of {span_text(totals.seconds)}"
    beside = ""
    if totals.full_stall is not None:
        count = plural(totals.full_seen, "full save")
        beside = f"{span_text(totals.full_stall)} if all saves were full, estimated from {count}"
    verb = "would have been written" if totals.observing else "written"
    failed = f", {totals.failed} failed" if totals.failed else ""
    return [
        ("Saves", f"{totals.saves:,}", f"of {totals.decisions:,} decisions{failed}"),
        ("Bytes", size_text(totals.written), f"{verb}; full saves: {size_text(totals.full)}"),
        ("Of full saves", share_text(share), f"{size_text(max(0, totals.full - totals.written))} avoided"),
        ("Training stall", span_text(totals.stall), f"{stalled}; {beside}".rstrip("; ")),
        ("Longest stall", span_text(totals.longest), "at one decision"),
    ]
