"""``driftpoint report``: show the safety of a run as an HTML page."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Exit, Option

from deploy import console as output
from deploy.cli.daemon import base_of
from deploy.console import DebugOption, JsonOption, MemoryOption, StoreArgument
from store.errors import UnsupportedError
from store.location import beside

if TYPE_CHECKING:
    from deploy.report.page import ReportResult


def report(
    store: StoreArgument,
    *,
    out: Annotated[Path | None, Option("--out", "-o", metavar="FILE", help="Output file (STORE.report.html).")] = None,
    trace: Annotated[Path | None, Option(metavar="FILE", help="Drift trace of the job (STORE.trace.jsonl).")] = None,
    verify: Annotated[bool, Option("--verify", help="Verify every byte first, like `driftpoint verify`.")] = False,
    memory: MemoryOption = Path("/dev/shm"),
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Write one HTML page: safety of the run, drift and saves per layer, cost, incidents, and the resume point."""
    try:
        from deploy.report.page import build_report
    except ImportError as error:
        text = f"the charts of a report need matplotlib ({error}): run `pip install 'driftpoint[report]'`"
        raise UnsupportedError(text) from error
    made = build_report(store, trace, base_of(memory), verify=verify)
    path = out or beside(store.absolute(), ".report.html")
    made.write(path)
    output.answer(_as_json(made, path), lambda console: _draw(console, made, path), as_json=json)
    raise Exit(made.exit_code)


def _as_json(made: "ReportResult", path: Path) -> dict[str, Any]:
    verdict, history = made.verdict, made.history
    return {
        "out": str(path.absolute()),
        "level": verdict.level,
        "verdict": verdict.sentence,
        "checks": [asdict(check) for check in verdict.checks],
        "decisions": None if history is None else history.totals.decisions,
        "saves": None if history is None else history.totals.saves,
        "bytes_written": None if history is None else history.totals.written,
        "bytes_of_full": None if history is None else history.totals.full,
        "stall_seconds": None if history is None else history.totals.stall,
        "incidents": len(made.incidents),
        "missing": made.missing or None,
    }


def _draw(console: Console, made: "ReportResult", path: Path) -> None:
    verdict = made.verdict
    styles = {"good": "green", "look": "yellow", "bad": "bold red"}
    console.print(output.cell(f"{verdict.title}. {verdict.sentence}", styles[verdict.level]))
    for check in verdict.concerns:
        console.print(output.cell(f" - {check.name}: {check.text}" + (f"; {check.todo}" if check.todo else "")))
    console.print(output.cell(f"Written to {path}"))
    if made.missing:
        console.print(output.cell(f"No history: {made.missing}"))
