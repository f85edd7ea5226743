"""What one decision was, as the parts that carry it out and record it get it. Plain records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from monitor.drift.base import Measure
from policies.base import Choice, UnitStats
from store.names import Unit

Sizes = Mapping[Unit, tuple[int, str, float, float | None]]
"""What a save holds: unit -> bytes, encoding, error, drift as staged."""


@dataclass(frozen=True)
class Demand:
    """A save that is not the policy's doing. reason: of every unit. purse: where the job is about to end, the bytes
    that can still become durable, asked on rank 0; None: everything is saved, however long it takes."""

    reason: str
    purse: Callable[[], float] | None = None


@dataclass(frozen=True)
class Decided:
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
