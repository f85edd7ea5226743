"""``driftpoint doctor``: check the machine, the disk and the store before a job uses them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Argument, Exit, Option

from deploy import console as output
from deploy.console import DebugOption, JsonOption, StorePath
from deploy.exit_codes import OK
from deploy.format import plural
from store.catalog import restore_store_record
from store.errors import DriftpointError
from store.location import files_at, is_url, place_of
from store.storage.bucket import ObjectOptions

if TYPE_CHECKING:
    from deploy.doctor.base import Finding, Plan

CONFIG = Path("driftpoint.yaml")
_PATIENCE = 15.0  # seconds to retry requests to a bucket; short, because a user waits
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_STORE = "Directory (existing or planned), or s3://, az:// or gs:// URL."
_REPAIR = "Restore a lost or damaged STORE.json from the store's other records, then check."


def doctor(
    store: Annotated[StorePath | None, Argument(metavar="[STORE]", parser=place_of, help=_STORE)] = None,
    *,
    config: Annotated[
        Path | None, Option("--config", "-c", metavar="FILE", help="The job's YAML (./driftpoint.yaml if it exists).")
    ] = None,
    parameters: Annotated[str | None, Option(metavar="N", help="Number of model parameters: 350M, 8b.")] = None,
    nodes: Annotated[int, Option(min=1, metavar="N", help="Number of nodes of the job.")] = 1,
    repair: Annotated[bool, Option("--repair", help=_REPAIR)] = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Check this machine, the disk or bucket, and the store, and suggest fixes. All test files are removed."""
    from deploy.doctor.base import Plan, parse_count
    from deploy.doctor.store import known_parameters
    from monitor.config.load import load_config

    settings = load_config(CONFIG if config is None and CONFIG.exists() else config)
    root = store or place_of(settings.store_path).expanduser()
    options = settings.s3.options()
    options = replace(options, retry_seconds=min(options.retry_seconds, _PATIENCE))
    if repair:
        restore_store_record(files_at(root, options))
    count = known_parameters(root, options) if parameters is None else parse_count(parameters)
    plan = Plan(settings, count, nodes)
    with _exit_on_signals():
        findings = list(_findings(root, options, plan))
    healthy = all(one.state != "fail" for one in findings)
    body = {"store": str(root.absolute()), "ok": healthy, "findings": list(map(asdict, findings))}
    output.answer(body, lambda console: _draw(console, root, findings), as_json=json)
    raise Exit(OK if healthy else DriftpointError.exit_code)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Turn termination signals into exceptions, so that test files are removed in any case."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    wanted = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    before = {one: signal.signal(one, leave) for one in wanted}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _draw(console: Console, root: Path, findings: "list[Finding]") -> None:
    rows = output.table(output.line("Check"), output.line(""), output.fold("Result and advice"))
    for one in findings:
        text = output.cell(one.seen)
        if one.todo:
            text = text.copy().append(f"\n-> {output.cell(one.todo).plain}", style="bold")
        rows.add_row(output.cell(one.check), output.cell(one.state, _STYLES[one.state]), text)
    output.spaced(console, rows)
    failed, warned = (sum(one.state == state for one in findings) for state in ("fail", "warn"))
    verdict = f"{plural(failed, 'check')} failed" if failed else "no check failed"
    console.print(output.cell(f"{root.absolute()}: {verdict}" + (f", {plural(warned, 'warning')}" if warned else "")))


def _findings(root: Path, options: ObjectOptions, plan: "Plan") -> "Iterator[Finding]":
    from deploy.doctor.bucket import check_bucket
    from deploy.doctor.disk import check_disk
    from deploy.doctor.machine import check_machine
    from deploy.doctor.store import check_store
    from store.storage.object_store import ObjectFiles

    files = files_at(root, options)
    yield from check_machine(plan)
    tried = list(check_bucket(files, plan) if isinstance(files, ObjectFiles) else check_disk(root, plan))
    yield from tried
    if not is_url(root) or tried[0].state == "ok":
        yield from check_store(root, plan.config.retention_rule(), options)
