"""The tables of the benchmark of coasting, from its results: gaps and costs, movement regained, what predicts a gap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from benchmarks.quality_results import correlation

AGE = 40
"""Age, in steps, of the whole states that tell what a step is worth."""
WHOLE = f"all {AGE} steps old"

Record = dict[str, Any]


def over_seeds(own: Sequence[Record], value: Callable[[Record], float], scale: float = 1.0) -> str:
    """Mean and standard error of the seeds' means."""
    seeds = sorted({one["seed"] for one in own})
    means = [scale * fmean(value(one) for one in own if one["seed"] == seed) for seed in seeds]
    return f"{fmean(means):.2f}" + (f" ± {stdev(means) / sqrt(len(means)):.2f}" if len(means) > 1 else "")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)) + "\n"


def tables(records: Sequence[Record]) -> Iterator[str]:
    """Gaps in thousandths of a nat, then what coasting regains, then what predicts gaps."""
    found = [one for one in records if one["part"] == "case"]
    rates = sorted({one["rate"] for one in found}, reverse=True)
    for rate in rates:
        own = [one for one in found if one["rate"] == rate]
        whole = [one for one in own if one["row"] == WHOLE and not one["variant"]]
        yield f"rate {rate:g}, {len({one['seed'] for one in own})} seeds; a step is worth " + over_seeds(
            whole, lambda one: one["gap"] / AGE, 1e3
        )
        yield _gaps(own, fmean(one["gap"] / AGE for one in whole))
        yield _regained([one for one in records if one["part"] == "regained" and one["rate"] == rate])
    yield _predicted([one for one in found if not one["variant"] and one["told"]["staleness"]], rates)


def _gaps(own: Sequence[Record], worth: float) -> str:
    """Of each row and variant; differences are taken pair by pair, at equal compute."""
    cost = {(one["seed"], one["at"], one["row"], one["variant"]): one["gap"] + one["back"] * worth for one in own}

    def over(one: Record, variant: str) -> float:
        key = one["seed"], one["at"], one["row"]
        return cost[*key, one["variant"]] - cost[*key, variant]

    rows = []
    for row, variant in dict.fromkeys((one["row"], one["variant"]) for one in own if "mixed" not in one["row"]):
        these = [one for one in own if (one["row"], one["variant"]) == (row, variant)]
        values = [over_seeds(these, lambda one: one[part], 1e3) for part in ("shock", "gap")]  # noqa: B023
        values += [over_seeds(these, lambda one: one["gap"] + one["back"] * worth, 1e3)]
        values += [over_seeds(these, lambda one: over(one, ""), 1e3) if variant else ""]
        back_too = variant not in ("", "effective") and row.startswith("parity")
        values += [over_seeds(these, lambda one: over(one, "effective"), 1e3) if back_too else ""]
        counted = f"{len({one['seed'] for one in these})}, {len(these)}"
        rows.append([row, variant or "as it is", counted, *values])
    return table(
        ["row", "variant", "seeds, runs", "right after", "gap", "cost", "cost over as it is", "over effective"], rows
    )


def _regained(own: Sequence[Record]) -> str:
    """Of the movement: the share made along it, how much nearer it comes, the angle, the factor that were best."""
    parts: dict[str, Callable[[Record], float]] = {
        "share": lambda one: one["both"] / one["moved"],
        "nearer by": lambda one: 1 - sqrt(max(0.0, 1 - (2 * one["both"] - one["made"]) / one["moved"])),
        "cosine": lambda one: one["both"] / sqrt(one["moved"] * one["made"]),
        "best factor": lambda one: one["both"] / one["made"],
    }
    ages = {age: [one for one in own if one["age"] == age] for age in sorted({one["age"] for one in own})}
    rows = [[str(age), *(over_seeds(these, part) for part in parts.values())] for age, these in ages.items()]
    return table(["steps old", *parts], rows)


def _predicted(found: Sequence[Record], rates: Sequence[float]) -> str:
    """Return the R^2 of each predictor for the gap: over all states of a rate, and the mean over seeds."""
    groups = {f"rate {rate:g}": [one for one in found if one["rate"] == rate] for rate in rates}
    groups["both"] = list(found)

    def r2(of: Sequence[Record], key: str) -> str:
        return f"{correlation([(one['told'][key], one['gap']) for one in of]):.2f}"

    def told_by(key: str, of: Sequence[Record]) -> str:
        seeds = sorted({one["seed"] for one in of})
        return f"{r2(of, key)} ({', '.join(r2([one for one in of if one['seed'] == seed], key) for seed in seeds)})"

    rows = [[key, *(told_by(key, of) for of in groups.values())] for key in (found[0]["told"] if found else ())]
    return table(["R² of the gap on", *(f"{name}, {len(of)} states" for name, of in groups.items())], rows)
