"""What a policy sees and what it answers.

A policy is a pure function of its arguments: no clock, no I/O, no randomness, no memory of its own.
Whatever it needs to know of the past is in :class:`History`, which survives a restart.
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
