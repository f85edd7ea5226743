"""Events of a job, and the listeners that follow them: budget, schedule, metrics, log, trace and daemon client.

The training thread sends all events except :meth:`SaveListener.on_store_check`. An exception of a listener reaches the
training loop, so listeners handle errors of disks, ports and daemons themselves."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monitor.ledger import PreparedCommit
from monitor.observe.drift_meter import Signature
from monitor.observe.units import LocalUnit, UnitSize
from monitor.types import DecisionResult, Sizes
from store.certificate import Certificate
from store.errors import DriftpointError
from store.names import SaveId, Unit
from store.schema import UnitRecord


@dataclass(frozen=True)
class AttachEvent:
    """The job is attached. ``epoch`` is 0 and ``store_id`` None if nothing is written."""

    rank: int
    world_size: int
    store: str
    store_id: str | None
    epoch: int


@dataclass(frozen=True)
class MeasuredEvent:
    """The units as a decision saw them. sizes: all units of the job. committed: units that have a version."""

    step: int
    decided: DecisionResult
    sizes: Mapping[Unit, UnitSize]
    committed: Collection[Unit]


@dataclass(frozen=True)
class DecisionEvent:
    """A decision ended, after ``stall`` seconds."""

    step: int
    skipped: str | None  # why no save began; None if one did, or would have under policy observe
    problem: str | None  # details of ``unsupported``
    stall: float
    decided: DecisionResult | None  # None if nothing was decided
    commits: int  # so far


@dataclass(frozen=True)
class SaveBeginEvent:
    """A save begins. first: the store has no commit yet. dry_run: if nothing is written, the units it would hold."""

    step: int
    decided: DecisionResult
    sizes: Mapping[Unit, UnitSize]
    first: bool
    dry_run: Sizes | None = None

    @property
    def dry_run_bytes(self) -> int:
        """Bytes of the units in ``dry_run``."""
        return sum(nbytes for nbytes, *_ in (self.dry_run or {}).values())


@dataclass(frozen=True)
class CommitEvent:
    """A save is committed, ``seconds`` after it began. before: versions in the previous commit."""

    drawn: PreparedCommit
    seconds: float
    written_bytes: int  # payload over all ranks
    before: Mapping[Unit, UnitRecord]

    @property
    def save(self) -> SaveId:
        return self.drawn.manifest.save


@dataclass(frozen=True)
class SaveFailedEvent:
    """A save failed. ``newest``: the newest commit, on rank 0."""

    step: int
    error: BaseException | None
    newest: SaveId | None = None

    @property
    def reason(self) -> str:
        """The error's name in metrics and traces."""
        return type(self.error).__name__ if isinstance(self.error, DriftpointError) else "internal"


@dataclass(frozen=True)
class ResumeEvent:
    """The job resumed, and continues from ``step``."""

    step: int
    commit: int  # step of the newest commit in the resumed state
    created: str  # of that commit
    newest: SaveId | None  # the commit that later saves build on
    certificate: Certificate
    from_memory: bool
    replicas: int
    fallbacks: int  # units resumed from an older version
    passed_over: int  # newer commits that were not used
    replayed: int  # steps replayed from the journal
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PreemptedEvent:
    """The last save of a preempted job ended, ``seconds`` after the signal."""

    step: int
    seconds: float
    skipped: str | None  # why nothing more was saved
    moving: int  # units that the optimizer updates
    fresh: int  # those of them committed at ``step``
    oldest: int  # largest staleness of the others
    exact: bool  # one commit holds all of them without rounding
    newest: SaveId | None

    @property
    def outcome(self) -> str:
        """``full``, ``part`` or ``nothing``."""
        return "full" if self.fresh == self.moving else "part" if self.fresh else "nothing"


@dataclass(frozen=True)
class MemoryEvent:
    """The memory tier is on or off. snapshot: now complete on all ranks, ``seconds`` after it was staged."""

    on: bool
    path: Path
    snapshot: SaveId | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class BackgroundFailureEvent:
    """Background work failed; saves continue. reason: metrics label. message: empty if another rank logs it."""

    reason: str
    message: str = ""
    error: BaseException | None = None
    severe: bool = False


def unexpected(error: BaseException | None) -> BaseException | None:
    """Return the error if it is a bug, so that its traceback is logged; None for errors raised on purpose."""
    return None if isinstance(error, DriftpointError) else error


class SaveListener:
    """Follows a job. Subclasses override the events that concern them. Those marked (0) are sent on rank 0 alone."""

    def __init_subclass__(cls) -> None:
        for name in vars(cls):
            if name.startswith("on_") and not hasattr(SaveListener, name):
                raise TypeError(f"{cls.__name__}.{name} follows no event")

    def on_attach(self, event: AttachEvent) -> None:
        """Collective."""

    def on_epoch(self, epoch: int) -> None:
        """The job claimed another epoch, to save a step again."""

    def on_step(self, step: int, at: float) -> None:
        """Training reached ``step``; nothing is decided on it yet. at: seconds of ``time.perf_counter``."""

    def on_units_changed(self, local: Mapping[Unit, LocalUnit]) -> None:
        """The units of the job changed, or their pieces. local: those of this rank."""

    def on_policy_failed(self, error: BaseException) -> None:
        """(0) The policy raised or returned an invalid decision, so everything is saved."""

    def on_measured(self, event: MeasuredEvent) -> None:
        """(0) Before a save begins."""

    def on_decision(self, event: DecisionEvent) -> None:
        """After the save began, if one did."""

    def on_save_begin(self, event: SaveBeginEvent) -> None:
        """(0) After staging."""

    def on_copy_wait(self, seconds: float) -> None:
        """An optimizer step waited for copies of the save under way."""

    def on_snapshot_copy_wait(self, seconds: float) -> None:
        """An optimizer step waited for copies of an in-memory snapshot."""

    def on_commit(self, event: CommitEvent) -> None:
        """(0) After the ledger advanced."""

    def on_save_failed(self, event: SaveFailedEvent) -> None:
        """On rank 0, and on each rank whose own part failed."""

    def on_settled(self, signatures: Mapping[Unit, Signature]) -> None:
        """No save is under way. signatures: of the values that the last one staged on this rank. Collective."""

    def on_store_check(self, root: Path) -> None:
        """(0) Called in the background thread, so it may block, for example to read the free space at ``root``."""

    def on_background_failure(self, event: BackgroundFailureEvent) -> None:
        """Upkeep, the memory tier or its replicas failed."""

    def on_memory(self, event: MemoryEvent) -> None:
        """The memory tier changed."""

    def on_replication(self, seconds: Sequence[float], step: int | None) -> None:
        """(0) Snapshots took ``seconds`` each to reach a peer. step: newest snapshot that all ranks have replicated."""

    def on_resume(self, event: ResumeEvent) -> None:
        """After the ledger was reset."""

    def on_preempted(self, event: PreemptedEvent) -> None:
        """(0) Before the process leaves."""

    def on_close(self, clean: bool, timeout: float) -> None:
        """The job ends. clean: as intended, so nothing needs to be rescued. timeout: seconds it may take."""


class Listeners(SaveListener):
    """Calls the listeners of a job in the order given, and ``on_close`` in the opposite order."""

    def __init__(self, *listeners: SaveListener) -> None:
        self.all = listeners


def _send(name: str) -> Callable[..., None]:
    """Build the method of :class:`Listeners` that passes an event on."""

    def send(self: Listeners, *event: Any) -> None:
        for listener in self.all[::-1] if name == "on_close" else self.all:
            getattr(listener, name)(*event)

    return send


for _name in [name for name in vars(SaveListener) if name.startswith("on_")]:
    setattr(Listeners, _name, _send(_name))
