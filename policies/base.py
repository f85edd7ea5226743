"""Define the policy protocol: the statistics that a policy sees and the decision that it returns.

A policy is a pure function of its arguments: no clock, no I/O, no randomness, no memory of its own. What it needs to
know about the past is in :class:`History`, which survives a restart. docs/own-policies.md shows how to write one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from store.names import Unit, group_by_key


@dataclass(frozen=True)
class UnitStats:
    """Statistics of one unit, a (layer, slot), at a decision, over all ranks.

    Attributes:
        unit: Layer and slot, such as ``("model.layers.3", "exp_avg")``.
        position: Index of the layer in model order, from 0. All slots of a layer share it.
        block: Whether the layer is one of the repeated blocks, not an embedding, a final norm or a head.
        nbytes: Size in bytes when stored raw.
        drift: ‖live − committed‖ / ‖committed‖ against the newest committed version, decoded. None if there is no
            version yet, or if drift was not measured.
        staleness: Steps since the newest committed version. None if there is none.
        finite: False if the unit contains NaN or infinity.
        moving: False for parameters that no optimizer updates (frozen).
        changed_shape: Whether its set of parameters differs from that of the newest version.
        error: Relative error of the newest version's encoding; 0 if it is lossless.
        numel: Number of values; 0 if unknown, in which case the unit counts as float32.
        encoding: Encoding of the newest version. None if there is none.
        stored_bytes: Stored size of the newest version or, with ``differences``, that expected of the next one; 0 if
            there is none."""

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

    @classmethod
    def of(cls, **values: Any) -> "UnitStats":
        """Return statistics with all these values. The constructor sets them one by one, in three times as long."""
        made = object.__new__(cls)
        made.__dict__.update(values)
        return made


@dataclass(frozen=True)
class Budget:
    """Limits of one decision.

    Attributes:
        bytes: Bytes that may be written. None: unlimited. Below 0: earlier saves are not paid for yet.
        demanded: Units that are saved regardless of the policy. Their cost is deducted first.
        per_step: Bytes that a step of training earns, on average so far. None: unlimited, or not known yet.
        most: Most bytes that can ever be at hand. None: unlimited.
        resumed_for: Steps since the process resumed. None: it made the first save of the store."""

    bytes: float | None = None
    demanded: frozenset[Unit] = frozenset()
    per_step: float | None = None
    most: float | None = None
    resumed_for: int | None = None


@dataclass(frozen=True)
class History:
    """The past of a job at a decision.

    Attributes:
        step: Optimizer step of this decision.
        commits: Commits in the store so far. Failed saves do not count: a policy repeats a turn that failed.
        interval: Steps to the next decision. None: not known."""

    step: int
    commits: int
    interval: int | None = None


@dataclass(frozen=True)
class Choice:
    """Decision about one unit.

    Attributes:
        encoding: Name of the encoding to store it in, such as ``raw``. None: skip it.
        reason: Why, in a few words. It is stored in the manifest and shown by the command line."""

    encoding: str | None
    reason: str

    @property
    def saved(self) -> bool:
        """Whether the unit is stored."""
        return self.encoding is not None


@dataclass(frozen=True)
class Decision:
    """One :class:`Choice` for each unit that the policy was shown."""

    choices: Mapping[Unit, Choice]

    @property
    def saved(self) -> tuple[Unit, ...]:
        """The units to store, in the order shown."""
        return tuple(unit for unit, choice in self.choices.items() if choice.saved)


class Policy(Protocol):
    """Chooses which units a save stores. Any class with these members is a policy; subclassing is not needed.

    A policy that limits itself to ``budget.bytes`` also has an attribute ``spends = True``. Check an implementation
    with ``examples/policy_checks.py``."""

    @property
    def name(self) -> str:
        """Name in manifests, metrics and logs: short, and not that of a built-in policy."""

    @property
    def needs_drift(self) -> bool:
        """Whether :meth:`select` reads ``drift``. If False, drift is measured beside the save instead of before it."""

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """Decide about every unit. Called on rank 0 in the training thread, so training waits for it.

        Deterministic: equal arguments give an equal decision, in any process. It must not change its arguments. If it
        raises or returns an invalid decision, everything is saved at this step and training continues.

        Args:
            stats: All units, in model order. The decision must not depend on the order.
            budget: Bytes that may be written.
            history: Step and number of commits.

        Returns:
            A decision with exactly one choice, with a reason, for each unit in ``stats``."""


def nonfinite_slots(stats: Sequence[UnitStats]) -> Mapping[str, tuple[str, ...]]:
    """Return the slots with NaN or infinity of each layer that has any, sorted by name."""
    found = group_by_key(one.unit for one in stats if not one.finite)
    return {layer: tuple(sorted(slots)) for layer, slots in found.items()}


def worth_saving(stats: Sequence[UnitStats]) -> frozenset[Unit]:
    """Return the moving units of finite layers.

    The health gate works on whole layers: if a second moment overflowed, the next step corrupts the weights too."""
    nonfinite = nonfinite_slots(stats)
    return frozenset(one.unit for one in stats if one.moving and one.unit.layer not in nonfinite)


def compared(name: str, value: float, sign: str, limit_name: str, limit: float) -> str:
    """Format a comparison: ``drift 0.0123 >= threshold 0.01``. The limit is written as it was set."""
    return f"{name} {digits(value, limit)} {sign} {limit_name} {limit!r}"


def digits(value: float, limit: float) -> str:
    """Format ``value`` with three significant digits, or more if rounding would change how it compares to ``limit``."""
    for count in range(3, 17):
        text = f"{value:.{count}g}"
        if _order(float(text), limit) == _order(value, limit):
            return text
    return repr(value)


def version(step: int, staleness: int | None) -> str:
    """Format the version that a resume would load: ``the version of step 110``."""
    return "there is no version yet" if staleness is None else f"the version of step {step - staleness}"


def _order(value: float, limit: float) -> int:
    return (value > limit) - (value < limit)
