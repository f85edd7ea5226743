"""A configuration whose budget counts optimizer steps instead of seconds: what a benchmark spends must not depend on
how fast the machine is.

The only place in the benchmarks that knows how a budget gets its clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from monitor.config.load import Config
from monitor.config.schema import BudgetSettings
from policies.accounting import Account


class SteppedBudget(BudgetSettings):
    """A second is a step, by ``steps``; bytes_per_hour are those of 3600 steps."""

    steps: Callable[[], float]

    def account(self, clock: Callable[[], float] = time.monotonic) -> Account:
        """See :class:`monitor.config.schema.BudgetSettings`; the clock given is not looked at."""
        del clock
        return super().account(self.steps)


class SteppedConfig(Config):
    """With a :class:`SteppedBudget`."""

    budget: SteppedBudget


def per_step(nbytes: float, steps: Callable[[], float], gather: float) -> dict[str, object]:
    """The setting ``budget``: bytes a step, of which those of ``gather`` steps may gather."""
    return {"bytes_per_hour": nbytes * 3600, "burst_seconds": gather, "steps": steps}
