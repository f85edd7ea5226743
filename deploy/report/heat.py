"""Heat maps as small SVG: layers down, decisions across, a panel for each slot, rows aligned.

All cells of one colour are one path, and neighbours of one colour one stroke of it, so that 126 layers over any number
of decisions stay within some hundred kilobytes. Colours are classes; what they look like is the page's. Geometry only:
it does not know what a value means. Everything that comes from names is handed on as text, for the page to escape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_GAP = 14.0
_NAMES = 132.0
_TOP, _BOTTOM = 20.0, 20.0
_LETTER = 6.1
"""Width of a letter of a layer's name, whose font has letters of one width."""

WIDTH = 1128.0


@dataclass(frozen=True)
class Label:
    """Text at a place; anchor as in SVG."""

    x: float
    y: float
    text: str
    anchor: str = "end"


@dataclass(frozen=True)
class Row:
    """The rows' hover text."""

    y: float
    text: str


@dataclass(frozen=True)
class Panel:
    """One slot. paths: colour class -> path data. marks: x of the lines that mark restarts."""

    title: str
    x: float
    width: float
    paths: Mapping[str, str]
    marks: Sequence[float]
    rows: Sequence[Row]
    ticks: Sequence[Label]


@dataclass(frozen=True)
class Map:
    """A strip of panels that share their rows. cell: height of a row."""

    width: float
    height: float
    top: float
    cell: float
    body: float
    panels: Sequence[Panel]
    labels: Sequence[Label]


@dataclass(frozen=True)
class Grid:
    """One panel's content. classes: (layers, columns), the index of the colour class of each cell, -1 for none. names:
    of the classes. hover: a text for each layer."""

    title: str
    classes: npt.NDArray[np.int64]
    names: Sequence[str]
    hover: Sequence[str]


def heat_map(
    grids: Sequence[Grid],
    layers: Sequence[str],
    strong: Sequence[bool],
    ticks: Sequence[tuple[float, str]],
    marks: Sequence[float],
) -> Map:
    """A strip of panels. layers: names of the rows; strong: those to label first. ticks: (column, text) below each
    panel; marks: columns before which a line is drawn."""
    rows = len(layers)
    cell = _cell(rows)
    body = rows * cell
    width = (WIDTH - _NAMES - _GAP * (len(grids) - 1)) / max(1, len(grids))
    panels = [
        _panel(grid, _NAMES + place * (width + _GAP), width, cell, ticks=ticks, marks=marks)
        for place, grid in enumerate(grids)
    ]
    return Map(WIDTH, _TOP + body + _BOTTOM, _TOP, cell, body, panels, _labels(layers, strong, cell))


def _cell(rows: int) -> float:
    """Height of a row: generous for a few, small for many, whole pixels so that edges are sharp."""
    return float(22 if rows <= 16 else 14 if rows <= 40 else 9 if rows <= 80 else 6)


def _panel(
    grid: Grid, x: float, width: float, cell: float, *, ticks: Sequence[tuple[float, str]], marks: Sequence[float]
) -> Panel:
    columns = max(1, grid.classes.shape[1])
    each = width / columns
    paths = {
        name: path for index, name in enumerate(grid.names) if (path := _path(grid.classes == index, x, each, cell))
    }
    hover = [Row(_TOP + cell * row, text) for row, text in enumerate(grid.hover)]
    below = _TOP + grid.classes.shape[0] * cell
    shown = [Label(x + column * each, below + 14, text, _anchor(column, columns)) for column, text in ticks]
    return Panel(grid.title, x, width, paths, [round(x + mark * each, 1) for mark in marks], hover, _apart(shown))


def _anchor(column: float, columns: int) -> str:
    return "start" if column < 0.15 * columns else "end" if column > 0.85 * columns else "middle"


def _apart(labels: Sequence[Label]) -> list[Label]:
    """Those that do not run into the one before."""
    kept: list[Label] = []
    edge = -1.0
    for label in labels:
        wide = _LETTER * len(label.text)
        left = label.x - (0 if label.anchor == "start" else wide if label.anchor == "end" else wide / 2)
        if left > edge + 8:
            kept.append(label)
            edge = left + wide
    return kept


def _path(cells: npt.NDArray[np.bool_], x: float, each: float, cell: float) -> str:
    """Strokes along the middle of rows, one for each run of cells."""
    parts: list[str] = []
    for row in np.flatnonzero(cells.any(axis=1)):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], cells[row].astype(np.int8), [0]))))
        y = _number(_TOP + (row + 0.5) * cell)
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            parts.append(f"M{_number(x + start * each)} {y}H{_number(x + stop * each)}")
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _labels(layers: Sequence[str], strong: Sequence[bool], cell: float) -> list[Label]:
    """Names that have room: the first and the last, those that stand out, then every so many."""
    room = 11.0
    every = max(1, next((n for n in (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 50) if n * cell >= 2 * room), 50))
    every = 1 if cell >= room else every
    order = [0, len(layers) - 1, *(i for i, one in enumerate(strong) if one), *range(0, len(layers), every)]
    taken: list[int] = []
    for index in dict.fromkeys(order):
        if 0 <= index < len(layers) and all(abs(index - other) * cell >= room for other in taken):
            taken.append(index)
    fits = int((_NAMES - 10) / _LETTER)
    return [Label(_NAMES - 8, _TOP + (i + 0.5) * cell + 3.5, _tail(layers[i], fits)) for i in sorted(taken)]


def _tail(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]
