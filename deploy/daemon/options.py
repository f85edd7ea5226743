"""How a daemon is to run. Validated by whoever makes it: the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from store.metrics_server import LOOPBACK, EndpointSecurity


@dataclass(frozen=True)
class Options:
    """Of ``driftpoint daemon run``. verify_rate: bytes a second, 0: never. exit_idle: seconds without a job after which
    it ends by itself, None: never. grace: seconds for a rescue under way when it is to end. survivors: seconds after a
    death until ranks that still live are named. host, port, security: of its metrics."""

    base: Path
    port: int = 9465
    verify_rate: int = 16 << 20
    exit_idle: float | None = None
    grace: float = 30.0
    survivors: float = 10.0
    host: str = LOOPBACK
    security: EndpointSecurity = field(default_factory=EndpointSecurity)
