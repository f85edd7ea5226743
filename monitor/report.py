"""What one decision was, for the user's own logs and for tests. Plain records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.base import Choice, UnitStats
from store.errors import PREEMPTED
from store.names import Unit


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
