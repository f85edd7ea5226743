"""``driftpoint run``: start a training command and restart it after failures."""

import signal
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from deploy.console import DebugOption, StorePath, note
from deploy.supervisor.restart_policy import Limits
from deploy.supervisor.store_probe import StoreProbe
from deploy.supervisor.supervisor import EventLog, RunOptions, Supervisor
from store.errors import UsageError
from store.location import place_of

CONFIG = Path("driftpoint.yaml")
DEFAULT_STORE = "./driftpoint-checkpoints"
DEFAULT_MEMORY = Path("/dev/shm")
_STORE = "The job's store, instead of the YAML's `store:`."


def run(
    command: Annotated[list[str], Argument(metavar="-- COMMAND...", help="The training command and its arguments.")],
    *,
    config: Annotated[
        Path | None, Option("--config", "-c", metavar="FILE", help=f"The job's YAML; {CONFIG} unless --store is given.")
    ] = None,
    store: Annotated[StorePath | None, Option(metavar="STORE", parser=place_of, help=_STORE)] = None,
    max_restarts: Annotated[int, Option(metavar="N", min=0, help="Restarts in a row without progress.")] = 3,
    max_failures: Annotated[int | None, Option(metavar="N", min=1, help="Failures in total (no limit).")] = None,
    backoff: Annotated[float, Option(metavar="S", min=0, help="Seconds before the first restart, then doubled.")] = 2.0,
    backoff_max: Annotated[float, Option(metavar="S", min=0, help="Longest delay before a restart.")] = 300.0,
    grace: Annotated[float, Option(metavar="S", min=0, help="Seconds for the final save before SIGTERM.")] = 30.0,
    wait: Annotated[float, Option(metavar="S", min=0, help="Seconds to wait for a store in use.")] = 0.0,
    events: Annotated[Path | None, Option(metavar="FILE", help="Append events to this file, as JSON lines.")] = None,
    _debug: DebugOption = False,
) -> None:
    """Start a training command and restart it after failures, as long as training progresses."""
    seen, wanted, notice = places(config, store)
    limits = Limits(max_restarts, max_failures, backoff, max(backoff, backoff_max))
    options, log = RunOptions(command, limits, grace, wait, notice), EventLog(note, events, seen.root)
    if wanted is not None:
        from deploy.daemon.server import ensure_daemon

        if (message := ensure_daemon(*wanted)) is not None:
            log.message(message)
    raise Exit(Supervisor(options, seen, log).run())


def places(config: Path | None, store: Path | None) -> tuple[StoreProbe, tuple[Path, list[str]] | None, signal.Signals]:
    """Return the job's store (relative to the working directory), the daemon to start, and the preemption signal.

    The daemon is the directory of its shared memory and its command, None if the job wants none started. Raises
    ConfigError if the configuration is invalid, UsageError if no store was named."""
    if config is None and store is None and not CONFIG.exists():
        raise UsageError(f"no store given, and no {CONFIG} here: give `-c FILE` (the job's YAML) or `--store STORE`")
    if config is None and store is not None:
        seen = StoreProbe(store.expanduser(), DEFAULT_MEMORY)  # of a job that keeps nothing there, nothing is there
        return seen, None, signal.SIGUSR1
    from monitor.config.load import read_config

    found = read_config(config or CONFIG)
    root, base = store or place_of(found.store_path), Path(found.memory.path)
    seen = StoreProbe(root.expanduser(), base if found.memory.enabled else None, options=found.s3.options())
    starts = found.daemon.enabled and found.daemon.start
    wanted = (base, found.daemon.command(base, found.metrics.security())) if starts else None
    signals = [signal.Signals[name] for name in found.preemption.signals]
    return seen, wanted, signals[0] if signals else signal.SIGUSR1
