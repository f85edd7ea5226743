"""Policy ``observe``: saves nothing and says what another policy would have saved.

For a trial on a live run before anything is trusted to the product. It goes around everything else, bounds
included: the bounds of an observed policy must not cause a write either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from policies.answer import checked_answer
from policies.base import Budget, Choice, Decision, History, Policy, UnitStats
from policies.full import Full
from store.errors import ConfigError


@dataclass(frozen=True)
class Observe:
    """Skips every unit; the reason says what ``inner`` would have done with it.

    writes_nothing: marks the policy for its caller, who must then commit nothing at all.
    """

    inner: Policy = field(default_factory=Full)

    writes_nothing: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.inner, Observe):
            raise ConfigError("policy observe: inner must be a policy that saves, not observe again")

    @property
    def name(self) -> str:
        """``observe``."""
        return "observe"

    @property
    def needs_drift(self) -> bool:
        """As the inner policy."""
        return self.inner.needs_drift

    def would(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """What the inner policy decides: for logs, metrics and estimates of what would be written."""
        return self.inner.select(stats, budget, history)

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """Nothing is saved."""
        would = checked_answer(self.inner.name, stats, self.would(stats, budget, history), refusal=None)
        return Decision({one.unit: self._skip(would.choices[one.unit]) for one in stats})

    def _skip(self, choice: Choice) -> Choice:
        act = "save" if choice.saved else "skip"
        return Choice(None, f"observe: {self.inner.name} would {act} it ({choice.reason})")


def writes_nothing(policy: Policy) -> bool:
    """Whether the caller must commit nothing under this policy."""
    return getattr(policy, "writes_nothing", False) is True
