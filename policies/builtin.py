"""Implement the built-in policies full, parity, filter, threshold and observe, and the fallback for a failed policy."""

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
    """Policy ``filter``: saves the first and last ``n`` blocks every time, the other blocks at every ``m``-th commit.

    From the literature, by which the ends of the stack change most. If none of the layers saved every time can be saved
    (frozen, not finite), the others are.

    ``auxiliary``: when to save layers that are no blocks (embeddings, final norm, head): ``always``, or at the
    ``interval`` of the other blocks."""

    n: int = 2  # blocks at each end, >= 0
    m: int = 5  # commits between two saves of the other blocks, >= 1
    auxiliary: Literal["always", "interval"] = "always"

    name: ClassVar[str] = "filter"
    needs_drift: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_integer("policy filter", "n", self.n, least=0)
        check_integer("policy filter", "m", self.m, least=1)
        check_one_of("policy filter", "auxiliary", self.auxiliary, ("always", "interval"))
        if self.n == 0 and self.auxiliary == "interval" and self.m > 1:
            raise ConfigError(
                "policy filter: with n 0 and auxiliary 'interval' there is nothing to save between the intervals; set "
                "n >= 1 or auxiliary 'always', or use policy full and save less often"
            )

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        always = self._always(stats)
        others = self._others(idle=worth_saving(stats).isdisjoint(always), commits=history.commits)
        return Decision({one.unit: Choice(RAW, always[one.unit]) if one.unit in always else others for one in stats})

    def _always(self, stats: Sequence[UnitStats]) -> Mapping[Unit, str]:
        blocks = sorted({one.position for one in stats if one.block})
        first, last = set(blocks[: self.n]), set(blocks[max(0, len(blocks) - self.n) :])
        reasons: dict[Unit, str] = {}
        for one in stats:
            if not one.block and self.auxiliary == "always":
                reasons[one.unit] = "not a block: saved every time"
            elif one.block and one.position in first:
                reasons[one.unit] = f"among the first {self.n} blocks: saved every time"
            elif one.block and one.position in last:
                reasons[one.unit] = f"among the last {self.n} blocks: saved every time"
        return reasons

    def _others(self, idle: bool, commits: int) -> Choice:
        if commits % self.m == 0:
            return Choice(RAW, f"due: {commits} commits so far, a multiple of m {self.m}")
        if idle:
            return Choice(RAW, "none of the layers that are saved every time can be saved")
        return Choice(None, f"not due: {commits} commits so far, not a multiple of m {self.m}")


@dataclass(frozen=True)
class Fallback:
    """Saves every unit, as the policy ``name`` failed, in its bounds and encodings; every reason says why."""

    name: str
    failure: Failure

    needs_drift: bool = False

    @property
    def message(self) -> str:
        """The failure: ``policy mine raised ValueError('x')``."""
        return f"policy {self.name} {self.failure.what}"

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        return Decision({one.unit: Choice(RAW, f"{self.message}: saved as under full") for one in stats})

    def named(self, decision: Decision) -> Decision:
        """Return the decision with the failure added to the reasons given by bounds."""
        return Decision(
            {
                unit: choice
                if choice.reason.startswith(self.message)
                else Choice(choice.encoding, f"{choice.reason} ({self.message})")
                for unit, choice in decision.choices.items()
            }
        )


@dataclass(frozen=True)
class Full:
    """Policy ``full``: saves every unit raw. The only policy whose resume is always bitwise exact."""

    name: ClassVar[str] = "full"
    needs_drift: ClassVar[bool] = False

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        return Decision(dict.fromkeys((one.unit for one in stats), Choice(RAW, "everything is saved every time")))


@dataclass(frozen=True)
class Observe:
    """Policy ``observe``: skips every unit; the reason says what the policy ``inner`` would do.

    For a trial on a live run. Bounds go inside it, so that they do not cause a write either."""

    inner: Policy = field(default_factory=Full)

    name: ClassVar[str] = "observe"

    def __post_init__(self) -> None:
        if isinstance(self.inner, Observe):
            raise ConfigError("policy observe: inner must be a policy that saves, not observe again")

    @property
    def needs_drift(self) -> bool:
        return self.inner.needs_drift

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        would = checked_answer(self.inner.name, stats, self.inner.select(stats, budget, history), refusal=None)
        skipped = {}
        for unit, choice in would.choices.items():
            action = "save" if choice.saved else "skip"
            skipped[unit] = Choice(None, f"observe: {self.inner.name} would {action} it ({choice.reason})")
        return Decision(skipped)


@dataclass(frozen=True)
class Parity:
    """Policy ``parity``: saves one of ``k`` >= 2 groups of layers at a time; with k = 2, odd and even layers in turn.

    From the literature (layer-wise merging of checkpoints saved by halves). A layer's group is its position modulo k.
    Turns count commits, not steps, so a failed save is repeated with the same group and a restart continues with the
    store's turn. The first commit is full, so the turn is ``(commits - 1) mod k``. A group in which nothing can be
    saved (frozen, not finite, or empty) passes its turn to the next."""

    k: int = 2

    name: ClassVar[str] = "parity"
    needs_drift: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_integer("policy parity", "k", self.k, least=2)

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        group = self._group(stats, history)
        return Decision({one.unit: self._choice(one, group) for one in stats})

    def _group(self, stats: Sequence[UnitStats], history: History) -> int:
        worth = worth_saving(stats)
        occupied = {one.position % self.k for one in stats if one.unit in worth}
        turn = (history.commits - 1) % self.k
        order = ((turn + ahead) % self.k for ahead in range(self.k))
        return next((group for group in order if group in occupied), turn)

    def _choice(self, one: UnitStats, group: int) -> Choice:
        member_of = one.position % self.k
        where = f"position {one.position} is in group {member_of} of {self.k}"
        if member_of == group:
            return Choice(RAW, f"{where}, whose turn it is")
        return Choice(None, f"{where}; it is the turn of group {group}")


@dataclass(frozen=True)
class Threshold:
    """Policy ``threshold``: saves the units whose drift is at least ``threshold``.

    Drift is relative, so one threshold serves layers of any size. Slots differ in how fast they move (first moments
    turn over within a few steps), so each may have its own. A unit whose drift is unknown or NaN is saved."""

    threshold: float  # relative drift, >= 0; 0 saves everything
    slots: Mapping[str, float] = field(default_factory=dict, hash=False)  # thresholds of individual slots

    name: ClassVar[str] = "threshold"
    needs_drift: ClassVar[bool] = True

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
        object.__setattr__(self, "slots", dict(self.slots))  # a copy, since the caller may change its own

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
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
