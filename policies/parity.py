"""Policy ``parity``: the layers in k groups, one group at a time; odd and even layers where k is 2.

From the literature (layer-wise merging of checkpoints saved by halves). The turn is counted in commits, not
in steps: a save that failed is repeated with the same group, and a restart goes on where the store stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.base import Budget, Choice, Decision, History, UnitStats
from policies.health import worth_saving
from policies.setting import check_integer
from store.names import RAW


@dataclass(frozen=True)
class Parity:
    """Saves the layers whose position modulo ``k`` equals the turn.

    k: number of groups, >= 2. Every unit that can be saved is saved at least once in any k commits.

    The first commit is the full one, so the turn is ``(commits - 1) mod k``. A group in which nothing can be
    saved (frozen, not finite, or no layer at all) hands its turn on to the next group: otherwise a decision
    would save nothing, no commit would come of it, and the turn would never pass.
    """

    k: int = 2

    def __post_init__(self) -> None:
        check_integer("policy parity", "k", self.k, least=2)

    @property
    def name(self) -> str:
        """``parity``."""
        return "parity"

    @property
    def needs_drift(self) -> bool:
        """False: only positions and commits count."""
        return False

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """The group whose turn it is."""
        del budget
        group = self._group(stats, history)
        return Decision({one.unit: self._choice(one, group) for one in stats})

    def _group(self, stats: Sequence[UnitStats], history: History) -> int:
        worth = worth_saving(stats)
        occupied = {one.position % self.k for one in stats if one.unit in worth}
        turn = (history.commits - 1) % self.k
        order = ((turn + ahead) % self.k for ahead in range(self.k))
        return next((group for group in order if group in occupied), turn)

    def _choice(self, one: UnitStats, group: int) -> Choice:
        own = one.position % self.k
        place = f"position {one.position} is in group {own} of {self.k}"
        if own == group:
            return Choice(RAW, f"{place}, whose turn it is")
        return Choice(None, f"{place}; it is the turn of group {group}")
