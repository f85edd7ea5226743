"""Stores with a drift trace beside them that tells the same: what ``report`` and ``top`` are shown.

Commits are made with the store's own code, and lines with the trace's own records, so that every figure on a page can
be told from what was written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from monitor.telemetry.trace import to_line
from store.names import SaveId, Unit
from store.trace import CommitLine, DecisionLine, FailedLine, JobLine, Line, ResumedLine, TracedUnit
from store.verify import CommitState, VerifyReport
from tests.support.stores import FakeLayer, StoreBuilder

STARTED = datetime(2025, 3, 1, 11, 50, tzinfo=UTC).timestamp()
"""When the first incarnation began: ten minutes before the builder's commits say that they were made."""


class SeenRun:
    """One job on one store: :meth:`save` makes a commit and tells the trace of it, a step being a second."""

    def __init__(self, root: Path, layers: Sequence[FakeLayer] | int = 2, **settings: Any) -> None:
        self.store = StoreBuilder(root, layers=layers, world_size=1, framework="torch", policy="parity")
        self.root, self.trace = root, Path(f"{root}.trace.jsonl")
        self.settings = settings
        self.started = STARTED
        self.lines: list[Line] = []
        self.begin()

    @property
    def traced(self) -> tuple[TracedUnit, ...]:
        places = {layer.name: place for place, layer in enumerate(self.store.layers)}
        numel = {layer.name: layer.numel for layer in self.store.layers}
        return tuple(
            TracedUnit(
                layer=unit.layer,
                slot=unit.slot,
                position=places[unit.layer],
                block=unit.layer.startswith("layers"),
                nbytes=4 * numel[unit.layer],
                numel=numel[unit.layer],
                moving=unit.slot != "frozen",
            )
            for unit in self.store.units
        )

    @property
    def full(self) -> int:
        """Bytes of a full save, raw."""
        return sum(unit.nbytes for unit in self.traced if unit.moving)

    def begin(self) -> None:
        """The job line of an incarnation."""
        self.tell(
            JobLine(
                started=self.started,
                epoch=self.store.epoch,
                framework="torch",
                world_size=1,
                policy="parity",
                settings=self.settings,
                units=self.traced,
            )
        )

    def decide(self, step: int, *, drift: float | None = 0.01, stall: float = 0.5, **more: Any) -> None:
        """A decision, at as many seconds as steps, that saved nothing unless ``saved`` says so."""
        drifts = () if drift is None else tuple(drift if one.moving else None for one in self.traced)
        values = {"staleness": tuple(0 for _ in drifts), "interval": 10, **more}
        self.tell(DecisionLine(step=step, seconds=float(step), commits=0, drift=drifts, stall=stall, **values))

    def save(
        self, step: int, *, layers: Sequence[str] | None = None, drift: float = 0.01, without: Sequence[Unit] = ()
    ) -> SaveId:
        """A decision that saves ``layers``, and its commit a second later. without: units that the health gate held
        back."""
        units = [one.unit for one in self.traced]
        first = not self.store.commits
        wanted = [unit for unit in units if first or layers is None or unit.layer in layers]
        wanted = [unit for unit in wanted if first or unit.slot != "frozen"]
        made = self.store.save(step, layers=layers, drift=drift)
        payload = self.store.payload(made)
        sizes = {
            units.index(unit): (4 * self._numel(unit), "raw", 0.0, None if first else drift)
            for unit in wanted
            if unit not in without
        }
        self.decide(step, drift=None if first else drift, saved={units.index(unit): "raw" for unit in wanted})
        written = payload.stat().st_size
        self.tell(CommitLine(step=step, seconds=step + 1.0, took=0.5, written=written, sizes=sizes))
        return made

    def fail(self, step: int, reason: str = "StorageError") -> None:
        """A save that failed."""
        self.decide(step, saved={0: "raw"})
        self.tell(FailedLine(step=step, seconds=step + 0.5, reason=reason))

    def restart(self, at: int, newest: int, later: float = 1000.0) -> None:
        """The next incarnation, which goes on at step ``at``."""
        self.store.restart()
        self.started += later
        self.begin()
        self.tell(ResumedLine(step=at, newest=newest, seconds=float(at)))

    def tell(self, line: Line) -> None:
        """Append it to the trace."""
        self.lines.append(line)
        with self.trace.open("ab") as file:
            file.write(to_line(line))

    def at(self, step: float) -> float:
        """The moment of a step, in seconds since 1970."""
        return self.started + step

    def _numel(self, unit: Unit) -> int:
        return next(layer.numel for layer in self.store.layers if layer.name == unit.layer)


def verified(count: int, damaged: Sequence[str] = (), problems: tuple[str, ...] = ()) -> VerifyReport:
    """Return the report of a verification of ``count`` commits."""
    states = [CommitState(SaveId.parse(name), "damaged", ()) for name in damaged]
    states += [CommitState(SaveId(number, 1), "ok", ()) for number in range(count - len(damaged))]
    return VerifyReport(tuple(states), problems, None, 0)
