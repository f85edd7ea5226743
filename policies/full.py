"""Policy ``full``: every unit, every time. The only one whose resume continues bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.base import Budget, Choice, Decision, History, UnitStats
from store.names import RAW


@dataclass(frozen=True)
class Full:
    """Saves every unit raw."""

    @property
    def name(self) -> str:
        """``full``."""
        return "full"

    @property
    def needs_drift(self) -> bool:
        """False: what moved how far changes nothing."""
        return False

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """Everything is saved."""
        del budget, history
        return Decision({one.unit: Choice(RAW, "everything is saved every time") for one in stats})
