"""What every part of one job shares, made once by ``attach``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from monitor.adapters.base import Adapter
from monitor.config.load import Config
from monitor.decide.schedule import Schedule
from monitor.distributed import Group
from monitor.events import Listeners
from monitor.ledger import Ledger
from monitor.observe.drift_meter import DriftMeter
from monitor.observe.units import UnitTable
from monitor.run_state import UserState
from policies.base import Policy


@dataclass(frozen=True)
class JobContext:
    """The parts of one rank. ``ledger`` is kept on rank 0 (and after a resume stands alike everywhere).

    pace: says on every rank when to decide. listeners: what follows the job, see :mod:`monitor.events`.

    observing: nothing is written, everything is measured. steps: counts where the framework does not."""

    config: Config
    policy: Policy
    group: Group
    adapter: Adapter
    table: UnitTable
    meter: DriftMeter
    user: UserState
    pace: Schedule
    listeners: Listeners
    observing: bool = False
    steps: Callable[[], int] | None = None
    ledger: Ledger = field(default_factory=Ledger)

    def completed_steps(self) -> int | None:
        """Optimizer steps taken so far, or None where nobody counts them."""
        counted = self.adapter.completed_steps()
        return self.steps() if counted is None and self.steps is not None else counted
