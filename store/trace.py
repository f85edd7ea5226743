"""Define the records of a job's drift trace, one JSON object a line, and read them.

A job that restarts appends to the same file. A file that reaches its largest size is renamed, see :func:`rotated_path`;
the next one begins with the job line that applies. Readers skip torn lines and kinds that a later release added.

Units are named once, in the job line; elsewhere by their index there. See docs/trace.md."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from store.names import Unit

VERSION = 1
_SUCCESSOR = {"int8-sqrt-block": "int8-log2"}
EncodingName = Annotated[str, AfterValidator(lambda name: _SUCCESSOR.get(name, name))]
"""Name of an encoding. One that is only read becomes its successor, so that a replay as configured is as recorded."""

Count = Annotated[int, Field(ge=0, le=1 << 60)]  # of steps or bytes; a trace is a plain file, which may hold any number
Seconds = Annotated[float, Field(ge=0, le=1 << 60)]
Moment = Annotated[float, Field(ge=0, le=253_000_000_000)]  # Unix time that a calendar can represent


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TracedUnit(_Line):
    """A unit as in :class:`policies.base.UnitStats`; sizes over all ranks."""

    layer: str
    slot: str
    position: int
    block: bool
    nbytes: Count
    numel: int
    moving: bool

    @property
    def unit(self) -> Unit:
        return Unit(self.layer, self.slot)


class JobLine(_Line):
    """An incarnation and its units from here on; none before they are known."""

    kind: Literal["job"] = "job"
    version: int = VERSION
    started: Moment  # begin of the incarnation in seconds since 1970, the same in all its job lines
    epoch: int
    framework: str
    world_size: int
    policy: str  # with ``observing`` the observed policy: nothing is saved, and commits are those that it would make
    settings: Mapping[str, Any]  # the configuration that was set
    units: tuple[TracedUnit, ...]
    seconds: Moment = 0.0  # in all its lines since ``started``, on a monotonic clock
    observing: bool = False


class DecisionLine(_Line):
    """One decision. Lists by unit are empty if a save was skipped before any measurement."""

    kind: Literal["decision"] = "decision"
    step: Count
    seconds: Seconds
    commits: int
    interval: Count | None = None  # steps to the next decision
    offered: float | None = None  # bytes of the budget, null if unlimited
    per_step: float | None = None  # bytes that a step earns, null if unlimited or not known
    most: float | None = None  # bytes that can ever be at hand, null if unlimited
    resumed_for: int | None = None  # steps since the process resumed, null if it made the first save of the store
    drift: tuple[float | None, ...] = ()  # by unit, null if unknown: a policy that ignores drift decides before it is
    staleness: tuple[int | None, ...] = ()  # by unit, of the newest version, as the next three; null without one
    error: tuple[float, ...] = ()
    encoding: tuple[EncodingName | None, ...] = ()
    stored_bytes: tuple[int, ...] = ()
    sick: tuple[int, ...] = ()  # units that are not finite, as the policy knew them
    changed: tuple[int, ...] = ()  # units that hold other parameters, as the policy knew them
    saved: Mapping[int, EncodingName] = {}  # unit -> encoding
    skipped: str | None = None  # reason why no save was started
    forced: bool = False  # the save was requested
    preempted: bool = False  # the end of the job requested it, with limited time
    stall: Seconds = 0.0  # seconds that training waited for the decision
    copy_wait: Seconds = 0.0  # seconds that optimizer steps waited for copies since the previous decision


class MovedLine(_Line):
    """Relative distance of each unit's live values at ``step`` to those at earlier steps; null: unknown or not moving.

    Encoding error is no part of it. Written after the decision of ``step``, once its save, if any, ended."""

    kind: Literal["moved"] = "moved"
    step: int
    since: Mapping[int, tuple[float | None, ...]]


class CommitLine(_Line):
    """A save of ``step`` is committed."""

    kind: Literal["commit"] = "commit"
    step: Count
    seconds: Seconds  # time at which training was notified
    took: Seconds  # duration of the save
    written: Count  # payload bytes over all ranks
    sizes: Mapping[int, tuple[Count, EncodingName, float, float | None]]
    """By unit: bytes, encoding, error, and drift as staged, null without a previous version."""


class FailedLine(_Line):
    """A save of ``step`` failed."""

    kind: Literal["failed"] = "failed"
    step: Count
    seconds: Seconds
    reason: str


class ResumedLine(_Line):
    """The job resumed at ``step``; ``newest`` is the step of the commit, which may be later."""

    kind: Literal["resumed"] = "resumed"
    step: Count
    newest: Count
    seconds: Seconds


class DrawnLine(_Line):
    """State of rank 0's random generators when the optimizer step after the saved ``step`` began, as a digest."""

    kind: Literal["drawn"] = "drawn"
    step: int
    seconds: float
    world_size: int
    digest: str


Line = JobLine | DecisionLine | MovedLine | CommitLine | FailedLine | ResumedLine | DrawnLine

_LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])


@dataclass(frozen=True)
class Trace:
    """Contents of a trace file. ``skipped``: number of lines that are torn or of an unknown kind."""

    lines: tuple[Line, ...]
    skipped: int


def rotated_path(path: Path) -> Path:
    """Return the name of the full file before ``path``."""
    return path.with_name(f"{path.name}.1")


@contextmanager
def opened(path: Path) -> Iterator[Iterator[bytes]]:
    """Open a trace for reading its lines, those of the full file before it first. Raises OSError."""
    with path.open("rb") as file, ExitStack() as stack:
        before: Iterable[bytes] = ()
        with suppress(FileNotFoundError):
            before = stack.enter_context(rotated_path(path).open("rb"))
        yield chain(before, file)


def read_lines(data: Iterable[bytes]) -> Trace:
    """Parse the lines of a file; invalid lines are counted."""
    lines = list(iter_lines(data))
    return Trace(tuple(line for line in lines if line is not None), lines.count(None))


def iter_lines(data: Iterable[bytes]) -> Iterator[Line | None]:
    """Parse lines lazily; None for each invalid line."""
    for raw in filter(bytes.strip, data):
        try:
            yield _LINE.validate_python(json.loads(raw))
        except ValueError:  # not JSON, or ValidationError
            yield None


def fits(line: Line, units: int) -> bool:
    """Return whether the lists of a line have a place for each of ``units``, and it names no others."""
    if isinstance(line, DecisionLine):
        columns = (line.drift, line.staleness, line.error, line.encoding, line.stored_bytes)
        named = (*line.saved, *line.sick, *line.changed)
        return all(len(column) in (0, units) for column in columns) and all(0 <= index < units for index in named)
    if isinstance(line, CommitLine):
        return all(0 <= index < units for index in line.sizes)
    return all(len(column) == units for column in line.since.values()) if isinstance(line, MovedLine) else True


def incarnations(trace: Trace) -> Iterator[tuple[JobLine, tuple[Line, ...]]]:
    """Yield each job line with the lines up to the next one; lines before the first are dropped.

    Lines before the units were known belong to the job line that lists them."""
    job: JobLine | None = None
    rest: list[Line] = []
    for line in trace.lines:
        if isinstance(line, JobLine):
            if job is not None and job.units and (line.started, line.units) == (job.started, job.units):
                continue  # repeated where a file begins, or where the job saves a step again in another epoch
            waits = job is not None and not job.units and job.started == line.started
            if job is not None and not waits:
                yield job, tuple(rest)
            job, rest = line, rest if waits else []
        else:
            rest.append(line)
    if job is not None:
        yield job, tuple(rest)
