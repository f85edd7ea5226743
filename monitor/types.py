"""Define the records of a decision: requests, results, and the report returned to the training loop."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from monitor.observe.drift_meter import Measure
from policies.base import Budget, Choice, UnitStats
from store.errors import PREEMPTED
from store.names import SaveId, Unit

Sizes = Mapping[Unit, tuple[int, str, float, float | None]]
"""Units of a save -> bytes, encoding, error, drift as staged."""


@dataclass(frozen=True)
class SaveRequest:
    """A save that the policy did not decide."""

    reason: str  # recorded for every unit
    budget_bytes: Callable[[], float] | None = None
    """Bytes that can become durable before the job ends, called on rank 0. None: save everything, without a limit."""

    @property
    def preempted(self) -> bool:
        """Whether the job is about to end."""
        return self.budget_bytes is not None


class Chosen(NamedTuple):
    """Rank 0's choices, for the other ranks. Units are numbers, in the order of the job's table."""

    saved: tuple[tuple[str, str, Sequence[int]], ...]  # encoding, reason, units
    missing: Sequence[int]
    interval: int | None


@dataclass(frozen=True)
class SaveStatus:
    """Whether a save or an in-memory snapshot may begin. The same on all ranks."""

    skip: str | None  # why it must not begin now; None if it may
    changed: bool  # whether the pieces of any rank changed
    proposed: Chosen | None = None  # rank 0's choices, if it sent them along


@dataclass(frozen=True)
class DecisionResult:
    """A decision and the measurements behind it.

    ``stats``, ``choices``, ``seen``, ``offered`` and ``commits`` are set on rank 0 only. ``saved``, ``incomplete`` and
    ``interval`` are the same on all ranks."""

    stats: tuple[UnitStats, ...]  # all units, including those measured after the policy chose
    choices: Mapping[Unit, Choice]
    saved: Mapping[Unit, Choice]
    drift: Mapping[Unit, float | None]  # of the measured units; None where it is not finite
    mine: Mapping[Unit, Measure]  # this rank's share of the measurements on live tensors
    incomplete: tuple[Unit, ...]  # units that a commit of this decision would lack
    forced: bool = False  # requested by ``save()`` or by a preemption
    interval: int | None = None  # steps to the next decision, if they vary
    seen: tuple[UnitStats, ...] = ()  # the units as the policy saw them
    offered: Budget = field(default_factory=Budget)  # as the policy saw it, but for the units that bounds demand
    commits: int = 0
    preempted: bool = False  # limited to the time left before the job ends


SKIP_REASONS: Mapping[str | None, str] = {
    None: "nothing moved",
    "busy": "not enough time",
    "nothing": "no layer is to be saved",
    "failed": "the save failed",
    "withheld": "layers without any version have NaN or Inf",
    "fenced": "another job has taken over the store; stop one of the two",
    "storage": "the store could not be claimed; the log says why",
    "unreachable": "another rank was later than the job's timeout, or is gone; restart the job",
    "disagree": "ranks are at different steps; call ckpt.step() equally often on all of them",
    "unsupported": "the model or the optimizer cannot be saved as it is now",
}
"""Texts for ``StepReport.skipped``. Those of None and ``busy`` apply to the last save of a job, and to ``save()``."""


def newest_text(newest: SaveId | None) -> str:
    """Return a clause for messages about a failed save."""
    return "there is no commit yet" if newest is None else f"the newest commit is that of step {newest.step}"


@dataclass(frozen=True)
class StepReport:
    """Result of a decision, returned by :meth:`monitor.Checkpointer.step` and :meth:`~monitor.Checkpointer.save`.

    Attributes:
        step: Optimizer step of the decision.
        skipped: Why no save began: ``busy``, ``nothing``, ``withheld``, ``fenced``, ``storage``, ``disagree``,
            ``unreachable``, ``unsupported`` or ``observe``. With ``wait``, ``failed`` if it failed and ``busy`` if it
            is unfinished. None if a save began.
        stats: Drift and staleness of every unit over all ranks. Rank 0 only; empty if nothing was measured.
        saved: Units in this save, with the reason for each. If it was not waited for, a layer may still turn out to
            have NaN or Inf when written; its units are then left out of the commit, and their old versions stay.
        choices: The choice for every unit, with its reason. Rank 0 only.
        staged_bytes: Bytes copied on this rank.
        stall_seconds: Seconds that the training thread was blocked.
        problem: With ``unsupported``: the difference from the state when the job was attached.
        interval: Steps to the next decision, under ``every: auto``.
        preempted: Whether this was the last save before the job ends."""

    step: int
    skipped: str | None
    stats: Sequence[UnitStats] = ()
    saved: Mapping[Unit, Choice] | None = None
    choices: Mapping[Unit, Choice] | None = None
    staged_bytes: int = 0
    stall_seconds: float = 0.0
    problem: str | None = None
    interval: int | None = None
    preempted: bool = False

    def without(self, dropped: Collection[Unit]) -> "StepReport":
        """Return the report without the units that were left out of the commit."""
        kept = {unit: choice for unit, choice in (self.saved or {}).items() if unit not in dropped}
        return self if self.saved is None else replace(self, saved=kept)


class Preempted(SystemExit):
    """Raised by ``step()`` after the last save of a preempted job. Uncaught, the process exits with code 75.

    ``report`` is the :class:`StepReport` of that save."""

    def __init__(self, report: StepReport) -> None:
        super().__init__(PREEMPTED)
        self.report = report
