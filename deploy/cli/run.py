"""``driftpoint run``: start a training command and restart it after failures."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from deploy.console import DebugOption, StorePath, note
from deploy.supervisor.events import EventLog
from deploy.supervisor.restart_policy import Limits
from deploy.supervisor.store_probe import StoreProbe
from deploy.supervisor.supervisor import RunOptions, Supervisor
from store.config_file import read_yaml
from store.errors import ConfigError, UsageError
from store.location import place_of
from store.metrics_server import LOOPBACK, EndpointSecurity
from store.storage.bucket import ObjectOptions

CONFIG = Path("driftpoint.yaml")
DEFAULT_STORE = "./driftpoint-checkpoints"
DEFAULT_MEMORY = Path("/dev/shm")
DEFAULT_DAEMON_PORT = 9465
DEFAULT_EXIT_IDLE = 3600.0
"""Same as in :class:`monitor.config.load.Config`, whose import would load torch into this long-lived process."""


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The training command and its arguments.")
    ],
    *,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help=f"The job's YAML; {CONFIG} unless --store is given."),
    ] = None,
    store: Annotated[
        StorePath | None,
        typer.Option(metavar="STORE", parser=place_of, help="The job's store, instead of the YAML's `store:`."),
    ] = None,
    max_restarts: Annotated[int, typer.Option(metavar="N", min=0, help="Restarts in a row without progress.")] = 3,
    max_failures: Annotated[int | None, typer.Option(metavar="N", min=1, help="Failures in total (no limit).")] = None,
    backoff: Annotated[
        float, typer.Option(metavar="S", min=0, help="Seconds before the first restart, doubled each time.")
    ] = 2.0,
    backoff_max: Annotated[float, typer.Option(metavar="S", min=0, help="Longest delay before a restart.")] = 300.0,
    grace: Annotated[
        float, typer.Option(metavar="S", min=0, help="Seconds for the final save before SIGTERM is sent.")
    ] = 30.0,
    wait: Annotated[float, typer.Option(metavar="S", min=0, help="Seconds to wait for a store in use.")] = 0.0,
    events: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append each event to this file as a JSON line.")
    ] = None,
    _debug: DebugOption = False,
) -> None:
    """Start a training command and restart it after failures, as long as training progresses."""
    seen, wanted, notice = places(config, store)
    limits = Limits(max_restarts, max_failures, backoff, max(backoff, backoff_max))
    options, log = RunOptions(command, limits, grace, wait, notice), EventLog(note, events, seen.root)
    if wanted is not None:
        from deploy.daemon.server import ensure_daemon

        message = ensure_daemon(wanted.base, wanted.port, wanted.exit_idle, wanted.words)
        if message is not None:
            log.message(message)
    raise typer.Exit(Supervisor(options, seen, log).run())


@dataclass(frozen=True)
class WantedDaemon:
    """The daemon that the configuration asks for."""

    base: Path
    port: int
    exit_idle: float
    words: tuple[str, ...] = ()


def places(config: Path | None, store: Path | None) -> tuple[StoreProbe, WantedDaemon | None, signal.Signals]:
    """Return the job's store (relative to the working directory), the daemon to start, and the preemption signal.

    Reads only ``store:``, ``s3:``, ``memory:``, ``daemon:``, ``preemption:`` and ``metrics:``; the trainer checks the
    rest. Raises ConfigError if one of these sections is invalid, UsageError if no store was named."""
    if config is None and store is None and not CONFIG.exists():
        raise UsageError(
            f"no store given, and there is no {CONFIG} here: give `-c FILE` (the job's YAML) or `--store STORE`"
        )
    if config is None and store is not None:
        seen = StoreProbe(store.expanduser(), DEFAULT_MEMORY)  # of a job that keeps nothing there, nothing is there
        return seen, None, signal.SIGUSR1
    path = config or CONFIG
    content = read_yaml(path).values
    root, memory = content.get("store", DEFAULT_STORE), content.get("memory", {})
    root = root.get("path") if isinstance(root, dict) else root
    if not isinstance(root, str) or not root:
        raise ConfigError(f"{path}: store: must be a path, or {{path: DIR, create: false}}, not {content['store']!r}")
    if not isinstance(memory, dict) or not isinstance(memory.get("path", ""), str):
        raise ConfigError(f"{path}: memory: must be a section such as `memory: {{enabled: true}}`, not {memory!r}")
    base = Path(memory.get("path", DEFAULT_MEMORY))
    kept = base if memory.get("enabled") else None
    seen = StoreProbe((store or place_of(root)).expanduser(), kept, options=_options(path, content.get("s3", {})))
    return seen, _wanted(path, content, base), _notice(path, content.get("preemption", {}))


def _security(path: Path, section: object) -> EndpointSecurity:
    """Return the TLS settings of ``metrics:``, for the daemon; the trainer checks the keys that are not read here."""
    if not isinstance(section, dict) or not isinstance(section.get("host", ""), str):
        raise ConfigError(f"{path}: metrics: must be a section such as `metrics: {{port: 9464}}`, not {section!r}")
    if "basic_auth" in section:
        raise ConfigError(
            f"{path}: metrics.basic_auth: there is no login any more: require client certificates, tls.client_ca"
        )
    try:
        security = EndpointSecurity.model_validate({key: section[key] for key in ("tls", "insecure") if key in section})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: metrics.{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from error
    security.check(section.get("host", LOOPBACK) if section.get("enabled", True) else LOOPBACK, "metrics.host")
    return security


def _notice(path: Path, section: object) -> signal.Signals:
    """Return the first preemption signal that the trainer handles, SIGUSR1 by default."""
    names = section.get("signals", []) if isinstance(section, dict) else None
    if not isinstance(names, list) or any(name not in signal.Signals.__members__ for name in names):
        raise ConfigError(
            f"{path}: preemption: must be a section such as `preemption: {{signals: [SIGUSR1]}}`, not {section!r}"
        )
    return signal.Signals[names[0]] if names else signal.SIGUSR1


def _options(path: Path, section: object) -> ObjectOptions:
    try:
        return ObjectOptions(**section)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"{path}: s3: must be a section such as `s3: {{region: eu-west-1}}`: {error}") from error


def _wanted(path: Path, content: Mapping[str, Any], base: Path) -> WantedDaemon | None:
    section, security = content.get("daemon", {}), _security(path, content.get("metrics", {}))
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: daemon: must be a section such as `daemon: {{enabled: true}}`, not {section!r}")
    if not (section.get("enabled") and section.get("start", True)):
        return None
    port, idle = section.get("port", DEFAULT_DAEMON_PORT), section.get("exit_idle_seconds", DEFAULT_EXIT_IDLE)
    if not isinstance(port, int) or not isinstance(idle, int | float):
        raise ConfigError(f"{path}: daemon: port and exit_idle_seconds must be numbers")
    host = section.get("host", LOOPBACK)
    if not isinstance(host, str):
        raise ConfigError(f"{path}: daemon: host must be an address, not {host!r}")
    security.check(host, "daemon.host")
    return WantedDaemon(base, port, float(idle), ("--host", host, *security.cli_options()))
