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
from benchmarks.quality_results import Mean, Results, RowResult, correlation, load, row_results, slope_through_zero  # noqa: E402
from benchmarks.quality_settings import MAKERS, setting_named  # noqa: E402
from benchmarks.quality_summary import BASELINES, baseline, by_case, drift_points, lags, ruled, weights_a_step, window  # noqa: E402

OTHERS = {
    "full": "full, raw",
    "full, packed": "packed",
    "full, compact": "compact",
    "full, compact, packed": "compact, packed",
}
"""Everything less often, at the bytes of a row."""

DEEPSPEED = 1.4
"""Bytes a parameter and step of DeepSpeed's whole state, 14 bytes a parameter, every ten steps."""


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
        ("Equal bytes", lambda: _equal([one for _, one in found if one.curves])),
        ("Against DeepSpeed", lambda: _asked([one for _, one in found if len(one.trunks) > 1])),
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
        _healed(one, [row]) + (f": {row.healed:.0f}" if row.healed > 0 else ""),
        f"{row.drift:.2g}, {row.largest:.2g}",
        f"**{_of(row.cost, worth)}**",
        *(_less_often(one, rows, family, row.rate) for family in OTHERS),
    )


def _healed(one: Results, rows: list[RowResult]) -> str:
    """How many states; unknown where the noise is."""
    if isnan(one.nudged(None)):
        return "–"
    return f"{sum(row.states - row.stray for row in rows)} of {sum(row.states for row in rows)}"


def _less_often(one: Results, rows: list[RowResult], family: str, rate: float) -> str:
    """In steps; what was not measured in a setting has no cost there."""
    if family != "full" and not any(row.family == family for row in rows):
        return "–"
    return f"{baseline(one, rows, family, rate) / one.worth.value:.1f}".replace("-", "−")


def _equal(found: list[Results]) -> Iterator[str]:
    best = "full, compact, packed"
    yield "Cost of a policy less that of everything less often, steps; ahead and behind: by the whole interval.\n"
    yield from _table("setting", "row", "bytes", "the same encoding", "", "compact, packed", "")
    for one in found:
        rows = row_results(one, window(setting_named(one.setting).span))
        for row in sorted(rows, key=lambda row: (row.family, -row.rate)):
            if row.family in BASELINES and not row.mark:
                told = [
                    cell
                    for family in (BASELINES[row.family], best)
                    for cell in _apart(row.cost, baseline(one, rows, family, row.rate), one.worth.value)
                ]
                own = any(other.family == best for other in rows)
                yield _line(one.setting, row.row, f"{row.rate:.3g}", *(told if own else [*told[:2], "–", "–"]))


def _apart(cost: Mean, other: float, worth: float) -> tuple[str, str]:
    apart = Mean(cost.value - other, cost.around, cost.count)
    return _of(apart, worth), _judged(apart, "ahead", "level", "behind")


def _judged(apart: Mean, below: str, within: str, above: str) -> str:
    """Where an interval lies to 0; nothing where there is none."""
    if apart.count < 2:
        return "–"
    return below if apart.value + apart.around <= 0 else above if apart.value - apart.around > 0 else within


def _asked(found: list[Results]) -> Iterator[str]:
    yield (
        "Rows of at most a twelfth of 1.4 bytes a parameter and step, which DeepSpeed's 14 bytes every ten steps are.\n"
        "Noise: the deviation of the last loss between uninterrupted runs of different seeds. Exact: what exact saves\n"
        "every ten steps cost. *yes* and *no* by the whole interval; *mean*, *not the mean*: by that only.\n"
    )
    yield from _table(
        "setting", "row", "share", "cost, steps", "cost, nats", "noise, nats", "inside", "twice exact, steps", "within"
    )
    for one in found:
        rows = row_results(one, window(setting_named(one.setting).span))
        ten = baseline(one, rows, "full", 1.2)  # bytes of raw saves every ten steps
        twice = 2 * next((row.cost.value for row in rows if row.family == "full"), ten)
        compact = next(row.gap for row in rows if row.family == "full, compact")
        for share in (12, 25):
            other = baseline(one, rows, "full, compact, packed", DEEPSPEED / share)
            cost = Mean(other, compact.around, compact.count)
            yield _held(one, "*everything compact, packed, less often*", share, cost, twice)
        for row in sorted(rows, key=lambda row: (row.family, -row.rate)):
            if row.gap.count and row.rate <= DEEPSPEED / 12:
                yield _held(one, row.row, DEEPSPEED / row.rate, row.cost, twice)


def _held(one: Results, row: str, share: float, cost: Mean, twice: float) -> str:
    worth = one.worth.value
    judged = [
        _held_to(Mean(cost.value - limit, cost.around, cost.count), cost.value <= limit)
        for limit in (one.spread, twice)
    ]
    told = (f"1/{share:.0f}", _of(cost, worth), _of(cost, digits=4), f"{one.spread:.4f}", judged[0])
    return _line(one.setting, row, *told, f"{twice / worth:.1f}", judged[1])


def _held_to(apart: Mean, mean: bool) -> str:
    return _judged(apart, "yes", "mean" if mean else "not the mean", "no")


KEYS = {"w": "squared drift", "damage": "as `budget` weighs it", "lag": "mean staleness"}


def _certificate(found: list[Results]) -> Iterator[str]:
    when = {0: "at once", None: "at the end"}
    yield "R²; slope through 0, over all resumed states but lossless ones.\n"
    yield from _table("setting", "states", *(f"{what}, {then}" for what in KEYS.values() for then in when.values()))
    for one in found:
        points = [drift_points(one, key, steps) for key in KEYS for steps in when]
        if len(points[0]) > 3:
            told = (f"{correlation(own):.2f}; {slope_through_zero(own)[0]:.2g}".replace("-", "−") for own in points)
            yield _line(one.setting, str(len(points[0])), *told)
    yield "\nSeed by seed, R² of the gap at the end; over all, how many begin below the uninterrupted run and heal.\n"
    yield from _table(
        "setting", "seeds", "squared drift", "mean staleness", "begin below", "composites healed", "whole"
    )
    yield from map(_seeds, found)


def _seeds(one: Results) -> str:
    seeds = sorted(one.trunks)
    own = [Results(one.setting, [line for line in one.records if line["seed"] == seed]) for seed in seeds]
    squared, stale = (
        ", ".join(f"{correlation(drift_points(each, key, None)):.2f}" for each in own) for key in ("w", "lag")
    )
    at_once = [gap for _, gap in drift_points(one, "lag", 0)]
    below = f"{sum(gap < 0 for gap in at_once)} of {len(at_once)}"
    rows = row_results(one, window(setting_named(one.setting).span))
    told = (_healed(one, [row for row in rows if row.family.startswith("full") == whole]) for whole in (False, True))
    return _line(one.setting, ", ".join(map(str, seeds)), squared, stale, below, *told)


def _rules(one: Results) -> Iterator[str]:
    worth = one.worth.value
    yield f"\n**{one.setting}**\n"
    yield from _table(
        "composite", "resumed at", "steps back", "gap at the end of the course, steps", "at equal compute, steps"
    )
    for (name, rule), (gap, paid, back) in ruled(one).items():
        yield _line(name, rule, f"{back:.1f}", _of(gap, worth), _of(paid, worth))


if __name__ == "__main__":
    sys.exit(main())
