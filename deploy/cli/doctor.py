"""``driftpoint doctor``: check this machine, its disk and the store before a job does, and say what to do."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from deploy.cli import output
from deploy.cli.exit_codes import OK
from deploy.cli.options import DebugOption, JsonOption, StorePath
from deploy.cli.text import plural
from store.errors import DriftpointError, UsageError
from store.place import is_url, place_of

if TYPE_CHECKING:
    from deploy.doctor.finding import Finding
    from deploy.doctor.nodes import Ranks
    from deploy.doctor.plan import Plan
    from monitor.config import Config

CONFIG = Path("driftpoint.yaml")

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}

StoreArgument = Annotated[
    StorePath | None,
    typer.Argument(metavar="[STORE]", parser=place_of, help="Directory of the store, or to be.", show_default=False),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help="The job's YAML; driftpoint.yaml where there is one.", show_default=False
    ),
]
ParametersOption = Annotated[
    str | None,
    typer.Option("--parameters", metavar="N", help="Size of the model: 350M, 8b.", show_default=False),
]
NodesOption = Annotated[int, typer.Option("--nodes", min=1, metavar="N", help="Nodes that the job runs on.")]
PatienceOption = Annotated[
    float,
    typer.Option("--patience", min=0.1, metavar="SECONDS", help="To wait for other ranks, under torchrun or srun."),
]


def doctor(
    store: StoreArgument = None,
    *,
    config: ConfigOption = None,
    parameters: ParametersOption = None,
    nodes: NodesOption = 1,
    patience: PatienceOption = 30.0,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check this machine, the disk and the store, and say what to do. Leaves nothing behind."""
    del debug
    from deploy.doctor.finding import healthy
    from deploy.doctor.held import known_parameters
    from deploy.doctor.nodes import launched
    from deploy.doctor.plan import Plan, parsed_count

    ranks, settings = launched(os.environ), _settings(config)
    root = store or place_of(settings.store).expanduser()
    if is_url(root):
        raise UsageError(
            f"{root} is no directory, and doctor looks at those only. What a bucket must do, a job tries when it "
            "attaches; see docs/object-stores.md"
        )
    count = known_parameters(root) if parameters is None else parsed_count(parameters)
    plan = Plan(settings, count, nodes)
    with _tidy():
        findings = list(_findings(root, plan, ranks, patience))
    if ranks.first:
        body = as_json(root, findings)
        output.answer(body, lambda console: draw(console, root, findings), as_json=json)
    raise typer.Exit(OK if healthy(findings) else DriftpointError.exit_code)


@contextmanager
def _tidy() -> Iterator[None]:
    """Where this is ended, or its terminal is closed, what it made is taken away all the same."""

    def leave(number: int, frame: object) -> None:
        del frame
        raise SystemExit(128 + number)

    wanted = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    before = {one: signal.signal(one, leave) for one in wanted}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def as_json(root: Path, findings: list[Finding]) -> dict[str, Any]:
    """The JSON object of the command."""
    from deploy.doctor.finding import healthy

    rows = [{"check": one.check, "state": one.state, "seen": one.seen, "todo": one.todo} for one in findings]
    return {"store": str(root.absolute()), "ok": healthy(findings), "findings": rows}


def draw(console: Console, root: Path, findings: list[Finding]) -> None:
    """The text of the command."""
    rows = output.table()
    rows.add_column("Check", no_wrap=True)
    rows.add_column("", no_wrap=True)
    rows.add_column("Seen, and what to do", overflow="fold")
    for one in findings:
        text = output.cell(one.seen)
        if one.todo:
            text = text.copy().append(f"\n-> {output.cell(one.todo).plain}", style="bold")
        rows.add_row(output.cell(one.check), output.cell(one.state, _STYLES[one.state]), text)
    console.print(rows)
    console.print()
    failed, warned = (sum(one.state == state for one in findings) for state in ("fail", "warn"))
    verdict = f"{plural(failed, 'check')} failed" if failed else "nothing in the way"
    console.print(output.cell(f"{root.absolute()}: {verdict}" + (f", {plural(warned, 'warning')}" if warned else "")))


def _settings(path: Path | None) -> Config:
    from monitor.config import load_config

    if path is None and CONFIG.exists():
        path = CONFIG
    return load_config(path)


def _findings(root: Path, plan: Plan, ranks: Ranks, patience: float) -> Iterator[Finding]:
    from deploy.doctor.disk import look_at_disk
    from deploy.doctor.held import look_at_store
    from deploy.doctor.machine import look_at_machine
    from deploy.doctor.nodes import meet

    met = meet(root, ranks, patience)
    if ranks.first:
        yield from look_at_machine(plan)
        yield from look_at_disk(root, plan)
        yield from look_at_store(root, plan.config.retention_rule())
    if met is not None:
        yield met
