"""``driftpoint top``: whether a run is safe now, live in a terminal, with the drift of its layers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from deploy.cli import output
from deploy.cli.daemon import base_of
from deploy.cli.options import DebugOption, JsonOption, MemoryOption, StoreArgument
from deploy.cli.report import TraceOption
from store.errors import NothingToResumeError, UsageError

if TYPE_CHECKING:
    from deploy.safety.facts import Facts

OnceOption = Annotated[
    bool, typer.Option("--once", help="Print one frame and leave; as where stdout is no terminal, or a dumb one.")
]
IntervalOption = Annotated[float, typer.Option("--interval", min=0.1, metavar="S", help="Seconds between two looks.")]


def top(
    store: StoreArgument,
    *,
    once: OnceOption = False,
    interval: IntervalOption = 2.0,
    trace: TraceOption = None,
    memory: MemoryOption = Path("/dev/shm"),
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show whether a run is safe now, and age and drift of its layers, live. Ctrl-C ends it."""
    del debug
    from deploy.report.made import trace_path
    from deploy.top.app import FactsReader, run

    if trace is not None and not trace.is_file():
        raise UsageError(f"there is no trace at {trace}: leave --trace away, or name the file of the job")
    reader = FactsReader(store, trace_path(store, trace), base_of(memory))
    facts = reader.read()
    if json or once or not _interactive():
        output.answer(as_json(facts), lambda console: draw(console, facts), as_json=json)
    else:
        facts = run(Console(highlight=False, markup=False, emoji=False), reader, interval) or facts
    raise typer.Exit(NothingToResumeError.exit_code if facts.status is None else facts.status.exit_code)


def _interactive() -> bool:
    """Return whether stdout is a terminal whose screen can be drawn over."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


def as_json(facts: Facts) -> dict[str, Any]:
    """Return the JSON object of the command."""
    from deploy.safety.verdict import judge
    from deploy.top.view import layer_rows, moving_slots

    verdict = judge(facts)
    rows = layer_rows(facts, moving_slots(facts))
    return {
        "level": verdict.level,
        "verdict": verdict.sentence,
        "running": facts.running,
        "checks": [
            {"name": one.name, "level": one.level, "text": one.text, "note": one.note, "todo": one.todo}
            for one in verdict.checks
        ],
        "layers": [
            {
                "layer": row.layer,
                "slots": {
                    name: {"age": slot.age, "drift": slot.drift, "state": slot.state}
                    for name, slot in row.slots.items()
                },
            }
            for row in rows
        ],
    }


def draw(console: Console, facts: Facts) -> None:
    """Print one frame with all layers."""
    from deploy.top.view import Dashboard

    console.print(Dashboard(facts, all_layers=True))
