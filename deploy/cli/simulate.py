"""``driftpoint simulate`` and ``estimate``: compute bytes, stall and risk of configurations.

``simulate`` replays a recorded run, ``estimate`` one that is built from stated assumptions."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from deploy import console as output
from deploy.console import DebugOption, JsonOption
from deploy.format import size_text, span_text
from store.errors import UsageError

if TYPE_CHECKING:
    from deploy.simulate.simulation import Simulation, Summary, Terms

_POLICY = (
    "A configuration to replay: a YAML file, a name, '{name: parity, k: 4}' or '{policy: full, every: 50}'. "
    "Repeatable; default: the recorded one."
)
PolicyOption = Annotated[list[str] | None, Option("--policy", "-p", metavar="POLICY", help=_POLICY)]
MtbfOption = Annotated[list[float] | None, Option(metavar="HOURS", help="Mean time between failures (3, 12, 48).")]
RestartOption = Annotated[float, Option(min=0, metavar="S", help="Seconds from a failure to the next step.")]
GpuPriceOption = Annotated[float | None, Option(min=0, metavar="PRICE", help="Price of a GPU hour, in any currency.")]
WrittenPriceOption = Annotated[float | None, Option(min=0, metavar="PRICE", help="Price of writing 10^12 bytes.")]
StorageOption = Annotated[
    float | None, Option(min=0, metavar="GB/S", help="Write speed of all ranks together, in 10^9 bytes per second.")
]
CopyOption = Annotated[
    float | None, Option(min=0, metavar="GB/S", help="Blocking copy speed of one rank, in 10^9 bytes per second.")
]

_LARGEST = 1e18  # largest accepted number, so that the product of two stays finite


def simulate(
    trace: Annotated[Path, Argument(metavar="TRACE", help="Drift trace of a job, STORE.trace.jsonl.")],
    *,
    policy: PolicyOption = None,
    mtbf: MtbfOption = None,
    restart_seconds: RestartOption = 600.0,
    price_per_gpu_hour: GpuPriceOption = None,
    price_per_tb_written: WrittenPriceOption = None,
    storage_gbps: StorageOption = None,
    copy_gbps: CopyOption = None,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Replay a recorded run under other configurations: bytes, stall, and the cost of a failure."""
    with redirect_stdout(sys.stderr):
        from deploy.simulate.simulation import Terms, read_trace, simulated

    speeds = {"storage_gbps": storage_gbps, "copy_gbps": copy_gbps}
    check_numbers(speeds, above_zero=True)
    terms = Terms(tuple(mtbf or ()) or None, restart_seconds, price_per_gpu_hour, price_per_tb_written)
    check_terms(terms)
    answer(simulated(read_trace(trace), policy or (), terms, speeds), as_json=json)


def estimate(
    model: Annotated[str, Argument(metavar="MODEL", help="llama-8b, llama-70b or llama-405b.")],
    *,
    gpus: Annotated[int | None, Option(min=1, metavar="N", help="Number of GPUs (1024).")] = None,
    step_seconds: Annotated[float | None, Option(min=0, metavar="S", help="Seconds per step.")] = None,
    drift: Annotated[float | None, Option(min=0, metavar="D", help="Drift of the weights over 10 steps.")] = None,
    learning_rate: Annotated[
        float | None, Option(min=0, metavar="LR", help="Learning rate, instead of --drift (1e-4).")
    ] = None,
    every: Annotated[int | None, Option(min=1, metavar="N", help="Steps between decisions (25).")] = None,
    hours: Annotated[float | None, Option(min=0, metavar="H", help="Hours of training (24).")] = None,
    policy: PolicyOption = None,
    mtbf: MtbfOption = None,
    restart_seconds: RestartOption = 600.0,
    price_per_gpu_hour: GpuPriceOption = None,
    price_per_tb_written: WrittenPriceOption = None,
    storage_gbps: StorageOption = None,
    copy_gbps: CopyOption = None,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Estimate bytes, stall and the cost of a failure for a model and a cluster, from stated assumptions."""
    with redirect_stdout(sys.stderr):
        from deploy.simulate.assumptions import Assumptions, assumed_trace
        from deploy.simulate.simulation import Terms, simulated

    given = {
        "gpus": gpus, "step_seconds": step_seconds, "drift": drift, "learning_rate": learning_rate, "every": every,
        "hours": hours, "storage_gbps": storage_gbps, "copy_gbps": copy_gbps,
    }  # fmt: skip
    check_numbers(given, above_zero=True)
    terms = Terms(tuple(mtbf or ()) or None, restart_seconds, price_per_gpu_hour, price_per_tb_written)
    check_terms(terms)
    assumptions = Assumptions.of(model, given)
    between = assumptions.mtbf_hours
    terms = replace(terms, mtbf_hours=terms.mtbf_hours or (between, 4 * between, 16 * between))
    speeds = {"storage_gbps": assumptions.storage_gbps, "copy_gbps": assumptions.copy_gbps}
    found = simulated(assumed_trace(assumptions), policy or (), terms, speeds)
    answer(found, as_json=json, assumed=assumptions.told())


def check_terms(terms: "Terms") -> None:
    """Raise UsageError for a number out of range."""
    from_zero = asdict(terms)
    for hours in from_zero.pop("mtbf_hours") or ():
        check_numbers({"mtbf": hours}, above_zero=True)
    check_numbers(from_zero, above_zero=False)


def check_numbers(values: Mapping[str, float | None], *, above_zero: bool) -> None:
    """Raise UsageError for an option that is NaN, infinite, too large or negative, or 0 under ``above_zero``."""
    for name, value in values.items():
        if value is not None and not (0 <= value <= _LARGEST and (value > 0 or not above_zero)):
            least = "above 0" if above_zero else "from 0"
            raise UsageError(f"--{name.replace('_', '-')} must be a number {least}, up to {_LARGEST:g}: got {value}")


def answer(found: "Simulation", *, as_json: bool, assumed: Mapping[str, str] | None = None) -> None:
    """Print the result. ``assumed`` holds the assumptions of an estimate with their sources."""
    from deploy.simulate.simulation import step_seconds, summary_json

    body = {
        "decisions": len(found.run.decisions),
        "hours": found.run.seconds / 3600,
        "step_seconds": step_seconds(found.run),
        "world_size": found.run.segments[-1].job.world_size,
        "compared": {"from_step": found.window[0], "to_step": found.window[1]},
        "assumed": None if assumed is None else dict(assumed),
        "configurations": [summary_json(one, found.baseline) for one in found.summaries],
        "notes": list(found.notes),
    }
    output.answer(body, lambda console: draw(console, found, assumed or {}), as_json=as_json)


def draw(console: Console, found: "Simulation", assumed: Mapping[str, str]) -> None:
    """Print the text of the command. ``assumed`` is empty for a recorded run."""
    from deploy.simulate.simulation import step_seconds

    for name, text in assumed.items():
        console.print(output.cell(f"{name}: {text}."))
    if assumed:
        output.spaced(console, Text("Assumed, not measured.", style="bold yellow"))
    run = found.run
    steps = [point.line.step for point in run.decisions]
    rows = {
        "Run": f"{len(run.decisions)} decisions, steps {min(steps)} to {max(steps)}, {span_text(run.seconds)}, "
        f"{span_text(step_seconds(run))} per step, {run.segments[-1].job.world_size} ranks",
        "Compared": f"over steps {found.window[0]:.0f} to {found.window[1]:.0f}, from where all have a commit",
    }
    output.spaced(console, output.facts(rows))
    console.print(_costs(found.summaries, found.baseline))
    output.spaced(console, output.cell("¹ without the first save of a store, which is always full"))
    output.spaced(console, _failure(found.summaries))
    console.print(_kept(found.summaries))
    if found.notes:
        console.print()
        for note in found.notes:
            console.print(output.cell(f"Note: {note}.", "yellow"))


def _costs(summaries: "Sequence[Summary]", baseline: "Summary") -> Table:
    numbers = ("Saves", "Bytes", "per hour¹", "per save", "of full", "Stall")
    found = output.table(output.fold("Configuration"), *map(output.number, numbers))
    for one in summaries:
        share = one.written / baseline.written if baseline.written else 0.0
        hourly = size_text(round(one.later / one.hours)) if one.hours else "?"
        each = size_text(round(one.written / one.saves)) if one.saves else ""
        shares = (f"{100 * share:.1f} %", f"{100 * one.stall_share:.2g} %")
        found.add_row(output.cell(one.name), str(one.saves), size_text(one.written), hourly, each, *shares)
    return found


def _failure(summaries: "Sequence[Summary]") -> Table:
    numbers = ("Damage", "Weights' drift", "Moments' drift", "Lost steps")
    found = output.table(output.fold("Mean/worst at a failure"), *map(output.number, numbers))
    for one in summaries:
        exposure = one.replayed.exposure
        if not exposure.lost.weight:
            found.add_row(output.cell(one.name), "", "", "", "no commit")
            continue
        spreads = (exposure.total, one.drift(weights=True), one.drift(weights=False))
        cells = [f"{spread.mean:.2g}/{spread.worst:.2g}" for spread in spreads]
        lost = one.rewound
        found.add_row(output.cell(one.name), *cells, f"{lost.mean:.1f}/{lost.worst:.0f}")
    return found


def _kept(summaries: "Sequence[Summary]") -> Table:
    times = summaries[0].terms.times if summaries else ()
    priced = bool(summaries) and summaries[0].price(1.0) is not None
    numbers = [name for hours in times for name in (span_text(3600 * hours), *(["price"] if priced else []))]
    found = output.table(output.fold("Goodput, a failure every"), *map(output.number, numbers))
    for one in summaries:
        cells = []
        for hours in times:
            cells.append(f"{100 * one.goodput(hours):.2f} %")
            if priced:
                cells.append(f"{one.price(hours):,.2f}")
        found.add_row(output.cell(one.name), *cells)
    return found
