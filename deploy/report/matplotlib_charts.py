"""Draw a history with matplotlib: heat maps of drift and saves, and bar charts of the cost, as SVG elements of a page.

Labels are text elements. The same history always gives the same bytes; the user's matplotlibrc has no effect. Colours
are for a light page; a dark page inverts them."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap, Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.transforms import blended_transform_factory

from deploy.format import drift_text, plural, printable, size_text, span_text, tail
from deploy.report.history import History
from store.names import WEIGHTS, Unit

_WIDTH, _PIXEL = 1128 / 72, 1 / 72  # inches
_INK, _DIM, _LINE, _EMPTY, _NONFINITE = "#151a21", "#59636f", "#dde1e6", "#e8ebef", "#000000"
_LOSSLESS, _ROUNDED, _FULL = ("#c5d9f2", "#79a9e0", "#2a68b8"), ("#ecd0e6", "#cf86c0", "#a33a90"), "#d5dae1"
_DRIFT = ListedColormap(mpl.colormaps["YlOrRd"](np.linspace(0, 0.85, 256))).with_extremes(bad=_EMPTY, over=_NONFINITE)
_SAVED = ListedColormap([*_LOSSLESS, *_ROUNDED]).with_extremes(bad=_EMPTY)
_THIRDS = (", at a third", ", at two thirds", ", at all of the decisions")
_HUGE = 1e30  # above every drift; it stands for NaN and Inf
_ACROSS = 3  # panels side by side
_LOOK = {
    **{"axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.axisbelow": True},
    **{"axes.autolimit_mode": "round_numbers", "axes.labelcolor": _DIM, "axes.labelsize": 10, "font.size": 11},
    **{"text.color": _INK, "text.parse_math": False, "xtick.color": _DIM, "ytick.color": _DIM, "grid.color": _LINE},
    **{"xtick.major.size": 0, "ytick.major.size": 0, "legend.frameon": False, "figure.constrained_layout.w_pad": 0.1},
    **{"font.sans-serif": ["DejaVu Sans"], "font.monospace": ["DejaVu Sans Mono"], "axes.edgecolor": "none"},
    **{"axes.facecolor": "none", "figure.facecolor": "none", "svg.fonttype": "none", "svg.hashsalt": "driftpoint"},
}
_Panel = tuple[npt.NDArray[np.float64], Sequence[str], Colormap, Normalize]
"""Heat map of a slot: values of (layers, columns), NaN for none; a text for each layer; and the colours."""
_PanelMaker = Callable[[History, Sequence[int]], _Panel]


def scale_for(values: Iterable[float]) -> BoundaryNorm:
    """Return a colour scale with round boundaries around the finite positive values, less the lowest twentieth."""
    found = sorted(value for value in values if 0 < value < _HUGE)
    steps = np.outer(10.0 ** np.arange(-30, 31), (1, 2, 5)).ravel()
    ends = (found[len(found) // 20], found[-1]) if found else (0.01, 0.05)
    low, high = np.searchsorted(steps, ends, side="right").tolist()
    return BoundaryNorm(steps[max(0, low - 1) : high + 1], _DRIFT.N, extend="min")


def css_colours(values: Iterable[float]) -> Callable[[float], str]:
    """Return a function from a drift to its colour on the scale for ``values``."""
    scale = scale_for(values)
    return lambda drift: to_hex(_DRIFT(scale(min(drift, scale.boundaries[-2]))))


@style.context(["default", _LOOK])
def maps_of(history: History) -> Mapping[str, Any]:
    """Draw the heat maps of the units that training changes."""
    bins = history.bins
    slots = sorted(dict.fromkeys(unit.slot for unit in history.units if unit in history.moving), key=WEIGHTS.__ne__)
    sick = {_NONFINITE: "NaN or Inf"} if bins.sick.any() else {}
    kinds = [("losslessly", _LOSSLESS), *([("rounded", _ROUNDED)] if bins.rounded.any() else [])]
    shares = [*enumerate(_THIRDS)] if bins.width > 1 else [(2, "")]
    shades = {colours[place]: f"saved {kind}{share}" for kind, colours in kinds for place, share in shares}
    drift = (_drift_panel, "Drift of each layer over time", {_EMPTY: "unknown: no decision measured it", **sick})
    saved = (_saved_panel, "Which layers were saved when", {**shades, _EMPTY: "not saved: an older version is used"})
    groups = [slots[start : start + _ACROSS] for start in range(0, len(slots), _ACROSS)]
    return {
        "drift": [_strip(history, some, *drift) for some in groups],
        "saved": [_strip(history, some, *saved) for some in groups],
        "known": bool(np.isfinite(bins.drift).any()),
    }


def _drift_panel(history: History, rows: Sequence[int]) -> _Panel:
    """Build the panel of drifts, with a scale of its own: weights and moments differ by powers of ten."""
    drift = np.pad(history.bins.drift, ((0, 1), (0, 0)), constant_values=np.nan)[rows]
    found = [row[np.isfinite(row)].tolist() for row in drift]
    tips = [f"last {drift_text(one[-1])}, most {drift_text(max(one))}" if one else "?" for one in found]
    scale = scale_for(value for one in found for value in one)
    values = np.where(np.isfinite(drift), np.minimum(drift, scale.boundaries[-2]), np.nan)
    values[np.pad(history.bins.sick, ((0, 1), (0, 0)))[rows] > 0] = _HUGE
    return values, tips, _DRIFT, scale


def _saved_panel(history: History, rows: Sequence[int]) -> _Panel:
    """Build the panel of saves. Its values are indices of ``_SAVED``."""
    count, lossy = (np.pad(one, ((0, 1), (0, 0)))[rows] for one in (history.bins.saved, history.bins.rounded))
    share = np.ceil(3 * count / [one.decisions for one in history.bins.columns]).clip(1, 3) - 1
    values = np.where(count > 0, share + 3 * (2 * lossy > count), np.nan)
    tips = [f"in {total} of {plural(history.totals.saves, 'save')}" for total in count.sum(axis=1)]
    return values, tips, _SAVED, Normalize(0, _SAVED.N - 1)


def _strip(history: History, slots: Sequence[str], panel: _PanelMaker, title: str, legend: Mapping[str, str]) -> str:
    """Draw a panel for each of ``slots``, with a row for each layer. A browser shows the texts of a row over it."""
    layers = list(dict.fromkeys(unit.layer for unit in history.units if unit in history.moving))
    places = {unit: place for place, unit in enumerate(history.units)}  # a slot that a layer lacks has place -1
    count, cell = len(layers), min(22, max(1, 900 // len(layers)))
    names, tips = [printable(layer) for layer in layers], [[printable(layer)] for layer in layers]
    figure = Figure((_WIDTH, (count * cell + 130) * _PIXEL), layout="constrained")
    charts = figure.subplots(1, len(slots), sharey=True, squeeze=False)[0]
    for axes, slot in zip(charts, slots, strict=True):
        values, texts, colours, norm = panel(history, [places.get(Unit(layer, slot), -1) for layer in layers])
        image = axes.imshow(values, colours, norm, aspect="auto", interpolation="none")
        image.set_extent((0, values.shape[1], count, 0))
        name = f"{slot} (weights)" if slot == WEIGHTS else tail(printable(slot), 40)
        axes.set(title=name, ylim=(count, 0))
        _time_axis(axes, history)
        for tip, text in zip(tips, texts, strict=True):
            tip.append(f"{name}: {text}")
        if isinstance(norm, BoundaryNorm):
            ticks = norm.boundaries[:: math.ceil(len(norm.boundaries) / 6)]
            figure.colorbar(image, location="bottom", aspect=40, pad=0.01, ticks=ticks, format="%g").set_label("drift")
    rows = _labelled(history, layers, math.ceil(11 / cell))
    shown = [tail(names[row], 22) for row in rows]
    charts[0].set_yticks([row + 0.5 for row in rows], shown, family="monospace", size=9, color=_INK)
    patches = [Patch(color=colour, label=text) for colour, text in legend.items()]
    figure.legend(handles=patches, loc="outside upper left", ncols=4)
    over = blended_transform_factory(figure.transFigure, charts[0].transData)
    for row in range(count):
        figure.add_artist(Rectangle((0, row), 1, 1, fill=False, lw=0, transform=over, gid=f"row{row}", zorder=9))
    return _svg(figure, title, {f"row{row}": " · ".join(tip) for row, tip in enumerate(tips)})


def _labelled(history: History, layers: Sequence[str], apart: int) -> list[int]:
    """Choose rows to label, ``apart`` from each other: first, last, those outside of the blocks, then all that fit."""
    ends, taken = (0, len(layers) - 1), list[int]()
    for row in sorted(range(len(layers)), key=lambda row: (row not in ends, layers[row] in history.blocks)):
        if all(abs(row - other) >= apart for other in taken):
            taken.append(row)
    return sorted(taken)


def _time_axis(axes: Axes, history: History) -> None:
    columns = history.bins.columns
    steps = [*(one.first_step for one in columns), columns[-1].last_step]
    places = np.unique(np.linspace(0, len(columns), 5).astype(int))
    axes.set_xticks(places, [str(steps[place]) for place in places])
    axes.set(xlim=(0, len(columns)), xlabel="optimizer step")
    axes.get_xticklabels()[0].set_horizontalalignment("left")
    axes.get_xticklabels()[-1].set_horizontalalignment("right")
    restarts = sorted({round(number / history.bins.width, 1) for number in history.restarts})
    across = axes.get_xaxis_transform()
    axes.vlines(restarts, 0, 1, colors=_INK, linewidths=1, linestyles=(0, (3, 3)), transform=across)


@style.context(["default", _LOOK])
def cost_chart(history: History) -> str:
    """Draw the bytes and the stalls of a run with at least one save."""
    written, full, longest = np.array([(one.written, one.full, one.longest) for one in history.bins.columns]).T
    unit = 1024.0 ** (np.log2(max(1.0, *written, *full)) // 10)  # ticks are round in it
    figure = Figure((_WIDTH, 330 * _PIXEL), layout="constrained")
    size, stall = figure.subplots(2, 1)
    for axes, values, colour, label in (
        (size, full / unit, _FULL, "by full saves at the same moments"),
        (size, written / unit, _LOSSLESS[-1], "by these saves"),
        (stall, longest, _LOSSLESS[-1], ""),
    ):
        shown = np.flatnonzero(values > 0)  # the edge keeps the smallest one visible
        axes.bar(shown + 0.5, values[shown], 0.9, color=colour, edgecolor=colour, linewidth=1, label=label)
    size.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
    verb = "that would have been written" if history.totals.observing else "written"
    for axes, title, text in (
        (size, f"Bytes {verb}", lambda value, _: size_text(round(value * unit))),
        (stall, "Longest stall of training at a decision", lambda value, _: span_text(value)),
    ):
        axes.set_title(title)
        axes.yaxis.set_major_formatter(text)
        axes.locator_params(axis="y", nbins=3)
        axes.grid(axis="y")
        axes.set_ylim(0)
        _time_axis(axes, history)
    title = f"Bytes {verb}, bytes of full saves, and the longest stall of training at a decision"
    return _svg(figure, title, {})


def _svg(figure: Figure, title: str, tips: Mapping[str, str]) -> str:
    """Return a figure as an element of an HTML page, named ``title``, with a tip for groups of these ids."""
    file = BytesIO()
    with warnings.catch_warnings(action="ignore"):  # of letters that the font lacks: the browser has another
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(file.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]  # HTML has no namespaces, and one scope for all ids
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.items()}
        group = element.attrib.pop("id", "") if element.tag == "g" else ""
        if group in tips:
            element.set("class", "hover")
            ElementTree.SubElement(element, "title").text = tips[group]
    root.attrib = {"viewBox": root.get("viewBox", ""), "role": "img", "aria-label": title}
    return ElementTree.tostring(root, encoding="unicode")
