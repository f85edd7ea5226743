"""``driftpoint simulate``: what other configurations would have saved on a recorded run, and at what risk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli import output
from deploy.cli.exit_codes import OK
from deploy.cli.options import DebugOption, JsonOption
from store.errors import UsageError

if TYPE_CHECKING:
    from deploy.simulate.recommend import Limits, Recommended
    from deploy.simulate.simulation import Simulation
    from deploy.simulate.summary import Terms

TraceArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[TRACE]", help="The trace that a job wrote, STORE.trace.jsonl.", show_default=False),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        "-p",
        metavar="POLICY",
        help="A configuration to replay: a YAML file, a name, '{name: parity, k: 4}' or '{policy: full, every: 50}'. "
        "May be given several times; by default the recorded one.",
        show_default=False,
    ),
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Write a picture (needs matplotlib).", show_default=False)
]
MtbfOption = Annotated[
    list[float] | None,
    typer.Option("--mtbf", metavar="HOURS", help="Mean time between failures (3, 12, 48).", show_default=False),
]
RestartOption = Annotated[
    float, typer.Option("--restart-seconds", min=0, metavar="S", help="From a failure to the first step after it.")
]
GpuPriceOption = Annotated[
    float | None,
    typer.Option("--price-per-gpu-hour", min=0, metavar="PRICE", help="In any currency.", show_default=False),
]
WrittenPriceOption = Annotated[
    float | None,
    typer.Option("--price-per-tb-written", min=0, metavar="PRICE", help="Of 10^12 bytes.", show_default=False),
]
RecommendOption = Annotated[
    bool, typer.Option("--recommend", help="Look for the configuration of least expected damage; print its YAML.")
]
BytesOption = Annotated[
    float | None,
    typer.Option("--bytes-per-hour", min=0, metavar="BYTES", help="With --recommend: the most.", show_default=False),
]
StallOption = Annotated[
    float | None,
    typer.Option(
        "--stall-share", min=0, max=1, metavar="SHARE", help="With --recommend: the most.", show_default=False
    ),
]
LossOption = Annotated[
    float | None,
    typer.Option(
        "--max-loss-minutes",
        min=0,
        metavar="MIN",
        help="With --recommend: to redo after a failure.",
        show_default=False,
    ),
]
ExactOption = Annotated[bool, typer.Option("--exact", help="With --recommend: no encoding that rounds.")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="No trace, but assumptions: llama-8b, llama-70b, llama-405b.",
        show_default=False,
    ),
]
GpusOption = Annotated[
    int | None, typer.Option("--gpus", min=1, metavar="N", help="With --model (1024).", show_default=False)
]
StepOption = Annotated[
    float | None, typer.Option("--step-seconds", min=0, metavar="S", help="With --model.", show_default=False)
]
DriftOption = Annotated[
    float | None,
    typer.Option("--drift", min=0, metavar="D", help="With --model: of weights, in 10 steps.", show_default=False),
]
RateOption = Annotated[
    float | None,
    typer.Option(
        "--learning-rate", min=0, metavar="LR", help="With --model, in place of --drift (1e-4).", show_default=False
    ),
]
EveryOption = Annotated[
    int | None,
    typer.Option("--every", min=1, metavar="N", help="With --model: steps between decisions (25).", show_default=False),
]
HoursOption = Annotated[
    float | None,
    typer.Option("--hours", min=0, metavar="H", help="With --model: of training (24).", show_default=False),
]
StorageOption = Annotated[
    float | None,
    typer.Option(
        "--storage-gbps",
        min=0,
        metavar="GB/S",
        help="That all ranks write together, instead of what the trace tells.",
        show_default=False,
    ),
]
CopyOption = Annotated[
    float | None,
    typer.Option(
        "--copy-gbps",
        min=0,
        metavar="GB/S",
        help="That one rank copies while training waits, instead of what the trace tells.",
        show_default=False,
    ),
]

_GREATEST = 1e18
"""Of any number here."""


def simulate(
    trace: TraceArgument = None,
    *,
    policy: PolicyOption = None,
    recommend: RecommendOption = False,
    bytes_per_hour: BytesOption = None,
    stall_share: StallOption = None,
    max_loss_minutes: LossOption = None,
    exact: ExactOption = False,
    mtbf: MtbfOption = None,
    restart_seconds: RestartOption = 600.0,
    price_per_gpu_hour: GpuPriceOption = None,
    price_per_tb_written: WrittenPriceOption = None,
    storage_gbps: StorageOption = None,
    copy_gbps: CopyOption = None,
    model: ModelOption = None,
    gpus: GpusOption = None,
    step_seconds: StepOption = None,
    drift: DriftOption = None,
    learning_rate: RateOption = None,
    every: EveryOption = None,
    hours: HoursOption = None,
    plot: PlotOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Replay a recorded run under other configurations: bytes, stall, and what a failure would cost."""
    del debug
    with output.kept_for_answers():
        from deploy.cli import simulate_text
        from deploy.simulate.recommend import Limits
        from deploy.simulate.summary import Prices, Terms

    supposed = {
        "gpus": gpus, "step_seconds": step_seconds, "drift": drift, "learning_rate": learning_rate,
        "every": every, "hours": hours,
    }  # fmt: skip
    speeds = {"storage_gbps": storage_gbps, "copy_gbps": copy_gbps}
    for hours_between in mtbf or ():
        _require_numbers({"mtbf": hours_between}, above=True)
    _require_numbers({**supposed, **speeds}, above=True)
    asked_for = {
        "restart_seconds": restart_seconds, "price_per_gpu_hour": price_per_gpu_hour,
        "price_per_tb_written": price_per_tb_written, "bytes_per_hour": bytes_per_hour, "stall_share": stall_share,
        "max_loss_minutes": max_loss_minutes,
    }  # fmt: skip
    _require_numbers(asked_for, above=False)
    limits = Limits(bytes_per_hour, stall_share, max_loss_minutes, exact)
    _require_together(trace, model, supposed, limits.any or exact, recommend)
    terms = Terms(tuple(mtbf or ()) or None, restart_seconds, Prices(price_per_gpu_hour, price_per_tb_written))
    asked = _Asked(tuple(policy or ()), terms, limits if recommend else None)
    found, chosen = _recorded(trace, asked, speeds) if trace else _assumed(model or "", {**supposed, **speeds}, asked)
    if plot is not None:
        from deploy.simulate.picture import write_picture

        write_picture(found.summaries, plot)
    body = simulate_text.as_json(found, chosen)
    output.answer(body, lambda console: simulate_text.draw(console, found, chosen), as_json=json)
    raise typer.Exit(OK)


@dataclass(frozen=True)
class _Asked:
    policies: Sequence[str]
    terms: Terms
    limits: Limits | None


def _require_numbers(values: Mapping[str, float | None], *, above: bool) -> None:
    """Neither NaN nor infinite, nor so great that a product of two is. above: 0 is refused, too."""
    for name, value in values.items():
        if value is not None and not (0 <= value <= _GREATEST and (value > 0 or not above)):
            least = "above 0" if above else "from 0"
            raise UsageError(f"--{name.replace('_', '-')} must be a number {least}, up to {_GREATEST:g}: got {value}")


def _require_together(
    trace: Path | None, model: str | None, supposed: Mapping[str, float | None], limited: bool, recommend: bool
) -> None:
    if (trace is None) == (model is None):
        raise UsageError("give either a trace, STORE.trace.jsonl, or --model: `driftpoint simulate --help`")
    unused = [f"--{name.replace('_', '-')}" for name, value in supposed.items() if value is not None]
    if trace is not None and unused:
        raise UsageError(f"{', '.join(unused)} goes with --model; a trace says it by itself")
    if limited and not recommend:
        raise UsageError("--bytes-per-hour, --stall-share, --max-loss-minutes and --exact go with --recommend")


def _recorded(path: Path, asked: _Asked, speeds: Mapping[str, float | None]) -> tuple[Simulation, Recommended | None]:
    from deploy.simulate.simulation import read_trace, simulated

    return simulated(read_trace(path), asked.policies, asked.terms, asked.limits, speeds)


def _assumed(model: str, given: Mapping[str, float | None], asked: _Asked) -> tuple[Simulation, Recommended | None]:
    from deploy.simulate.assumed import Assumptions, assumed_trace
    from deploy.simulate.simulation import simulated

    one = Assumptions.of(model, given)
    speeds = {"storage_gbps": one.storage_gbps, "copy_gbps": one.copy_gbps}
    often = one.mtbf_hours
    terms = replace(asked.terms, mtbf_hours=asked.terms.mtbf_hours or (often, 4 * often, 16 * often))
    found, chosen = simulated(assumed_trace(one), asked.policies, terms, asked.limits, speeds)
    return replace(found, assumed=one.told()), chosen
