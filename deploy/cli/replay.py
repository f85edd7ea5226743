"""Options, checks and the answer of the commands that replay a run: ``simulate`` and ``estimate``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli import output
from deploy.cli.exit_codes import OK
from store.errors import UsageError

if TYPE_CHECKING:
    from deploy.simulate.recommend import Limits, Recommended
    from deploy.simulate.simulation import Simulation
    from deploy.simulate.summary import Terms

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
StorageOption = Annotated[
    float | None,
    typer.Option(
        "--storage-gbps",
        min=0,
        metavar="GB/S",
        help="10^9 bytes a second that all ranks write together.",
        show_default=False,
    ),
]
CopyOption = Annotated[
    float | None,
    typer.Option(
        "--copy-gbps",
        min=0,
        metavar="GB/S",
        help="10^9 bytes a second that one rank copies while training waits.",
        show_default=False,
    ),
]

_LARGEST = 1e18
"""Of any number given, so that products of two stay finite."""


def check_options(limits: Limits, terms: Terms, *, recommend: bool) -> None:
    """Check the shared options.

    Args:
        limits: of a recommendation.
        terms: failures and prices.
        recommend: whether ``--recommend`` was given.

    Raises:
        UsageError: a number is out of range, or a limit was given without ``--recommend``.
    """
    for hours in terms.mtbf_hours or ():
        check_numbers({"mtbf": hours}, above_zero=True)
    from_zero = {
        "restart_seconds": terms.restart_seconds,
        "price_per_gpu_hour": terms.prices.gpu_hour,
        "price_per_tb_written": terms.prices.tb_written,
        "bytes_per_hour": limits.bytes_per_hour,
        "stall_share": limits.stall_share,
        "max_loss_minutes": limits.max_loss_minutes,
    }
    check_numbers(from_zero, above_zero=False)
    if (limits.any or limits.exact) and not recommend:
        raise UsageError("--bytes-per-hour, --stall-share, --max-loss-minutes and --exact go with --recommend")


def check_numbers(values: Mapping[str, float | None], *, above_zero: bool) -> None:
    """Raise UsageError for an option that is NaN, infinite, too large or negative, or 0 under ``above_zero``."""
    for name, value in values.items():
        if value is not None and not (0 <= value <= _LARGEST and (value > 0 or not above_zero)):
            least = "above 0" if above_zero else "from 0"
            raise UsageError(f"--{name.replace('_', '-')} must be a number {least}, up to {_LARGEST:g}: got {value}")


def answer(
    found: Simulation,
    chosen: Recommended | None,
    *,
    plot: Path | None,
    as_json: bool,
    assumed: Mapping[str, str] | None = None,
) -> None:
    """Print the result and leave. assumed: the assumptions that the run was made from, with their sources."""
    from deploy.cli import simulate_text

    if plot is not None:
        from deploy.simulate.picture import write_picture

        write_picture(found.summaries, plot)
    body = simulate_text.as_json(found, chosen) | ({} if assumed is None else {"assumed": dict(assumed)})
    output.answer(body, lambda console: simulate_text.draw(console, found, chosen, assumed or {}), as_json=as_json)
    raise typer.Exit(OK)
