"""``driftpoint simulate``: compute bytes, stall and risk of other configurations on a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy import console as output
from deploy.cli import replay
from deploy.console import DebugOption, JsonOption

TraceArgument = Annotated[Path, typer.Argument(metavar="TRACE", help="Drift trace of a job, STORE.trace.jsonl.")]


def simulate(
    trace: TraceArgument,
    *,
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
    """Replay a recorded run under other configurations: bytes, stall, and the cost of a failure."""
    del debug
    with output.stdout_to_stderr():
        from deploy.simulate.simulation import Limits, read_trace, simulated
        from deploy.simulate.summary import Prices, Terms

    speeds = {"storage_gbps": storage_gbps, "copy_gbps": copy_gbps}
    replay.check_numbers(speeds, above_zero=True)
    limits = Limits(bytes_per_hour, stall_share, max_loss_minutes, exact)
    terms = Terms(tuple(mtbf or ()) or None, restart_seconds, Prices(price_per_gpu_hour, price_per_tb_written))
    replay.check_options(limits, terms, recommend=recommend)
    found, chosen = simulated(read_trace(trace), policy or (), terms, limits if recommend else None, speeds)
    replay.answer(found, chosen, plot=plot, as_json=json)
