"""The drift trace of a job: what every decision saw, chose and cost, a JSON object a line, only ever appended to.

A job that restarts appends to the same file; a line that a crash tore is skipped by the reader, and so is what a later
release may add. Pure records, and bytes to and from them: it does not know when lines are written, nor by whom.

    {"kind": "job", ...}        one incarnation begins, and what its units are; again where the units change
    {"kind": "decision", ...}   what a decision saw and chose
    {"kind": "moved", ...}      how far units moved since earlier decisions, whatever was saved of them
    {"kind": "commit", ...}     a save became durable
    {"kind": "failed", ...}     a save did not
    {"kind": "resumed", ...}    the job went back, or on, to a step

Units are named once, in the job line; elsewhere by their index there. See docs/trace.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from store.names import Unit

VERSION = 1


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TracedUnit(_Line):
    """As :class:`policies.base.UnitStats` has it; sizes over all ranks."""

    layer: str
    slot: str
    position: int
    block: bool
    nbytes: int
    numel: int
    moving: bool

    @property
    def unit(self) -> Unit:
        return Unit(self.layer, self.slot)


class JobLine(_Line):
    """An incarnation, and its units from here on: none at its very beginning, where they are not known yet.

    started: when it began, seconds since 1970; alike in all its job lines, and ``seconds`` of all its lines count from
    there, on a clock that never goes back. settings: the configuration, as far as it was set. policy: where nothing is
    saved but all is decided (``observing``), the one observed; then each commit is what would have been written."""

    kind: Literal["job"] = "job"
    version: int = VERSION
    started: float
    epoch: int
    framework: str
    world_size: int
    policy: str
    settings: Mapping[str, Any]
    units: tuple[TracedUnit, ...]
    seconds: float = 0.0
    observing: bool = False


class DecisionLine(_Line):
    """One decision. By unit: drift (null: not known, or not measured), staleness (null: no version), error, encoding
    and stored_bytes of the newest version; all empty where a save was skipped before anything was measured. sick,
    changed: units that are not finite, or hold other parameters, as far as the policy knew.

    drift is all that was measured of it: a policy that does not look at drift decides before moving units are measured.
    offered: bytes that the budget had, null where they were not limited. interval: steps to the next decision. saved:
    unit -> encoding. skipped: why no save was begun. forced: somebody asked for it. preempted: the end of the job
    did, and time limited it. stall: seconds that training
    waited for the decision. copy_wait: those that an optimizer step waited, since the decision before, for copies."""

    kind: Literal["decision"] = "decision"
    step: int
    seconds: float
    commits: int
    interval: int | None = None
    offered: float | None = None
    drift: tuple[float | None, ...] = ()
    staleness: tuple[int | None, ...] = ()
    error: tuple[float, ...] = ()
    encoding: tuple[str | None, ...] = ()
    stored_bytes: tuple[int, ...] = ()
    sick: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    saved: Mapping[int, str] = {}
    skipped: str | None = None
    forced: bool = False
    preempted: bool = False
    stall: float = 0.0
    copy_wait: float = 0.0


class MovedLine(_Line):
    """How far units had moved at ``step``: since each of some earlier steps, the relative distance of each unit's live
    values to its live values then (null: not known, or not moving). Precision is no part of it.

    Written once the save of that step, if there was one, is over: after the decision that it belongs to."""

    kind: Literal["moved"] = "moved"
    step: int
    since: Mapping[int, tuple[float | None, ...]]


class CommitLine(_Line):
    """A save of ``step`` is committed. seconds: when training learned of it. took: seconds from its beginning. written:
    payload bytes over all ranks, of which the fragments of units are in ``sizes``: unit -> bytes, encoding, error, and
    drift as staged (null where there was no version to tell it from)."""

    kind: Literal["commit"] = "commit"
    step: int
    seconds: float
    took: float
    written: int
    sizes: Mapping[int, tuple[int, str, float, float | None]]


class FailedLine(_Line):
    """A save of ``step`` failed."""

    kind: Literal["failed"] = "failed"
    step: int
    seconds: float
    reason: str


class ResumedLine(_Line):
    """The job stands at ``step`` now; ``newest`` is the step of the commit, which may be later."""

    kind: Literal["resumed"] = "resumed"
    step: int
    newest: int
    seconds: float


Line = JobLine | DecisionLine | MovedLine | CommitLine | FailedLine | ResumedLine

_KINDS: Mapping[str, type[Line]] = {
    "job": JobLine,
    "decision": DecisionLine,
    "moved": MovedLine,
    "commit": CommitLine,
    "failed": FailedLine,
    "resumed": ResumedLine,
}


@dataclass(frozen=True)
class Trace:
    """What a file holds. skipped: lines that are torn, or of no kind known here."""

    lines: tuple[Line, ...]
    skipped: int


def to_line(line: Line) -> bytes:
    """One line, its end included. Numbers are written so that reading gives the very same."""
    return json.dumps(line.model_dump(mode="json"), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def read_lines(data: Iterable[bytes]) -> Trace:
    """The trace in lines of a file; those that cannot be read are counted."""
    found = list(iter_lines(data))
    return Trace(tuple(line for line in found if line is not None), found.count(None))


def iter_lines(data: Iterable[bytes]) -> Iterator[Line | None]:
    """One after the other, for a trace that is not to be held whole; None for each that cannot be read."""
    return (_line(raw) for raw in data if raw.strip())


def incarnations(trace: Trace) -> Iterator[tuple[JobLine, tuple[Line, ...]]]:
    """Each job line with the lines up to the next one; what comes before the first is left out.

    Lines that came before the units were known go with the job line that tells them."""
    job: JobLine | None = None
    rest: list[Line] = []
    for line in trace.lines:
        if isinstance(line, JobLine):
            waits = job is not None and not job.units and job.started == line.started
            if job is not None and not waits:
                yield job, tuple(rest)
            job, rest = line, rest if waits else []
        else:
            rest.append(line)
    if job is not None:
        yield job, tuple(rest)


def _line(raw: bytes) -> Line | None:
    try:
        values = json.loads(raw)
        return _KINDS[values["kind"]].model_validate(values)
    except (ValueError, KeyError, TypeError, ValidationError):
        return None
