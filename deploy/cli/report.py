"""``driftpoint report``: one HTML page that says whether a run is safe now, and what became of it so far."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from deploy.cli import output
from deploy.cli.daemon import base_of
from deploy.cli.options import DebugOption, JsonOption, MemoryOption, StoreArgument
from store.place import beside

if TYPE_CHECKING:
    from deploy.report.made import Made

OutOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="Where to write it (STORE.report.html).", show_default=False),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="FILE", help="The job's drift trace, if not at STORE.trace.jsonl.", show_default=False
    ),
]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Read every byte first, as `driftpoint verify` does.")]


def report(
    store: StoreArgument,
    *,
    out: OutOption = None,
    trace: TraceOption = None,
    verify: VerifyOption = False,
    memory: MemoryOption = Path("/dev/shm"),
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write one HTML page: is the run safe now, drift and saves of each layer, cost, incidents, what a resume gives."""
    del debug
    from deploy.report.made import make

    made = make(store, trace, base_of(memory), verify=verify)
    path = out or beside(store.absolute(), ".report.html")
    made.write(path)
    output.answer(as_json(made, path), lambda console: draw(console, made, path), as_json=json)
    raise typer.Exit(made.exit_code)


def as_json(made: Made, path: Path) -> dict[str, Any]:
    """The JSON object of the command."""
    verdict, history = made.content.verdict, made.content.history
    return {
        "out": str(path.absolute()),
        "level": verdict.level,
        "verdict": verdict.sentence,
        "checks": [
            {"name": one.name, "level": one.level, "text": one.text, "note": one.note, "todo": one.todo}
            for one in verdict.checks
        ],
        "decisions": None if history is None else history.totals.decisions,
        "saves": None if history is None else history.totals.saves,
        "bytes_written": None if history is None else history.totals.written,
        "bytes_of_full": None if history is None else history.totals.full,
        "stall_seconds": None if history is None else history.totals.stall,
        "incidents": len(made.content.incidents),
        "missing": made.content.missing or None,
    }


def draw(console: Console, made: Made, path: Path) -> None:
    """The text of the command."""
    verdict = made.content.verdict
    styles = {"good": "green", "look": "yellow", "bad": "bold red"}
    console.print(output.cell(f"{verdict.title}. {verdict.sentence}", styles[verdict.level]))
    for check in verdict.concerns:
        console.print(output.cell(f" - {check.name}: {check.text}" + (f"; {check.todo}" if check.todo else "")))
    console.print(output.cell(f"Written: {path}"))
    if made.content.missing:
        console.print(output.cell(f"Without history: {made.content.missing}"))
