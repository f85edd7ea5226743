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

from deploy.cli.text import tail

_GAP = 14.0
_NAMES = 132.0
_TOP, _BOTTOM, _BAR = 20.0, 20.0, 30.0
_LETTER = 6.1
"""Width of a letter of a layer's name, whose font has letters of one width."""

_ROOM = 11.0
"""Height that a name takes."""

WIDTH = 1128.0


@dataclass(frozen=True)
class Label:
    """Text at a place; anchor as in SVG."""

    x: float
    y: float
    text: str
    anchor: str = "end"


@dataclass(frozen=True)
class Swatch:
    """A piece of a colour bar, of a class."""

    x: float
    width: float
    name: str


@dataclass(frozen=True)
class Panel:
    """One slot. paths: colour class -> path data, in columns and rows; each: width of a column. marks: x of the lines
    that mark restarts. bar, levels: what colours mean, below the steps; none where the page says it."""

    title: str
    x: float
    width: float
    each: float
    paths: Mapping[str, str]
    marks: Sequence[float]
    ticks: Sequence[Label]
    bar: Sequence[Swatch]
    levels: Sequence[Label]


@dataclass(frozen=True)
class Map:
    """A strip of panels that share their rows. cell: height of a row. body: of all. bar: y of the colour bars. hover: a
    text for each row."""

    width: float
    height: float
    left: float
    top: float
    cell: float
    body: float
    bar: float
    panels: Sequence[Panel]
    labels: Sequence[Label]
    hover: Sequence[str]


@dataclass(frozen=True)
class Grid:
    """One panel's content. classes: (layers, columns), the index of the colour class of each cell, -1 for none. names:
    of the classes. hover: a text for each layer. legend: (class, from where on) of a colour bar."""

    title: str
    classes: npt.NDArray[np.int64]
    names: Sequence[str]
    hover: Sequence[str]
    legend: Sequence[tuple[str, str]] = ()


def heat_map(
    grids: Sequence[Grid],
    layers: Sequence[str],
    strong: Sequence[bool],
    ticks: Sequence[tuple[float, str]],
    marks: Sequence[float],
) -> Map:
    """A strip of panels. layers: names of the rows; strong: those to label first. ticks: (column, text) below each
    panel; marks: columns before which a line is drawn."""
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
        width=WIDTH,
        height=below + _BOTTOM + (_BAR if any(grid.legend for grid in grids) else 0.0),
        left=_NAMES,
        top=_TOP,
        cell=cell,
        body=body,
        bar=below + _BOTTOM + 4,
        panels=panels,
        labels=_labels(layers, strong, cell),
        hover=hover,
    )


def _cell(rows: int) -> float:
    """Height of a row: generous for a few, small for many, whole pixels so that edges are sharp."""
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


def _path(cells: npt.NDArray[np.bool_]) -> str:
    """Strokes along rows, one for each run of cells, in columns and rows."""
    parts: list[str] = []
    for row in np.flatnonzero(cells.any(axis=1)):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], cells[row].astype(np.int8), [0]))))
        parts += [f"M{start} {row}h{stop - start}" for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    return "".join(parts)


def _labels(layers: Sequence[str], strong: Sequence[bool], cell: float) -> list[Label]:
    """Names that have room: the first and the last, those that stand out, then every so many of the others."""
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
