"""The figures of the quality benchmark, from its results: calibration, curves, rules of resuming.

Which goals there are: that policies ``budget`` and ``auto`` cost no more than saving everything less often, in as many
bytes. It does not know how results are made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import sqrt

from benchmarks.figures import Figure
from benchmarks.quality_results import (
    Mean,
    Record,
    Results,
    RowResult,
    correlation,
    less_often,
    mean,
    over_seeds,
    row_results,
    size_at,
    slope_through_zero,
)
from benchmarks.quality_settings import MAKERS, Span, setting_named
from policies.budget import LAG

RAW, COMPACT = 12.0, 4.14
"""Bytes a parameter of a save of everything; compact's are taken from its row where there is one."""

BASELINES = {
    f"{policy}{encoding}": f"full{encoding}"
    for policy in ("budget", "auto")
    for encoding in ("", ", compact", ", compact, packed")
}
"""What each family is held against: as many bytes, spent on everything, less often, in the same encoding."""


def figures(records: Sequence[Record]) -> list[Figure]:
    """All that the records hold."""
    found: list[Figure] = []
    for name in MAKERS:
        results = Results(name, [one for one in records if "setting" in one])
        if results.trunks:
            found += [*_of_setting(results), *_calibrated(results), *_curved(results, setting_named(name).span)]
            found += _ruled(results)
    return found


def _of_setting(results: Results) -> Iterator[Figure]:
    name, worth = results.setting, results.worth
    yield Figure(f"{name}: a step is worth", worth.value, "nats", f"+-{worth.around:.2g} at 95 %")
    yield Figure(f"{name}: spread of uninterrupted runs", results.spread, "nats", f"{len(results.trunks)} seeds")
    if results.cases:
        yield Figure(f"{name}: noise", results.nudged(None), "nats", "weights nudged in the last place, at the end")
    paces = [
        drift[min(drift, key=int)]
        for trunk in results.trunks.values()
        for unit, drift in trunk["drift"].items()
        if unit.endswith("/fp32")
    ]
    usual = sum(paces) / len(paces)
    spread = sqrt(sum((one - usual) ** 2 for one in paces) / len(paces)) / usual
    yield Figure(f"{name}: paces of layers, spread", spread, "of their mean", f"{max(paces) / min(paces):.3g} x apart")


def label(case: Record) -> str:
    """A case of the calibration, for people."""
    what = {"w": "weights", "m": "first moments", "v": "second moments", "mv": "moments", "wmv": "all"}
    name = what.get(case["name"], case["name"])
    if case["half"]:
        name += " of every other layer"
    if case["special"]:
        return f"{name} {case['special']}"
    return f"{name} {case['age']} steps old" if case["age"] else f"{name} {case['encoding']}"


def by_case(results: Results, steps: int | None) -> dict[str, tuple[Record, Mean]]:
    """Gap of each case, over seeds and moments; and the case."""
    names = dict.fromkeys(json.dumps(one["case"]) for one in results.cases)
    found = {}
    for name in names:
        own = [one for one in results.cases if json.dumps(one["case"]) == name]
        gaps = [results.gap(one, one["losses"], steps) for one in own]
        found[label(own[0]["case"])] = (own[0]["case"], mean(gaps))
    return found


def _calibrated(results: Results) -> Iterator[Figure]:
    for name, (case, gap) in by_case(results, None).items():
        if case["name"] == "exact":
            strays = gap.value if gap.value else 0.0
            yield Figure(f"{results.setting}: {name}", abs(strays), "nats", "the uninterrupted run", 0)
        else:
            yield Figure(f"{results.setting}: {name}", gap.value, "nats", f"+-{gap.around:.2g}, {gap.count} runs")
    yield from _lags(results)


def weights_a_step(results: Results) -> float:
    """Nats that each step of staleness of all weights costs, at the end: the slope through 0 over all ages."""
    points = [
        (float(one["case"]["age"]), results.gap(one, one["losses"]))
        for one in results.cases
        if one["case"]["name"] == "w" and one["case"]["age"] and not one["case"]["half"]
    ]
    return slope_through_zero(points)[0] if points else float("nan")


def lags(results: Results) -> dict[str, Mean]:
    """Slot -> steps of staleness of the weights that being wholly out of date (drift 1) costs as much as.

    Of every state with that slot stale: its gap over what a step costs, over its drift, which is what policy budget
    multiplies a lag with. Below 0 where the stale state ended better."""
    step = weights_a_step(results)
    found = {}
    for slot, letter in (("exp_avg", "m"), ("exp_avg_sq", "v")):
        own = [one for one in results.cases if one["case"]["name"] == letter and one["case"]["encoding"] == "raw"]
        ratios = [
            results.gap(one, one["losses"]) / step / sqrt(one["drift"][letter])
            for one in own
            if one["drift"][letter] > 1e-3  # where hardly anything moved, a ratio says nothing
        ]
        if ratios:
            found[slot] = mean(ratios)
    return found


def _lags(results: Results) -> Iterator[Figure]:
    for slot, lag in lags(results).items():
        yield Figure(f"{results.setting}: lag of {slot}", lag.value, "steps", f"+-{lag.around:.2g}, {lag.count} runs")


def window(span: Span) -> tuple[int, int, int]:
    """First save, first and last failure."""
    return span.start, span.first, span.last


def baseline(results: Results, rows: Sequence[RowResult], family: str, rate: float) -> float:
    """Cost in nats of saving everything, as often as ``rate`` allows, in the encoding of a family of full saves."""
    compact = next((row for row in rows if row.family == "full, compact"), None)
    worth = results.worth.value
    if family == "full" or compact is None:
        return less_often(RAW, rate, worth)
    if family == "full, compact":
        return less_often(compact.rate * compact.every, rate, worth, compact.gap.value)
    sizes = {row.every: row.rate * row.every for row in rows if row.family == family}
    gap = compact.gap.value if "compact" in family else 0.0
    return less_often(size_at(sizes, rate), rate, worth, gap) if sizes else float("nan")


def _curved(results: Results, span: Span) -> Iterator[Figure]:
    if not results.curves:
        return
    rows = row_results(results, window(span))
    name = results.setting
    for row in rows:
        if row.gap.count == 0:
            yield Figure(f"{name}, {row.row}: bytes", row.rate, "a parameter, step")
            continue
        yield Figure(
            f"{name}, {row.row}: cost",
            row.cost.value,
            "nats",
            f"+-{row.cost.around:.2g}; {row.rate:.3g} bytes; {row.lost:.1f} steps lost; full at that rate "
            f"{baseline(results, rows, 'full', row.rate):.3g}",
        )
    for row in rows:
        against = BASELINES.get(row.family)
        if against is not None and not row.mark:
            apart = row.cost.value - baseline(results, rows, against, row.rate)
            figure, told = (
                f"{name}, {row.row}: cost over {against} less often",
                f"+-{row.cost.around:.2g}, as many bytes",
            )
            yield Figure(figure, apart, "nats", told)
            if row.cost.count > 1:  # one seed has no interval, and nothing to hold to a goal
                yield Figure(f"{figure}, upper end", apart + row.cost.around, "nats", "no worse", 0.0)
    yield from _drifts(results)


def drift_points(results: Results, key: str, steps: int | None) -> list[tuple[float, float]]:
    """(what the certificate says, gap) of all resumed states that were not whole. key: as told by the certificate, or
    ``damage``: what policy budget takes it for."""
    return [
        (_said(state["certificate"], key), results.gap(one, state["losses"], steps))
        for one in results.curves
        for state in one["states"]
        if one["family"] != "full"
    ]


def _said(certificate: Record, key: str) -> float:
    if key != "damage":
        return float(certificate[key])
    return float(certificate["w"] + LAG**2 * (certificate["mp"] + certificate["vp"]))


def _drifts(results: Results) -> Iterator[Figure]:
    for key, what in (
        ("w", "squared drift of weights"),
        ("damage", "what policy budget takes for damage"),
        ("lag", "mean staleness of weights"),
    ):
        for steps, when in ((0, "at once"), (None, "at the end")):
            points = drift_points(results, key, steps)
            if len(points) > 3:
                slope, _ = slope_through_zero(points)
                figure = f"{results.setting}: R^2 of the gap {when} on {what}"
                yield Figure(figure, correlation(points), "", f"slope {slope:.3g}, {len(points)} states")


RULES = ("newest", "mean", "paced", "oldest")


def ruled(results: Results) -> dict[tuple[str, str], tuple[Mean, Mean, float]]:
    """(family, rule) -> (gap at the end of the course, the same at equal compute, steps gone back)."""
    gaps: dict[tuple[str, str], list[tuple[int, float]]] = {}
    backs: dict[tuple[str, str], list[int]] = {}
    for one in results.curves:
        for state in one["states"]:
            for rule in RULES if "rules" in state else ():
                told = state if rule == "newest" else state["rules"][rule]
                key = one["family"], rule
                gaps.setdefault(key, []).append((one["seed"], results.gap(one, told["losses"])))
                backs.setdefault(key, []).append(0 if rule == "newest" else told["back"])
    found = {}
    for key, own in gaps.items():
        paid = [(seed, gap + back * results.worth.value) for (seed, gap), back in zip(own, backs[key], strict=True)]
        found[key] = (over_seeds(own), over_seeds(paid), sum(backs[key]) / len(own))
    return found


def _ruled(results: Results) -> Iterator[Figure]:
    for (family, rule), (gap, paid, back) in ruled(results).items():
        figure = f"{results.setting}, {family}, resumed at {rule}"
        told = f"+-{gap.around:.2g}; at equal compute {paid.value:.4g} +-{paid.around:.2g}; {back:.1f} steps back"
        yield Figure(figure, gap.value, "nats", told)
