"""What every part of one job shares, made once by ``attach``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from monitor.adapters.base import Adapter
from monitor.config import Config
from monitor.daemon_link import DaemonLink
from monitor.drift.base import DriftMeter
from monitor.group import Group
from monitor.ledger import Ledger
from monitor.metrics import Metrics
from monitor.pacing import Pace
from monitor.run_state import UserState
from monitor.spending import Spending
from monitor.tracing import Tracer
from monitor.units import UnitTable
from policies.base import Policy
from policies.urgent import Writing


@dataclass(frozen=True)
class Job:
    """The parts of one rank. ``ledger`` is kept on rank 0 (and after a resume stands alike everywhere), and so is
    ``spending``; ``pace`` says on every rank when to decide.

    observing: nothing is written, everything is measured. steps: counts where the framework does not. writing: how
    long units took to become durable, on rank 0."""

    config: Config
    policy: Policy
    group: Group
    adapter: Adapter
    table: UnitTable
    meter: DriftMeter
    user: UserState
    metrics: Metrics
    spending: Spending
    tracer: Tracer
    pace: Pace
    daemon: DaemonLink
    observing: bool = False
    steps: Callable[[], int] | None = None
    ledger: Ledger = field(default_factory=Ledger)
    writing: Writing = field(default_factory=Writing)

    def completed_steps(self) -> int | None:
        """Optimizer steps taken so far, or None where nobody counts them."""
        counted = self.adapter.completed_steps()
        return self.steps() if counted is None and self.steps is not None else counted
