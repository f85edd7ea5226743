"""Hold the parts of a job that all components share. ``attach`` builds one per rank."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from monitor.adapters.base import Adapter
from monitor.adapters.module_tensors import RankBuffers
from monitor.config.load import Config
from monitor.decide.schedule import Schedule
from monitor.distributed import Group
from monitor.events import Listeners
from monitor.ledger import JobFacts, Ledger
from monitor.observe.drift_meter import DriftMeter
from monitor.observe.units import LocalUnit, UnitTable
from monitor.run_state import UserState
from policies.base import Policy
from store.names import Unit


@dataclass(frozen=True)
class JobContext:
    """The shared parts of one rank."""

    config: Config
    policy: Policy
    group: Group
    adapter: Adapter
    table: UnitTable
    meter: DriftMeter
    user: UserState
    pace: Schedule  # when to decide; alike on all ranks
    listeners: Listeners
    observing: bool = False  # measure everything, write nothing
    steps: Callable[[], int] | None = None  # counts optimizer steps if the framework does not
    ledger: Ledger = field(default_factory=Ledger)  # advances on rank 0 only; a resume resets it on all ranks
    began: float = field(default_factory=time.monotonic)
    rank_buffers: RankBuffers = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank_buffers", RankBuffers(self.adapter, self.group))

    def facts(self, store_id: str) -> JobFacts:
        """Return the fields that all manifests of this job have in common."""
        layers, tensors = self.table.layer_records, dict(self.table.tensor_records())
        return JobFacts(store_id, self.adapter.framework, self.policy.name, layers, tensors, self.began)

    def agree(self, local: Mapping[Unit, LocalUnit]) -> None:
        """Update the table to units that changed on any rank, and reset their references. Collective."""
        for unit in self.table.agree(local):
            if unit in local:  # the old reference has other elements; the unit counts as unsaved until the next save
                self.meter.reset(unit, local[unit].tensors)
        self.listeners.on_units_changed(local)

    def completed_steps(self) -> int | None:
        """Return the optimizer steps taken so far, or None if neither the framework nor ``steps`` counts them."""
        counted = self.adapter.completed_steps()
        return self.steps() if counted is None and self.steps is not None else counted
