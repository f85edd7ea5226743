"""The edge to the policy in mid-run: where it fails, this decision saves everything, and training goes on.

Rank 0 only. The next decision asks the policy again. It does not know what a decision is for; a policy that never comes
back stops the job, as any code in the training loop would.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from monitor.config import Config
from monitor.events import Listeners
from policies.base import Budget, Decision, History, Policy, UnitStats
from policies.failure import Failure, failure_of
from policies.fallback import Fallback

_log = logging.getLogger("driftpoint")

_MOST_TOLD = 100
"""Distinct errors that are logged; beyond them the metric counts on."""


class Guard:
    """Asks the policy of a job, and stands in for it where it raises or breaks its contract."""

    def __init__(self, policy: Policy, config: Config, listeners: Listeners) -> None:
        self._policy = policy
        self._config = config
        self._listeners = listeners
        self._told: set[str] = set()

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """The policy's decision. Where it fails: everything, inside the job's bounds and in its encodings."""
        try:
            return self._policy.select(stats, budget, history)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the edge to the user's own code
            failure = failure_of(error)
            self._listeners.on_policy_failed(error)
            self._tell(failure, error, history.step)
        fallback = Fallback(self._policy.name, failure)
        return fallback.named(self._config.in_bounds(fallback).select(stats, budget, history))

    def _tell(self, failure: Failure, error: BaseException, step: int) -> None:
        if failure.kind in self._told or len(self._told) >= _MOST_TOLD:
            return
        self._told.add(failure.kind)
        _log.error(
            "policy %s %s at step %d: everything is saved at this decision, as under full, and whenever it fails again "
            "(this error is not logged again; driftpoint_policy_failures_total counts on)",
            self._policy.name,
            failure.what,
            step,
            exc_info=error,
        )
