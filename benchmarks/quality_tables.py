"""Prints the results of the quality benchmark as the tables of docs/benchmarks/quality.md, in Markdown.

    python benchmarks/quality_tables.py [--results FILE.jsonl]

Costs are told in steps of training: nats over what a step is worth in that setting.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from statistics import fmean, pstdev

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from benchmarks.quality import RESULTS  # noqa: E402
from benchmarks.quality_results import (  # noqa: E402
    Mean,
    Results,
    RowResult,
    correlation,
    load,
    row_results,
    slope_through_zero,
)
from benchmarks.quality_settings import MAKERS, setting_named  # noqa: E402
from benchmarks.quality_summary import (  # noqa: E402
    baseline,
    by_case,
    drift_points,
    lags,
    ruled,
    weights_a_step,
    window,
)

OTHERS = {
    "full": "full, raw",
    "full, packed": "packed",
    "full, compact": "compact",
    "full, compact, packed": "compact, packed",
}
"""Everything less often, at the bytes of a row."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    print(
        "# Results of the quality benchmark\n\nMade by `benchmarks/quality_tables.py`; [what they say](../quality.md)."
    )
    records = [one for one in load(parser.parse_args().results) if "setting" in one]
    found = [(name, Results(name, records)) for name in MAKERS]
    for title, tables in (
        ("Settings", lambda: _settings([one for _, one in found if one.trunks])),
        ("Slots", lambda: (line for _, one in found if one.cases for line in _slots(one))),
        ("Rows", lambda: (line for _, one in found if one.curves for line in _rows(one))),
        ("Certificate", lambda: _certificate([one for _, one in found if one.curves])),
        ("Rules", lambda: (line for _, one in found if ruled(one) for line in _rules(one))),
    ):
        print(f"\n## {title}\n")
        for line in tables():
            print(line)
    return 0


def _of(value: Mean, per: float = 1.0, digits: int = 1) -> str:
    around = f" ± {value.around / per:.{digits}f}" if value.count > 1 else ""
    return f"{value.value / per:.{digits}f}{around}".replace("-", "−")


def paces(results: Results, slot: str = "fp32") -> tuple[float, float]:
    """Deviation of the layers' drift over a few steps from its mean, as a share; the largest over the least."""
    spreads, apart = [], []
    for trunk in results.trunks.values():
        found = [drift[min(drift, key=int)] for unit, drift in trunk["drift"].items() if unit.endswith(f"/{slot}")]
        spreads.append(pstdev(found) / fmean(found))
        apart.append(max(found) / min(found))
    return fmean(spreads), fmean(apart)


def _table(*columns: str) -> Iterator[str]:
    yield _line(*columns)
    yield "|" + "---|" * len(columns)


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _settings(found: list[Results]) -> Iterator[str]:
    yield from _table(
        "setting",
        "seeds",
        "loss at the end, ± over seeds",
        "a step is worth, nats",
        "drift in 10 steps",
        "layers apart",
    )
    for one in found:
        ends = [one.last(trunk) for trunk in one.trunks.values()]
        drift = fmean(
            fmean(found[min(found, key=int)] for unit, found in trunk["drift"].items() if unit.endswith("/fp32"))
            for trunk in one.trunks.values()
        )
        spread, apart = paces(one)
        worth = f"{one.worth.value:.2g}" + (f" ± {one.worth.around:.1g}" if one.worth.count > 1 else "")
        end = f"{fmean(ends):.3f}" + (f" ± {one.spread:.3f}" if len(ends) > 1 else "")
        yield _line(one.setting, str(len(ends)), end, worth, f"{drift:.2g}", f"{spread:.2f}, {apart:.0f} ×")


def _slots(one: Results) -> Iterator[str]:
    step = weights_a_step(one)
    noise = one.nudged(None)
    told = "not measured" if isnan(noise) else f"{noise:.1g}"
    yield f"\n**{one.setting}**: a step that all weights are old costs {step:.2g} nats; noise {told}\n"
    yield from _table(
        "changed", "runs", "gap, 20 steps on, nats", "at the end, nats", "steps of stale weights", "drift"
    )
    later = by_case(one, 20)
    for name, (case, gap) in by_case(one, None).items():
        drifts = [
            record["drift"].get(letter, 0.0) ** 0.5
            for record in one.cases
            if record["case"] == case
            for letter in case["name"][:1]
        ]
        told = (_of(later[name][1], digits=4), _of(gap, digits=4), _of(gap, step), f"{fmean(drifts):.2g}")
        yield _line(name, str(gap.count), *told)
    for slot, lag in lags(one).items():
        yield f"\nlag of `{slot}`: {_of(lag)} steps ({lag.count} runs)"


def _rows(one: Results) -> Iterator[str]:
    worth = one.worth.value
    rows = row_results(one, window(setting_named(one.setting).span))
    yield f"\n**{one.setting}**\n"
    yield from _table(
        "row", "bytes", "lost", "gap at once, nats", "gap at the end", "healed", "drift", "**cost**", *OTHERS.values()
    )
    for row in sorted(rows, key=lambda row: (row.family, -row.rate)):
        if row.gap.count:
            yield _row(one, rows, row, worth)
    yield "\nBytes alone: " + "; ".join(f"{row.row} {row.rate:.3g}" for row in rows if not row.gap.count)


def _row(one: Results, rows: list[RowResult], row: RowResult, worth: float) -> str:
    return _line(
        row.row,
        f"{row.rate:.3g}",
        f"{row.lost:.1f}",
        _of(row.shock, digits=4),
        _of(row.gap, worth),
        f"{row.gap.count - row.stray} of {row.gap.count}" + (f": {row.healed:.0f}" if row.healed > 0 else ""),
        f"{row.drift:.2g}, {row.largest:.2g}",
        f"**{_of(row.cost, worth)}**",
        *(f"{baseline(one, rows, family, row.rate) / worth:.1f}" for family in OTHERS),
    )


KEYS = {"w": "squared drift", "damage": "as `budget` weighs it", "lag": "mean staleness"}


def _certificate(found: list[Results]) -> Iterator[str]:
    when = {0: "at once", None: "at the end"}
    yield from _table("setting", "states", *(f"{what}, {then}" for what in KEYS.values() for then in when.values()))
    for one in found:
        points = [drift_points(one, key, steps) for key in KEYS for steps in when]
        if len(points[0]) > 3:
            told = (f"{correlation(own):.2f}; {slope_through_zero(own)[0]:.2g}" for own in points)
            yield _line(one.setting, str(len(points[0])), *told)


def _rules(one: Results) -> Iterator[str]:
    worth = one.worth.value
    yield f"\n**{one.setting}**\n"
    yield from _table("composite", "resumed at", "steps back", "gap at the end of the course, nats", "at equal compute")
    for (name, rule), (gap, paid, back) in ruled(one).items():
        yield _line(name, rule, f"{back:.1f}", _of(gap, digits=4), _of(paid, worth) + " steps")


if __name__ == "__main__":
    sys.exit(main())
