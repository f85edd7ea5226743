"""Fresh weights in every save, moments of the layers in turn: a policy that the product does not name yet.

It goes through ``monitor.attach`` by way of a configuration of its own, so that what is measured is the real save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monitor.config.load import Config
from policies.base import Budget, Choice, Decision, History, Policy, UnitStats
from policies.bounds import Bounds, bound
from policies.registry import with_fixed_encoding
from store.names import RAW, WEIGHTS


@dataclass(frozen=True)
class MomentsInTurn:
    """Saves all weights, and the moments of the layers whose position modulo ``k`` is the turn."""

    k: int

    @property
    def name(self) -> str:
        """``moments-in-turn``."""
        return "moments-in-turn"

    @property
    def needs_drift(self) -> bool:
        """False: only positions and commits count."""
        return False

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """The first commit is the full one, so turns are counted from the second."""
        del budget
        turn = (history.commits - 1) % self.k
        return Decision({one.unit: self._choice(one, turn) for one in stats})

    def _choice(self, one: UnitStats, turn: int) -> Choice:
        if one.unit.slot == WEIGHTS:
            return Choice(RAW, "weights are saved every time")
        own = one.position % self.k == turn
        return Choice(RAW, "its turn") if own else Choice(None, "not its turn")


class TurnsConfig(Config):
    """A configuration whose policy is :class:`MomentsInTurn`. turns: its k."""

    turns: int

    def bounded_policy(self) -> Policy:
        """See :class:`monitor.config.load.Config`."""
        bounds = Bounds(precision="any", interval=self.every)
        return with_fixed_encoding(bound(MomentsInTurn(self.turns), bounds), self.encodings(), bounds)
