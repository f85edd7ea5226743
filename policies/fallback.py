"""What stands in for a policy that failed at one decision: everything is saved, and every reason says why.

It goes inside the same bounds and encodings as the policy it stands in for. That costs bytes, never state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.base import Budget, Choice, Decision, History, UnitStats
from policies.failure import Failure
from store.names import RAW


@dataclass(frozen=True)
class Fallback:
    """Saves every unit. name: of the policy that failed."""

    name: str
    failure: Failure

    needs_drift: bool = False

    @property
    def told(self) -> str:
        """``policy mine raised ValueError('x')``."""
        return f"policy {self.name} {self.failure.what}"

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """Everything is saved."""
        del budget, history
        return Decision({one.unit: Choice(RAW, f"{self.told}: saved as under full") for one in stats})

    def named(self, decision: Decision) -> Decision:
        """The decision with the failure in the reasons that bounds gave, too."""
        return Decision(
            {
                unit: choice if choice.reason.startswith(self.told) else self._named(choice)
                for unit, choice in decision.choices.items()
            }
        )

    def _named(self, choice: Choice) -> Choice:
        return Choice(choice.encoding, f"{choice.reason} ({self.told})")
