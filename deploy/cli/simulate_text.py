"""Format the answer of ``driftpoint simulate`` and ``estimate``: tables, YAML to paste, and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.cli import output
from deploy.cli.text import size_text
from deploy.simulate.recommend import Recommended, later_per_hour
from deploy.simulate.simulation import Simulation
from deploy.simulate.summary import Summary, step_seconds
from deploy.simulate.summary import as_json as summary_json


def as_json(found: Simulation, chosen: Recommended | None) -> dict[str, Any]:
    """The JSON object of the command."""
    body: dict[str, Any] = {
        "decisions": len(found.run.moments),
        "hours": found.run.seconds / 3600,
        "step_seconds": step_seconds(found.run),
        "world_size": found.run.eras[-1].job.world_size,
        "compared": {"from_step": found.window[0], "to_step": found.window[1]},
        "configurations": [summary_json(one, found.baseline) for one in found.summaries],
        "recommended": None,
        "notes": list(found.notes),
    }
    if chosen is not None:
        body["recommended"] = {
            "settings": dict(chosen.settings),
            "bytes_per_hour_limit": chosen.limits.bytes_per_hour,
            "tried": [summary_json(one, found.baseline) for one in chosen.tried],
        }
    return body


def draw(console: Console, found: Simulation, chosen: Recommended | None, assumed: Mapping[str, str]) -> None:
    """Print the text of the command. assumed: the assumptions that the run was made from; none for a recorded one."""
    for name, text in assumed.items():
        console.print(output.cell(f"{name}: {text}."))
    if assumed:
        console.print(Text("Assumed, not measured.", style="bold yellow"))
        console.print()
    run = found.run
    steps = [moment.line.step for moment in run.moments]
    console.print(
        output.facts(
            {
                "Run": f"{len(run.moments)} decisions, steps {min(steps)} to {max(steps)}, {_time(run.seconds)}, "
                f"{_time(step_seconds(run))} a step, {run.eras[-1].job.world_size} ranks",
                "Compared": f"over steps {found.window[0]:.0f} to {found.window[1]:.0f}, where all have a commit",
            }
        )
    )
    console.print()
    _draw_all(console, found.summaries, found.baseline)
    if chosen is not None:
        _draw_chosen(console, chosen, found.baseline)
    if found.notes:
        console.print()
        for note in found.notes:
            console.print(output.cell(f"Note: {note}.", "yellow"))


def _draw_all(console: Console, summaries: Sequence[Summary], baseline: Summary) -> None:
    console.print(_costs(summaries, baseline))
    console.print(output.cell("¹ without the first save of a store, which is full under every policy"))
    console.print()
    console.print(_failure(summaries))
    console.print()
    console.print(_kept(summaries))


def _draw_chosen(console: Console, chosen: Recommended, baseline: Summary) -> None:
    console.print()
    limit = chosen.limits.bytes_per_hour
    most = "" if limit is None else f", at most {size_text(round(limit))} an hour after the first save"
    console.print(Text(f"Within the limits{most}, least expected damage first", style="bold"))
    console.print()
    _draw_all(console, chosen.tried, baseline)
    console.print()
    console.print(Text("Recommended", style="bold"))
    for line in chosen.yaml.splitlines():
        console.print(output.cell(line))


def _costs(summaries: Sequence[Summary], baseline: Summary) -> Table:
    found = output.table()
    found.add_column("Configuration", overflow="fold")
    for heading in ("Saves", "Bytes", "an hour¹", "a save", "of full", "Stall"):
        found.add_column(heading, justify="right", no_wrap=True)
    for one in summaries:
        share = one.written / baseline.written if baseline.written else 0.0
        found.add_row(
            output.cell(one.name),
            str(one.saves),
            size_text(one.written),
            size_text(round(later_per_hour(one))) if one.hours else "?",
            size_text(round(one.written / one.saves)) if one.saves else "",
            f"{100 * share:.1f} %",
            f"{100 * one.stall_share:.2g} %",
        )
    return found


def _failure(summaries: Sequence[Summary]) -> Table:
    found = output.table()
    found.add_column("Mean/worst at a failure", overflow="fold")
    for heading in ("Damage", "Weights' drift", "Moments' drift", "Lost steps"):
        found.add_column(heading, justify="right", no_wrap=True)
    for one in summaries:
        exposure = one.exposure
        if not exposure.lost.weight:
            found.add_row(output.cell(one.name), "", "", "", "nothing kept")
            continue
        spreads = (exposure.total, one.drift(weights=True), one.drift(weights=False))
        cells = [f"{spread.mean:.2g}/{spread.worst:.2g}" for spread in spreads]
        lost = one.rewound
        found.add_row(output.cell(one.name), *cells, f"{lost.mean:.1f}/{lost.worst:.0f}")
    return found


def _kept(summaries: Sequence[Summary]) -> Table:
    found = output.table()
    found.add_column("Goodput, a failure every", overflow="fold")
    times = summaries[0].terms.times if summaries else ()
    priced = bool(summaries) and summaries[0].price(1.0) is not None
    for hours in times:
        found.add_column(_time(3600 * hours), justify="right", no_wrap=True)
        if priced:
            found.add_column("price", justify="right", no_wrap=True)
    for one in summaries:
        cells = []
        for hours in times:
            cells.append(f"{100 * one.goodput(hours):.2f} %")
            if priced:
                cells.append(f"{one.price(hours):,.2f}")
        found.add_row(output.cell(one.name), *cells)
    return found


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    for unit, length, upto in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < upto:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 86_400:.3g} d"
