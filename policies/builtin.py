"""full, parity, filter, threshold, observe; fallback.

Policy ``filter``: the first and the last blocks every time, those between them less often.

From the literature, which finds that the ends of the stack change most. Counted in commits, not in steps.

What stands in for a policy that failed at one decision: everything is saved, and every reason says why.

It goes inside the same bounds and encodings as the policy it stands in for. That costs bytes, never state.

Policy ``full``: every unit, every time. The only one whose resume continues bit for bit.

Policy ``observe``: saves nothing and says what another policy would have saved.

For a trial on a live run before anything is trusted to the product. It goes around everything else, bounds
included: the bounds of an observed policy must not cause a write either.

Policy ``parity``: the layers in k groups, one group at a time; odd and even layers where k is 2.

From the literature (layer-wise merging of checkpoints saved by halves). The turn is counted in commits, not
in steps: a save that failed is repeated with the same group, and a restart goes on where the store stands.

Policy ``threshold``: what has moved far enough.

Drift is relative to what a resume would give back, so one threshold serves layers of any size. Slots differ
in how fast they move by nature (first moments turn over within a few steps), hence a threshold for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from policies.base import Budget, Choice, Decision, History, Policy, UnitStats, compared, worth_saving
from policies.validation import Failure, check_integer, check_number, check_one_of, checked_answer, described
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


@dataclass(frozen=True)
class Threshold:
    """Saves the units whose drift is at least ``threshold``.

    threshold: relative, >= 0; at 0 everything is saved. slots: other thresholds for the slots it names.
    A unit whose drift is not known, or is not a number though its values are finite, is saved.
    """

    threshold: float
    slots: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_number("policy threshold", "threshold", self.threshold)
        if not isinstance(self.slots, Mapping):
            raise ConfigError(
                "policy threshold: slots must map names of slots to thresholds, such as {exp_avg: 0.1}, "
                f"not {described(self.slots)}"
            )
        for slot, limit in self.slots.items():
            if not isinstance(slot, str):
                raise ConfigError(f"policy threshold: slots must have names for keys, not {described(slot)}")
            check_number("policy threshold", f"slots.{slot}", limit)
        object.__setattr__(self, "slots", dict(self.slots))  # a copy: the caller may change theirs

    @property
    def name(self) -> str:
        """``threshold``."""
        return "threshold"

    @property
    def needs_drift(self) -> bool:
        """True."""
        return True

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """The units at or above their threshold."""
        del budget, history
        return Decision({one.unit: self._choice(one) for one in stats})

    def _choice(self, one: UnitStats) -> Choice:
        limit = self.slots.get(one.unit.slot, self.threshold)
        if one.drift is None:
            return Choice(RAW, "no version yet" if one.staleness is None else "drift not measured")
        if math.isnan(one.drift):
            return Choice(RAW, "drift is not a number")
        if one.drift >= limit:
            return Choice(RAW, compared("drift", one.drift, ">=", "threshold", limit))
        return Choice(None, compared("drift", one.drift, "<", "threshold", limit))
