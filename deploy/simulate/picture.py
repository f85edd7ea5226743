"""Configurations as points: bytes an hour against what a failure is expected to cost. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deploy.simulate.summary import Summary
from store.errors import UsageError


def write_picture(summaries: Sequence[Summary], path: Path) -> None:
    """Write it to ``path``, whose suffix names the format. UsageError without matplotlib, or where it cannot be."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: `pip install matplotlib`, or leave --plot out") from error
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    damage, lost = figure.subplots(1, 2)
    for axes, title, values in (
        (damage, "expected damage", [one.exposure.total.mean for one in summaries]),
        (lost, "steps lost, mean", [one.rewound.mean for one in summaries]),
    ):
        for one, value in zip(summaries, values, strict=True):
            axes.scatter([one.bytes_per_hour / 1e9], [value], label=one.name)
        axes.set(xlabel="GB an hour", ylabel=title, xscale="log", yscale="log")
        axes.grid(visible=True, alpha=0.3)
    lost.legend(fontsize=7)
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write the picture {path}: {error}") from error
