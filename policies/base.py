"""Policy protocol, UnitStats, Budget, Decision; non-finite layers.

What a policy sees and what it answers.

A policy is a pure function of its arguments: no clock, no I/O, no randomness, no memory of its own.
Whatever it needs to know of the past is in :class:`History`, which survives a restart.

Which layers hold non-finite values, and which units there is any use in saving.

The gate works on whole layers: weights and moments belong together, and a layer whose second moment has
overflowed has weights that the next step will spoil.

Sentences that give the reason of a choice.

A reason has to stay true when it is read: a drift of 0.0099999 must not be printed as "0.01 < threshold
0.01". So a measured value gets as many digits as it takes to stand on the right side of its limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from store.names import Unit


@dataclass(frozen=True)
class UnitStats:
    """One (layer, slot) at the moment of a decision, summed over all ranks.

    position: the layer's place in model order, from 0; all slots of a layer share it.
    block: the layer is one of the repeated blocks (not an embedding, a final norm or a head).
    nbytes: size when stored raw, over all ranks.
    drift: relative distance to what a resume would give back; None when there is no version yet.
    staleness: steps since the step of the newest committed version; None when there is none.
    finite: no NaN or infinity among its values.
    moving: False for what no optimizer updates (frozen parameters).
    error: relative distance of what was stored to what decoding that newest version gives; 0 where it is lossless.
    changed_shape: the set of parameters in it is not the one of the newest version.
    numel: values over all ranks; 0 where that is not known, and then they count as float32.
    encoding, stored_bytes: of the newest version, as it was stored; None and 0 where there is none.
    """

    unit: Unit
    position: int
    block: bool
    nbytes: int
    drift: float | None
    staleness: int | None
    finite: bool = True
    moving: bool = True
    changed_shape: bool = False
    error: float = 0.0
    numel: int = 0
    encoding: str | None = None
    stored_bytes: int = 0


@dataclass(frozen=True)
class Budget:
    """What this decision may cost.

    bytes: that may be written; None means unlimited, below 0 that earlier saves are not paid for yet.
    demanded: units that are saved whatever the policy says, so that what they cost comes off first.
    """

    bytes: float | None = None
    demanded: frozenset[Unit] = frozenset()


@dataclass(frozen=True)
class History:
    """What happened before: ``step`` of this decision and the number of ``commits`` in the store so far.

    A failed save is not counted, so a policy that takes turns repeats the turn that failed.
    interval: steps to the next decision, where they vary; None where they are as the policy's bounds have them.
    """

    step: int
    commits: int
    interval: int | None = None


@dataclass(frozen=True)
class Choice:
    """What to do with one unit: the name of an encoding, or None to skip it; and why."""

    encoding: str | None
    reason: str

    @property
    def saved(self) -> bool:
        """Whether the unit is to be stored."""
        return self.encoding is not None


@dataclass(frozen=True)
class Decision:
    """One choice for each unit that the policy was shown."""

    choices: Mapping[Unit, Choice]

    @property
    def saved(self) -> tuple[Unit, ...]:
        """The units to store, in the order they were shown."""
        return tuple(unit for unit, choice in self.choices.items() if choice.saved)


class Policy(Protocol):
    """Chooses what to save. Deterministic; every unit shown gets exactly one choice with a reason.

    needs_drift: whether ``select`` looks at ``drift``. Where it does not, the measurement may be taken
    beside the save instead of before it.
    """

    @property
    def name(self) -> str:
        """As in settings and manifests."""
        ...

    @property
    def needs_drift(self) -> bool:
        """See the class."""
        ...

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """Decide on every unit shown."""
        ...


def nonfinite_slots(stats: Sequence[UnitStats]) -> Mapping[str, tuple[str, ...]]:
    """For every layer with NaN or infinity: the slots that have them, sorted by name."""
    found: dict[str, list[str]] = {}
    for one in stats:
        if not one.finite:
            found.setdefault(one.unit.layer, []).append(one.unit.slot)
    return {layer: tuple(sorted(slots)) for layer, slots in found.items()}


def worth_saving(stats: Sequence[UnitStats]) -> frozenset[Unit]:
    """The units that move and whose layer is finite: the others are held back whatever a policy says."""
    sick = nonfinite_slots(stats)
    return frozenset(one.unit for one in stats if one.moving and one.unit.layer not in sick)


def compared(name: str, value: float, sign: str, limit_name: str, limit: float) -> str:
    """For instance ``drift 0.0123 >= threshold 0.01``; the limit is written as it was set."""
    return f"{name} {digits(value, limit)} {sign} {limit_name} {limit!r}"


def digits(value: float, limit: float) -> str:
    """``value`` with three significant digits, or more where rounding would change how it compares."""
    for count in range(3, 17):
        text = f"{value:.{count}g}"
        if _order(float(text), limit) == _order(value, limit):
            return text
    return repr(value)


def version(step: int, staleness: int | None) -> str:
    """What a resume would give back of a unit: ``the version of step 110``, or that there is none."""
    return "there is no version yet" if staleness is None else f"the version of step {step - staleness}"


def _order(value: float, limit: float) -> int:
    return (value > limit) - (value < limit)
