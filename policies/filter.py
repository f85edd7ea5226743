"""Policy ``filter``: the first and the last blocks every time, those between them less often.

From the literature, which finds that the ends of the stack change most. Counted in commits, not in steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from policies.base import Budget, Choice, Decision, History, UnitStats
from policies.health import worth_saving
from policies.setting import check_integer, check_one_of
from store.errors import ConfigError
from store.names import RAW, Unit


@dataclass(frozen=True)
class Filter:
    """Saves the first ``n`` and the last ``n`` blocks every time, the other blocks every ``m``-th commit.

    n: how many blocks at each end, >= 0. m: commits between two saves of the others, >= 1.
    auxiliary: when layers that are no blocks (embeddings, final norm, head) are saved: ``always``, or at the
    ``interval`` of the others.

    Where none of the layers of every time can be saved (frozen, not finite), the others are saved every time:
    otherwise a decision would save nothing, no commit would come of it, and the m-th would never be reached.
    """

    n: int = 2
    m: int = 5
    auxiliary: Literal["always", "interval"] = "always"

    def __post_init__(self) -> None:
        check_integer("policy filter", "n", self.n, least=0)
        check_integer("policy filter", "m", self.m, least=1)
        check_one_of("policy filter", "auxiliary", self.auxiliary, ("always", "interval"))
        if self.n == 0 and self.auxiliary == "interval" and self.m > 1:
            raise ConfigError(
                "policy filter: with n 0 and auxiliary 'interval' nothing is left to save between the "
                "intervals; set n >= 1 or auxiliary 'always', or use policy full and save less often"
            )

    @property
    def name(self) -> str:
        """``filter``."""
        return "filter"

    @property
    def needs_drift(self) -> bool:
        """False: only positions and commits count."""
        return False

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """The layers of every time, and at every m-th commit the others."""
        del budget
        always = self._always(stats)
        others = self._others(alone=worth_saving(stats).isdisjoint(always), commits=history.commits)
        return Decision({one.unit: Choice(RAW, always[one.unit]) if one.unit in always else others for one in stats})

    def _always(self, stats: Sequence[UnitStats]) -> Mapping[Unit, str]:
        blocks = sorted({one.position for one in stats if one.block})
        first, last = set(blocks[: self.n]), set(blocks[max(0, len(blocks) - self.n) :])
        found: dict[Unit, str] = {}
        for one in stats:
            if not one.block and self.auxiliary == "always":
                found[one.unit] = "not a block: saved every time"
            elif one.block and one.position in first:
                found[one.unit] = f"among the first {self.n} blocks: saved every time"
            elif one.block and one.position in last:
                found[one.unit] = f"among the last {self.n} blocks: saved every time"
        return found

    def _others(self, alone: bool, commits: int) -> Choice:
        if commits % self.m == 0:
            return Choice(RAW, f"due: {commits} commits so far, a multiple of m {self.m}")
        if alone:
            return Choice(RAW, "none of the layers that are saved every time can be saved")
        return Choice(None, f"not due: {commits} commits so far, not a multiple of m {self.m}")
