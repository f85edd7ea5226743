"""StepReport, Preempted, Decision outcome records.

What one decision was, as the parts that carry it out and record it get it. Plain records.

What one decision was, for the user's own logs and for tests. Plain records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from monitor.observe.drift_meter import Measure
from policies.base import Choice, UnitStats
from store.errors import PREEMPTED
from store.names import Unit

Sizes = Mapping[Unit, tuple[int, str, float, float | None]]
"""What a save holds: unit -> bytes, encoding, error, drift as staged."""


@dataclass(frozen=True)
class SaveRequest:
    """A save that is not the policy's doing. reason: of every unit. purse: where the job is about to end, the bytes
    that can still become durable, asked on rank 0; None: everything is saved, however long it takes."""

    reason: str
    purse: Callable[[], float] | None = None


@dataclass(frozen=True)
class DecisionResult:
    """A decision and what it rests on.

    stats, choices: rank 0 only. saved: the same on all ranks. drift: of measured units, None where not finite.
    mine: this rank's part of what was measured on live tensors. lacking: units that would have no version. forced: not
    the policy's doing. interval: steps to the next decision, where they vary; the same on all ranks. seen, offered,
    commits: rank 0 only, the units as the policy saw them, before the rest was measured, the bytes that it was offered,
    and the commits so far. preempted: forced by the end of the job, as much as time allowed."""

    stats: tuple[UnitStats, ...]
    choices: Mapping[Unit, Choice]
    saved: Mapping[Unit, Choice]
    drift: Mapping[Unit, float | None]
    mine: Mapping[Unit, Measure]
    lacking: tuple[Unit, ...]
    forced: bool = False
    interval: int | None = None
    seen: tuple[UnitStats, ...] = ()
    offered: float | None = None
    commits: int = 0
    preempted: bool = False


@dataclass(frozen=True)
class StepReport:
    """Returned by ``ckpt.step()`` at every decision.

    skipped: why no save was begun (``busy``, ``nothing``, ``withheld``, ``fenced``, ``storage``, ``disagree``,
    ``unsupported``, ``observe``), None where one was. problem: with ``unsupported``, what is not as it was attached.
    stats: what the policy saw (drift and staleness of every unit over all ranks); rank 0 only, empty elsewhere
    and where nothing was measured. saved: units that this save holds, with the reason for each.
    choices: the whole decision with its reasons; rank 0 only. staged_bytes: copied on this rank.
    stall_seconds: time the training thread was kept. interval: steps to the next decision, under ``every: auto``.
    preempted: the end of the job was announced, and this is its last step; ``skipped`` may be ``failed`` then.
    """

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


class Preempted(SystemExit):
    """The end of the job was announced, and what time allowed is saved. Uncaught, the process exits with code 75."""

    def __init__(self, report: StepReport) -> None:
        super().__init__(PREEMPTED)
        self.report = report
