"""``driftpoint daemon``: run, query and stop the node daemon."""

import logging
import os
from datetime import datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import to_builtins
from rich.console import Console
from rich.text import Text
from typer import Option, Typer

from deploy import console as output
from deploy.console import DebugOption, JsonOption, MemoryOption
from deploy.daemon.node import Options
from deploy.exit_codes import EPILOG
from deploy.format import plural
from store import daemon_protocol as protocol
from store.errors import DaemonError, system_errors
from store.memory.layout import make_home
from store.metrics_server import EndpointSecurity, Tls

app = Typer(epilog=EPILOG, no_args_is_help=False, help="Run, query and stop the daemon of this node.")
_PATIENCE = 10.0  # seconds to wait for the daemon's answer
_LOG_BYTES = 1 << 20
_DEFAULT = Options(Path())
_Answer = TypeVar("_Answer", protocol.Report, protocol.ShuttingDown)


@app.command(epilog=EPILOG)
def run(
    *,
    memory: MemoryOption = Path("/dev/shm"),
    port: Annotated[
        int, Option(min=0, max=65535, metavar="N", help="Port of the metrics; 0 picks a free one.")
    ] = _DEFAULT.port,
    exit_idle: Annotated[
        float | None, Option(min=0.0, metavar="SECONDS", help="Exit after this time without a job.")
    ] = None,
    grace: Annotated[
        float, Option(min=0.0, metavar="SECONDS", help="Time to finish a rescue in progress on exit.")
    ] = _DEFAULT.grace,
    log: Annotated[Path | None, Option(metavar="FILE", help="Write the log here instead of stderr.")] = None,
    host: Annotated[
        str, Option(metavar="ADDRESS", help="Address of the metrics; all but loopback need TLS or --insecure.")
    ] = _DEFAULT.host,
    tls_cert: Annotated[Path | None, Option(metavar="FILE", help="TLS certificate of the metrics.")] = None,
    tls_key: Annotated[Path | None, Option(metavar="FILE", help="Private key of the certificate.")] = None,
    tls_client_ca: Annotated[Path | None, Option(metavar="FILE", help="CA of client certificates to require.")] = None,
    insecure: Annotated[bool, Option("--insecure", help="Let other machines read the metrics without TLS.")] = False,
    _debug: DebugOption = False,
) -> None:
    """Watch the jobs of this node, and commit the in-memory snapshots that they leave when they die."""
    from deploy.daemon.server import Daemon

    base = base_of(memory)
    make_home(base)
    tls = Tls(cert=_absolute(tls_cert), key=_absolute(tls_key), client_ca=_absolute(tls_client_ca))
    security = EndpointSecurity(tls=tls, insecure=insecure)
    security.check(host, "--host")
    options = Options(base, port, exit_idle, grace, host=host, security=security)
    with system_errors("write", f"the log {log}"):
        handler = logging.StreamHandler() if log is None else RotatingFileHandler(log, "a", _LOG_BYTES, 1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("driftpoint")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    os.chdir("/")
    Daemon(options).run()


@app.command(epilog=EPILOG)
def status(*, memory: MemoryOption = Path("/dev/shm"), json: JsonOption = False, _debug: DebugOption = False) -> None:
    """Show the jobs that the node daemon watches, and its rescues."""
    found = _answer(base_of(memory), protocol.AskStatus(), protocol.Report)
    output.answer(to_builtins(found), lambda console: _draw(console, found), as_json=json)


@app.command(epilog=EPILOG)
def stop(*, memory: MemoryOption = Path("/dev/shm"), json: JsonOption = False, _debug: DebugOption = False) -> None:
    """Stop the node daemon after the rescue in progress. Running jobs continue and do not start another one."""
    found = _answer(base_of(memory), protocol.AskStop(), protocol.ShuttingDown)
    output.answer({"pid": found.pid}, lambda console: console.print(f"Stopping process {found.pid}."), as_json=json)


def _draw(console: Console, report: protocol.Report) -> None:
    facts: dict[str, Text | str] = {
        "Daemon": f"process {report.pid}, since {report.started}",
        "Memory": report.base,
        "Metrics": report.url or "none: see the daemon's log",
        "Jobs": str(len(report.jobs)),
    }
    if report.refused:
        facts["Refused"] = plural(report.refused, "connection")
    console.print(output.facts(facts))
    if report.jobs:
        console.print()
        jobs = output.table(*map(output.fold, ("store", "state", "alive", "committed", "in memory")))
        for one in report.jobs:
            alive = f"{len(one.alive)} of {one.world_size}"
            jobs.add_row(*map(output.cell, (one.store, one.state, alive, one.committed or "-", one.memory or "-")))
        console.print(jobs)
    if report.rescues:
        console.print()
        rescues = output.table(*map(output.fold, ("rescue of", "at", "outcome", "why")))
        for done in reversed(report.rescues):
            at = datetime.fromtimestamp(done.at).astimezone().isoformat(timespec="seconds")
            rescues.add_row(*map(output.cell, (done.store, at, done.outcome, done.why)))
        console.print(rescues)


def _answer(base: Path, question: protocol.AskStatus | protocol.AskStop, kind: type[_Answer]) -> _Answer:
    found = protocol.query_daemon(base, question, _PATIENCE)
    if isinstance(found, protocol.Refused):
        raise DaemonError(f"the daemon refused: {found.why}")
    if not isinstance(found, kind):
        raise DaemonError(f"the daemon answered {type(found).__name__} to {type(question).__name__}")
    return found


def base_of(memory: Path) -> Path:
    """Return the absolute path of shared memory."""
    return Path(os.path.abspath(memory.expanduser()))  # noqa: PTH100 - links stay as they are named


def _absolute(path: Path | None) -> str | None:
    """Make a path absolute, because the daemon changes its working directory."""
    return None if path is None else str(base_of(path))
