"""Draws the results of the quality benchmark: damage against bytes, setting by setting, and what slots cost by age.

    python benchmarks/quality_plots.py [--results FILE.jsonl] [--out docs/benchmarks]

Needs matplotlib (``pip install driftpoint[demo]``). What is drawn is what ``quality.py --summary`` tells.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from benchmarks.quality import RESULTS  # noqa: E402
from benchmarks.quality_results import Record, Results, load, row_results  # noqa: E402
from benchmarks.quality_settings import MAKERS, setting_named  # noqa: E402
from benchmarks.quality_summary import baseline, by_case, weights_a_step, window  # noqa: E402

LINES = {
    "full": ("raw", "tab:gray"),
    "full, packed": ("packed", "tab:brown"),
    "full, compact": ("compact", "tab:olive"),
    "full, compact, packed": ("compact, packed", "black"),
}
MARKERS = {
    "parity 2": ("s", "tab:purple"),
    "parity 4": ("D", "tab:pink"),
    "filter": ("^", "tab:cyan"),
    "threshold": ("v", "tab:green"),
    "turns, compact": ("P", "gold"),
    "budget": ("o", "tab:blue"),
    "budget, compact": ("o", "tab:orange"),
    "budget, compact, packed": ("o", "tab:red"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=RESULTS.parent.parent)
    options = parser.parse_args()
    records = [one for one in load(options.results) if "setting" in one]
    drawn = [name for name in MAKERS if name != "falling" and Results(name, records).curves]
    if drawn:
        _curves(records, drawn, options.out / "quality-curves.png")
    if Results("pretraining", records).cases:
        _slots(Results("pretraining", records), options.out / "quality-slots.png")
    return 0


def _curves(records: list[Record], names: list[str], path: Path) -> None:
    down = (len(names) + 1) // 2
    figure, axes = plt.subplots(down, 2, figsize=(9.6, 3.9 * down + 1), squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.remove()
    for name, axis in zip(names, axes.flat, strict=False):
        _curve(Results(name, records), axis)
        axis.set_ylabel("cost of a failure, steps of training")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.8 / (3.9 * down + 1), 1, 1))
    figure.savefig(path, dpi=75)


def _curve(results: Results, axis: Any) -> None:
    rows = row_results(results, window(setting_named(results.setting).span))
    worth = results.worth.value
    rates = np.geomspace(0.03, 1.3, 40)
    for family, (name, colour) in LINES.items():
        costs = [baseline(results, rows, family, rate) / worth for rate in rates]
        if np.isfinite(costs).all():
            axis.plot(rates, costs, lw=1.2, color=colour, label=f"everything less often, {name}")
    for family, (marker, colour) in MARKERS.items():
        own = sorted(
            (row for row in rows if row.family == family and not row.mark.startswith(" lag")), key=lambda row: row.rate
        )
        if own:
            axis.errorbar(
                [row.rate for row in own],
                [row.cost.value / worth for row in own],
                [row.cost.around / worth for row in own],
                marker=marker,
                color=colour,
                ms=5,
                lw=0.7,
                ls=":",
                capsize=2,
                label=family,
            )
    axis.set_xscale("log")
    axis.set_yscale("symlog", linthresh=5)
    axis.set_ylim(-8, 200)
    axis.set_yticks([-5, 0, 5, 10, 50, 100], labels=["−5", "0", "5", "10", "50", "100"])
    axis.set_xlabel("bytes a parameter and step")
    axis.set_title(results.setting)
    axis.grid(alpha=0.3)


def _slots(results: Results, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(5.2, 4.0))
    step = weights_a_step(results)
    for letter, half, name in (
        ("w", False, "weights"),
        ("w", True, "weights of every other layer"),
        ("m", False, "first moments"),
        ("v", False, "second moments"),
        ("wmv", False, "all"),
    ):
        found = [
            (case["age"], gap)
            for case, gap in by_case(results, None).values()
            if case["name"] == letter and case["half"] == half and case["age"]
        ]
        ages, gaps = [age for age, _ in found], [gap.value / step for _, gap in found]
        axis.errorbar(ages, gaps, [gap.around / step for _, gap in found], marker="o", ms=4, capsize=2, label=name)
    axis.set_xlabel("steps old")
    axis.set_ylabel("cost, steps of stale weights")
    axis.axhline(0, color="black", lw=0.5)
    axis.legend(fontsize=8, frameon=False, ncol=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    sys.exit(main())
