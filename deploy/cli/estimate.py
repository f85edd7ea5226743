"""``driftpoint estimate``: estimate bytes, stall and risk of configurations from stated assumptions."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from deploy import console as output
from deploy.cli import replay
from deploy.console import DebugOption, JsonOption

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="llama-8b, llama-70b or llama-405b.")]
GpusOption = Annotated[int | None, typer.Option("--gpus", min=1, metavar="N", help="Number of GPUs (1024).")]
StepOption = Annotated[float | None, typer.Option("--step-seconds", min=0, metavar="S", help="Seconds per step.")]
DriftOption = Annotated[
    float | None, typer.Option("--drift", min=0, metavar="D", help="Drift of the weights over 10 steps.")
]
RateOption = Annotated[
    float | None, typer.Option("--learning-rate", min=0, metavar="LR", help="Learning rate, instead of --drift (1e-4).")
]
EveryOption = Annotated[int | None, typer.Option("--every", min=1, metavar="N", help="Steps between decisions (25).")]
HoursOption = Annotated[float | None, typer.Option("--hours", min=0, metavar="H", help="Hours of training (24).")]


def estimate(
    model: ModelArgument,
    *,
    gpus: GpusOption = None,
    step_seconds: StepOption = None,
    drift: DriftOption = None,
    learning_rate: RateOption = None,
    every: EveryOption = None,
    hours: HoursOption = None,
    policy: replay.PolicyOption = None,
    recommend: replay.RecommendOption = False,
    bytes_per_hour: replay.BytesOption = None,
    stall_share: replay.StallOption = None,
    max_loss_minutes: replay.LossOption = None,
    exact: replay.ExactOption = False,
    mtbf: replay.MtbfOption = None,
    restart_seconds: replay.RestartOption = 600.0,
    price_per_gpu_hour: replay.GpuPriceOption = None,
    price_per_tb_written: replay.WrittenPriceOption = None,
    storage_gbps: replay.StorageOption = None,
    copy_gbps: replay.CopyOption = None,
    plot: replay.PlotOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Estimate bytes, stall and the cost of a failure for a model and a cluster, from stated assumptions."""
    del debug
    with output.stdout_to_stderr():
        from deploy.simulate.assumptions import Assumptions, assumed_trace
        from deploy.simulate.simulation import Limits, simulated
        from deploy.simulate.summary import Prices, Terms

    given = {
        "gpus": gpus, "step_seconds": step_seconds, "drift": drift, "learning_rate": learning_rate, "every": every,
        "hours": hours, "storage_gbps": storage_gbps, "copy_gbps": copy_gbps,
    }  # fmt: skip
    replay.check_numbers(given, above_zero=True)
    limits = Limits(bytes_per_hour, stall_share, max_loss_minutes, exact)
    terms = Terms(tuple(mtbf or ()) or None, restart_seconds, Prices(price_per_gpu_hour, price_per_tb_written))
    replay.check_options(limits, terms, recommend=recommend)
    assumptions = Assumptions.of(model, given)
    between = assumptions.mtbf_hours
    terms = replace(terms, mtbf_hours=terms.mtbf_hours or (between, 4 * between, 16 * between))
    speeds = {"storage_gbps": assumptions.storage_gbps, "copy_gbps": assumptions.copy_gbps}
    found, chosen = simulated(assumed_trace(assumptions), policy or (), terms, limits if recommend else None, speeds)
    replay.answer(found, chosen, plot=plot, as_json=json, assumed=assumptions.told())
