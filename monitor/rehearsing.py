"""The policy is rehearsed on the job's own layers before any store is touched. Collective; rank 0 asks it.

It knows the units that exist now: slots that an optimizer makes at its first step are not among them.
"""

from __future__ import annotations

from monitor.agree import on_first
from monitor.job import Job
from monitor.ledger import Ledger
from monitor.measuring import unit_stats
from monitor.units import UnitTable
from policies.rehearsal import rehearse


def rehearse_policy(job: Job) -> None:
    """Raises ConfigError, on all ranks, where the policy fails on what this job is going to show it."""
    table = UnitTable(job.adapter, job.table.layers, job.group)  # the job's own learns its units at the first decision
    table.agree(table.local())

    def rehearsed() -> None:
        measured = job.policy.needs_drift or job.observing
        rehearse(job.policy, unit_stats(table, Ledger(), 0, {}), measured=measured, limited=job.config.budget.limited)

    on_first(job.group, rehearsed)
