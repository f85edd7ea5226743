"""Damage against bytes: every row saves the same run, fails at the same moments, resumes, and goes on to the end.

A resume from one save goes on in the same way whenever after it the failure came, so a run is made for each state
that failures meet, and the steps lost are counted over all moments between the saves.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learner import Learner
from benchmarks.quality_rows import RULED, Row, rows
from benchmarks.quality_saving import Saving, resume, rewound, told
from benchmarks.quality_settings import Setting
from benchmarks.quality_trunk import Base, State, is_weights, place, placed, run
from store.names import WEIGHTS

Record = dict[str, Any]


def marks(setting: Setting, seed: int) -> list[int]:
    """Steps at which failures come, spread evenly, elsewhere for every seed."""
    span = setting.span
    width = (span.last - span.first) / setting.marks
    return [span.first + int(width * (number + (0.2 + 0.3 * seed) % 1)) for number in range(setting.marks)]


def curves(setting: Setting, seed: int, begun: Base, folder: Path, chosen: Callable[[Row], bool]) -> Iterator[Record]:
    """One record for the run, and one for each row."""
    made = [row for row in rows(begun.thresholds()) if chosen(row) and setting.runs(row.name, row.more)]
    yield from _Curve(setting, seed, begun, folder, made).records()


class _Curve:
    """One seed."""

    def __init__(self, setting: Setting, seed: int, begun: Base, folder: Path, made: Sequence[Row]) -> None:
        self._setting, self._seed, self._begun, self._folder = setting, seed, begun, folder
        self._made = made
        self._marks = marks(setting, seed)
        self._saving: dict[str, Saving] = {}
        self._places: dict[int, State] = {}
        self._states: dict[str, list[Record]] = {row.name: [] for row in made}
        self._pace = paces(begun)
        self._numel = 0

    def records(self) -> Iterator[Record]:
        """Runs it."""
        try:
            trunk = run(self._setting, self._seed, self._begun, self._each)
        finally:
            for one in self._saving.values():
                one.close()
        common = {"setting": self._setting.name, "seed": self._seed}
        told = {"losses": trunk.losses, "shorter": trunk.shorter, "drift": self._begun.drift}
        yield {**common, "part": "trunk", "numel": self._numel, **told}
        for row in self._made:
            named = {"row": row.name, "family": row.family, "every": row.every, "mark": row.mark}
            found = {"saved": self._saving[row.name].saved, "states": self._states[row.name]}
            yield {**common, "part": "curve", **named, **found}

    def _each(self, learner: Learner) -> None:
        step = learner.schedule.last_epoch
        if not self._saving:
            self._numel = sum(one.numel() for one in learner.model.parameters() if one.requires_grad)
            self._attach(learner)
        else:
            for one in self._saving.values():
                one.step()
        self._places[step] = placed(learner)
        if step in self._marks:
            for row in self._made:
                if not row.bytes_only:
                    self._fail(row, step)

    def _attach(self, learner: Learner) -> None:
        for number, row in enumerate(self._made):
            self._saving[row.name] = Saving(learner, row, self._folder / f"row-{number}")

    def _fail(self, row: Row, step: int) -> None:
        saving, states = self._saving[row.name], self._states[row.name]
        saving.settle()
        newest = step if row.journaled else max(saving.saved, default=self._setting.span.start)
        if any(one["step"] == newest for one in states) or (row.lossless and states):
            return
        store, own = self._folder / f"row-{self._made.index(row)}", self._folder / "own"
        shutil.copytree(store, own, ignore=shutil.ignore_patterns("LOCK"))
        stranger = self._setting.begin(self._seed, stranger=True)
        found = resume(stranger, row, own)
        shutil.rmtree(own)
        certificate = found.certificate
        if row.journaled and (found.step != step or not certificate.exact):
            raise RuntimeError(f"{row.name}: step {step} came back as {found.step}, exact: {certificate.exact}")
        state: Record = {"step": found.step, "certificate": told(certificate, self._pace)}
        back: dict[str, int] = {}
        if self._setting.rules and row.name in RULED:
            sizes = {unit.layer: unit.nbytes for unit in certificate.units if unit.slot == WEIGHTS}
            back = rewound(certificate, sizes, self._pace)
            state["rules"] = {}
        losses = went_on(self._setting, stranger)
        state["losses"] = losses
        for rule, steps in back.items():
            state["rules"][rule] = {"back": steps, "losses": self._rewound(row, found.step, steps, state)}
        states.append(state)

    def _rewound(self, row: Row, step: int, steps: int, state: Record) -> Record:
        """The same composite, gone on with ``steps`` earlier. One that another rule led to is not run again."""
        if steps == 0:
            return state["losses"]  # type: ignore[no-any-return]
        for other in state["rules"].values():
            if other["back"] == steps:
                return other["losses"]  # type: ignore[no-any-return]
        own = self._folder / "own"
        shutil.copytree(self._folder / f"row-{self._made.index(row)}", own, ignore=shutil.ignore_patterns("LOCK"))
        stranger = self._setting.begin(self._seed, stranger=True)
        resume(stranger, row, own)
        shutil.rmtree(own)
        place(stranger, self._places[step - steps])
        return went_on(self._setting, stranger)


def paces(begun: Base) -> dict[str, float]:
    """Drift of each layer's weights a step, over the shortest stretch that was probed."""
    return {
        name.rsplit("/", 1)[0]: drift[min(drift)] / min(drift)
        for name, drift in begun.drift.items()
        if is_weights(name)
    }


def went_on(setting: Setting, learner: Learner) -> dict[int, float]:
    """Losses from where the learner is to the end, by step of the course."""
    step, end = learner.schedule.last_epoch, setting.span.end
    losses = {step: learner.loss()}
    for reached in range(step + 1, end + 1):
        learner.step()
        if reached % setting.grid == 0 or reached == end:
            losses[reached] = learner.loss()
    return losses
