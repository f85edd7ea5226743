"""One seed of the precision benchmark: a run that nothing interrupts, and runs that fail and resume, row by row.

Compute is what is equal: every run takes the same number of optimizer steps, and those that a failure throws away
count. So a run that lost steps ends that much earlier in its schedule. All rows share the run up to the first
failure, which saving does not touch; after each failure a new model, optimizer, schedule and place in the text,
begun with other values, take all of theirs from the store.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import monitor
from benchmarks.learner import Learner
from benchmarks.precision_rows import EVERY, Row
from benchmarks.stored import newest_save

_TURNS = 8
"""Saves over which bytes are averaged: a whole round of the row that takes the moments of eighths in turn."""

Begin = Callable[[bool], Learner]
"""A learner of the seed: as the run begins it, or, where asked for a stranger, with other values."""


@dataclass(frozen=True)
class Ended:
    """A run: its last step, the loss there, and what a save took, in bytes a parameter."""

    step: int
    loss: float
    save_bytes: float


@dataclass(frozen=True)
class Outcome:
    """Of one seed. uninterrupted: loss by step, of the last steps."""

    uninterrupted: Mapping[int, float]
    rows: Mapping[str, Ended]

    def gap(self, row: str) -> float:
        """Loss above the uninterrupted run's, after as many steps of compute."""
        return self.rows[row].loss - self.uninterrupted[max(self.uninterrupted)]


def failures(steps: int, seed: int) -> list[int]:
    """After how many executed steps a run fails: three times, at moments that follow from the seed."""
    chosen = random.Random(seed)
    return [round(share * steps) + chosen.randrange(EVERY) for share in (0.4, 0.6, 0.8)]


def run_seed(begin: Begin, steps: int, seed: int, rows: Sequence[Row], folder: Path) -> Outcome:
    """Every row's run, and the uninterrupted one."""
    moments = failures(steps, seed)
    learner = begin(False)
    stores = {row.name: folder / f"shared-{number}" for number, row in enumerate(_by_settings(rows))}
    sizes = _share(learner, moments[0], _by_settings(rows), stores)
    ended = {}
    for row in rows:
        shared = next(one.name for one in _by_settings(rows) if one.settings == row.settings)
        shutil.copytree(stores[shared], folder / "own")
        ended[row.name] = _fail_and_resume(begin, [*moments, steps], row, folder / "own", sizes[shared])
        shutil.rmtree(folder / "own")
    losses = {}
    for step in range(moments[0] + 1, steps + 1):
        learner.step()
        if step > steps - len(moments) * EVERY:
            losses[step] = learner.loss()
    return Outcome(losses, ended)


def _by_settings(rows: Sequence[Row]) -> list[Row]:
    """The first row of each settings: the others share its saves."""
    return [row for number, row in enumerate(rows) if all(row.settings != one.settings for one in rows[:number])]


def _share(learner: Learner, steps: int, rows: Sequence[Row], stores: Mapping[str, Path]) -> dict[str, float]:
    """Train up to the first failure and save in every way. Bytes a parameter and save, by row."""
    with ExitStack() as stack:
        saving = {row.name: stack.enter_context(_Saving(learner, row, stores[row.name])) for row in rows}
        for _ in range(steps):
            learner.step()
            for one in saving.values():
                one.step()
    return {name: fmean(one.sizes[-_TURNS:]) / learner.parameters for name, one in saving.items()}


def _fail_and_resume(begin: Begin, ends: Sequence[int], row: Row, store: Path, save_bytes: float) -> Ended:
    """From the first failure on. ends: executed steps at which a run fails, and at last those of the whole run."""
    for failed, end in pairwise(ends):
        learner = begin(True)
        with _Saving(learner, row, store) as saving:
            reached = saving.resumed + end - failed
            for _ in range(end - failed):
                learner.step()
                saving.step()
    return Ended(reached, learner.loss(), save_bytes)


class _Saving:
    """A learner attached to a store. Each save is committed before the next decision, so none is ever skipped."""

    def __init__(self, learner: Learner, row: Row, store: Path) -> None:
        self._store, self._steps, self._pending = store, 0, False
        self._ckpt = monitor.attach((learner.model, learner.optimizer), row.config(store), state=learner.state)
        self.sizes: list[int] = []
        self.resumed = self._ckpt.resume()
        if self.resumed and row.change is not None:
            row.change(learner)

    def step(self) -> None:
        self._steps += 1
        if (self.resumed + self._steps) % self._ckpt.config.every == 0:
            self._settled()
        report = self._ckpt.step()
        if report is not None:
            if report.skipped is not None:
                raise RuntimeError(f"the save of step {report.step} was skipped: {report.skipped}")
            self._pending = True

    def _settled(self) -> None:
        if self._pending:
            self._ckpt.flush()
            self.sizes.append(newest_save(self._store).values)
            self._pending = False

    def __enter__(self) -> _Saving:
        return self

    def __exit__(self, *_: object) -> None:
        self._settled()
        self._ckpt.close(save=False)
