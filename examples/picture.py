"""The picture of a run: how far each layer drifts, when it is saved, and what the failure does to it all.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; saves have a shape of their own as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.story import Life, Story

BLUE, ORANGE, GREEN, RED, PINK, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#8A8A8A"
LIFE = (BLUE, GREEN, PINK)
"""One colour for each life."""

WEIGHTS = "fp32"
_SLOTS = (
    ("fp32", "weights", "#404040"),
    ("exp_avg", "first moment", "#56B4E9"),
    ("exp_avg_sq", "second moment", ORANGE),
)
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#606060",
    "axes.linewidth": 0.8,
    "xtick.color": "#404040",
    "ytick.color": "#404040",
}


def draw(story: Story, control: Story | None, path: Path, threshold: float | None = None) -> Path:
    """Draw ``story`` into a PNG file at ``path``, which is returned; see :func:`drawn`."""
    with mpl.rc_context(_STYLE):
        drawn(story, control, threshold).savefig(path)
    return path


def drawn(story: Story, control: Story | None, threshold: float | None = None) -> Figure:
    """The figure: loss, drift of each layer's weights, bytes of each save. ``threshold``: of the weights, is shown."""
    layers = story.lives[0].start["layers"]
    heights = [2.4, *[0.85] * len(layers), 1.5]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(10, 1.2 + sum(heights) * 0.8), dpi=200)
        axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        _draw_loss(axes[0], story, control)
        for axis, layer in zip(axes[1:-1], layers, strict=True):
            _draw_layer(axis, story, layer, threshold)
        _draw_bytes(axes[-1], story)
        for axis in axes:
            _mark_failure(axis, story, top=1.0 if axis is axes[0] else 1.4)  # on into the gap above
        _same_scale(axes[1:-1], story, threshold)
        _finish(figure, axes, story, threshold)
    return figure


def teeth(decisions: Sequence[Mapping[str, Any]], first: int, layer: str, saved: set[int]) -> list[tuple[int, float]]:
    """A layer's drift of its weights as points (step, drift): it rises, and drops to 0 where it was saved.

    ``first``: the step that this life was resumed at; there the live state is the stored one. 0: nothing was.
    """
    points: list[tuple[int, float]] = [(first, 0.0)] if first else []
    for decision in decisions:
        drift = next(
            (unit["drift"] for unit in decision["units"] if (unit["layer"], unit["slot"]) == (layer, WEIGHTS)), None
        )
        if drift is not None:
            points.append((decision["step"], drift))
        if decision["step"] in saved:
            points.append((decision["step"], 0.0))
    return points


def _draw_loss(axis: Axes, story: Story, control: Story | None) -> None:
    if control is not None:
        axis.plot(*_smooth(control.losses), color=GREY, lw=4, alpha=0.45, label="left alone", solid_capstyle="round")
    for index, life in enumerate(story.lives):
        before = {} if index == 0 else {s: x for s, x in story.lives[index - 1].losses.items() if s <= life.first}
        label = "until the kill" if index == 0 else "resumed"
        axis.plot(list(life.losses), list(life.losses.values()), color=LIFE[index % 3], lw=0.5, alpha=0.5)
        steps, losses = _smooth(before | life.losses)
        own = [(s, x) for s, x in zip(steps, losses, strict=True) if s >= life.first]
        axis.plot(*zip(*own, strict=True), color=LIFE[index % 3], lw=1.6, label=label)
    values = list(story.losses.values())
    axis.set_ylim(min(values) - 0.1, sorted(values)[-max(3, len(values) // 25)] + 0.2)
    axis.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.32, 1.0), borderaxespad=0.0)
    _label(axis, "loss", "mean of 8 steps;\nthin: each step")


def _draw_layer(axis: Axes, story: Story, layer: str, threshold: float | None) -> None:
    for index, life in enumerate(story.lives):
        saved = story.saved_at(index, layer, WEIGHTS)
        points = teeth(life.decisions, life.first, layer, saved)
        if not points:
            continue
        steps, drifts = zip(*points, strict=True)
        colour = LIFE[index % 3]
        axis.fill_between(steps, drifts, color=colour, alpha=0.18, lw=0)
        axis.plot(steps, drifts, color=colour, lw=1.1)
        axis.plot(sorted(saved), [0.0] * len(saved), "^", color=colour, ms=4, clip_on=False, zorder=5)
    if threshold is not None:
        axis.axhline(threshold, color="#606060", lw=0.7, ls=(0, (4, 3)))
    _label(axis, layer.removeprefix("model."), _times(story.times_saved(layer, WEIGHTS)))


def _draw_bytes(axis: Axes, story: Story) -> None:
    sizes = story.sizes
    for commit in story.commits:
        bottom = 0.0
        for slot, _, colour in _SLOTS:
            height = sum(sizes.get((u.layer, u.slot), 0) for u in commit.units if u.slot == slot) / 1e6
            axis.bar(commit.step, height, width=_bar_width(story), bottom=bottom, color=colour)
            bottom += height
    full = max((commit.nbytes + commit.avoided for commit in story.commits), default=0) / 1e6
    axis.axhline(full, color="#606060", lw=0.7, ls=(0, (4, 3)))
    handles = [mpl.patches.Patch(color=colour, label=name) for _, name, colour in _SLOTS]
    legend = axis.legend(handles=handles, ncols=3, loc="upper right", bbox_to_anchor=(1.0, 0.97), columnspacing=1.2)
    legend.get_frame().set(edgecolor="none", facecolor="white", alpha=1.0)
    axis.set_ylim(0, full * 1.08)
    _label(axis, "MB a save", "dashed: a full save")


def _mark_failure(axis: Axes, story: Story, top: float) -> None:
    for step, colour, style in _failures(story):
        axis.axvline(step, ymax=top, color=colour, lw=1.2, ls=style, zorder=0, clip_on=False)


def _failures(story: Story) -> Iterator[tuple[float, str, Any]]:
    for life, after in pairwise(story.lives):
        yield life.last, RED, "-"
        yield after.first, GREEN, (0, (1, 1.2))


def _same_scale(axes: Sequence[Axes], story: Story, threshold: float | None) -> None:
    """One scale for all layers, so that they compare; what few teeth leave it get their height in figures."""
    layers = story.lives[0].start["layers"]
    drifts = {layer: _peaks(story, layer) for layer in layers}
    every = sorted(drift for peaks in drifts.values() for _, drift in peaks) or [1.0]
    top = max(every[int(0.97 * (len(every) - 1))], 1.6 * (threshold or 0.0)) * 1.1
    for axis, layer in zip(axes, layers, strict=True):
        axis.set_ylim(0, top)
        axis.spines["bottom"].set_visible(False)
        axis.tick_params(axis="x", length=0)
        axis.set_yticks(
            [0.0] if threshold is None else [0.0, threshold], ["0"] if threshold is None else ["0", f"{threshold:g}"]
        )
        cut = [(step, drift) for step, drift in drifts[layer] if drift > top]
        if cut:
            highest = max(drift for _, drift in cut)
            axis.text(cut[-1][0] + 1.5, top * 1.06, f"cut: up to {highest:.2f}", size=8, va="center", color="#606060")


def _peaks(story: Story, layer: str) -> list[tuple[int, float]]:
    return [
        point
        for index, life in enumerate(story.lives)
        for point in teeth(life.decisions, life.first, layer, story.saved_at(index, layer, WEIGHTS))
        if point[1] > 0
    ]


def _finish(figure: Figure, axes: Sequence[Axes], story: Story, threshold: float | None) -> None:
    inch = 1 / figure.get_figheight()
    title = "Each layer is saved when it has drifted far enough"
    dashed = "" if threshold is None else f", dashed: threshold {threshold:g}"
    below = (
        "Drift of the weights: relative distance between the live layer and what a resume would give back "
        f"(triangle: saved{dashed})."
    )
    figure.text(0.02, 1 - 0.1 * inch, title, va="top", size=14, weight="bold")
    figure.text(0.02, 1 - 0.38 * inch, below, va="top", color="#404040")
    for life, after in pairwise(story.lives):
        _say(axes[0], life, after)
    axes[-1].set_xlabel("optimizer step")
    axes[-1].set_xlim(0, max(story.losses) + 1)
    figure.subplots_adjust(left=0.18, right=0.985, top=1 - 0.85 * inch, bottom=0.5 * inch, hspace=0.35)


def _say(axis: Axes, life: Life, after: Life) -> None:
    both = axis.get_xaxis_transform()
    axis.text(life.last + 0.8, 1.03, f"rank killed after step {life.last}", color=RED, transform=both, ha="left")
    axis.text(after.first - 0.8, 1.03, f"resumed from step {after.first}", color=GREEN, transform=both, ha="right")


def _label(axis: Axes, name: str, below: str) -> None:
    place: dict[str, Any] = {
        "xy": (-0.195, 0.5),
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "ha": "left",
    }
    axis.annotate(name, **place, xytext=(0, 1), va="bottom", weight="bold")
    axis.annotate(below, **place, xytext=(0, -2), va="top", color="#606060", size=8)


def _times(count: int) -> str:
    return "never saved" if count == 0 else "saved once" if count == 1 else f"saved {count} times"


def _smooth(losses: dict[int, float], width: int = 8) -> tuple[list[int], list[float]]:
    steps = sorted(losses)
    means = [fmean(losses[s] for s in steps[max(0, i - width + 1) : i + 1]) for i in range(len(steps))]
    return steps, means


def _bar_width(story: Story) -> float:
    steps = sorted({decision["step"] for life in story.lives for decision in life.decisions})
    return 0.7 * min((b - a for a, b in pairwise(steps)), default=1)
