"""What each slot costs by itself: states of which one slot is some steps old, or coarse, and the rest is as it was.

They are put together from saves that a store really holds. What a resume would not give (moments of one step with
weights of another, all layers alike) is what tells the slots apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.learner import Learner
from benchmarks.precision_rows import nudge
from benchmarks.quality_curves import went_on
from benchmarks.quality_rows import Row
from benchmarks.quality_saving import Saving
from benchmarks.quality_settings import Setting
from benchmarks.quality_trunk import Base, State, place, placed, run, take
from benchmarks.quality_versions import Values, drift, put, stored_at
from store.names import WEIGHTS, Unit

SLOTS = {"w": WEIGHTS, "m": "exp_avg", "v": "exp_avg_sq"}
_KEEP = {"retention": {"keep_last": 100, "log_spaced": False}}
_STORES = {name: Row(name, 10, {"encoding": name, **_KEEP}) for name in ("raw", "compact", "careful")}

Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """name: of the slots, w, m and v. age: in steps. encoding: of the version that they are taken from.

    half: of every other layer only. special: ``zero`` first moments, or weights ``nudged`` in the last place."""

    name: str
    age: int = 0
    encoding: str = "raw"
    half: bool = False
    special: str = ""


def cases(ages: Sequence[int], few: bool) -> Iterator[Case]:
    """few: only what another beta2 may change."""
    least, most = ages[0], ages[-1]
    yield Case("exact")
    yield from (Case("w", age) for age in (ages if not few else ages[1:]))
    yield from (Case("m", age) for age in (least, most))
    yield from (Case("v", age) for age in ages[1:])
    if few:
        return
    yield from (Case(name, most) for name in ("mv", "wmv"))
    yield from (Case("w", age, half=True) for age in ages[-2:])
    yield from (Case(name, encoding="compact") for name in SLOTS)
    yield Case("w", encoding="careful")
    yield Case("m", special="zero")
    yield Case("w", special="nudged")


def calibration(setting: Setting, seed: int, begun: Base, folder: Path, few: bool) -> Iterator[Record]:
    """The run, and a record for each case at each of two or three steps."""
    saving: dict[str, Saving] = {}
    places: dict[int, State] = {}

    def each(learner: Learner) -> None:
        if not saving:
            saving.update({name: Saving(learner, row, folder / name) for name, row in _STORES.items()})
        else:
            for one in saving.values():
                one.step()
        places[learner.schedule.last_epoch] = placed(learner)

    trunk = run(setting, seed, begun, each)
    for one in saving.values():
        one.close()
    common = {"setting": setting.name, "seed": seed}
    yield {**common, "part": "trunk", "losses": trunk.losses, "shorter": trunk.shorter, "drift": begun.drift}
    read = _Read(folder, setting.span.start)
    for at in moments(setting, 2 if few else 3):
        for case in cases(setting.ages, few):
            learner = take(setting.begin(seed), begun.state)
            moved = read.build(learner, case, at)
            place(learner, places[at])
            losses = went_on(setting, learner)
            yield {**common, "part": "calibration", "case": vars(case), "at": at, "drift": moved, "losses": losses}


def moments(setting: Setting, count: int) -> list[int]:
    """So many saves among the failures, each with saves of all ages before it."""
    span = setting.span
    first = max(span.first, span.start + max(setting.ages))
    tens = [step for step in range(first, span.last + 1) if (step - span.start) % 10 == 0]
    return sorted({tens[len(tens) * share // count] for share in range(count)})


class _Read:
    """Versions of the stores, each read once."""

    def __init__(self, folder: Path, first: int) -> None:
        self._folder, self._first = folder, first
        self._held: dict[tuple[str, int], Mapping[Unit, Values]] = {}

    def at(self, encoding: str, step: int) -> Mapping[Unit, Values]:
        key = (encoding, step)
        if key not in self._held:
            self._held[key] = stored_at(self._folder / encoding, step - self._first)
        return self._held[key]

    def build(self, learner: Learner, case: Case, at: int) -> dict[str, float]:
        """The state of ``at`` with what the case changes. Mean squared drift over layers, by slot, and of one step."""
        fresh = self.at("raw", at)
        old = self.at(case.encoding, at - case.age)
        slots = {SLOTS[letter] for letter in case.name} if case.name != "exact" else set()
        layers = list(dict.fromkeys(unit.layer for unit in fresh))
        taken = {
            unit: old[unit] for unit in fresh if unit.slot in slots and not (case.half and layers.index(unit.layer) % 2)
        }
        if case.special == "zero":
            taken = {unit: {name: torch.zeros_like(one) for name, one in held.items()} for unit, held in taken.items()}
        put(learner, {**fresh, **taken})
        if case.special == "nudged":
            nudge(learner)
        moved = drift(fresh, taken) if case.special != "zero" else dict.fromkeys(taken, 1.0)
        pace = drift(fresh, {unit: held for unit, held in self.at("raw", at - 10).items() if unit.slot == WEIGHTS})
        return _summed(moved, {unit.layer: value / 10 for unit, value in pace.items()}, len(layers))


def _summed(moved: Mapping[Unit, float], pace: Mapping[str, float], layers: int) -> dict[str, float]:
    told: dict[str, float] = {"pace2": fmean(value**2 for value in pace.values())}
    for letter, slot in SLOTS.items():
        of = {unit.layer: value for unit, value in moved.items() if unit.slot == slot}
        if of:
            told[letter] = sum(value**2 for value in of.values()) / layers
            told[letter + "p"] = sum(value**2 * pace[layer] ** 2 for layer, value in of.items()) / layers
    return {name: float(f"{value:.4g}") for name, value in told.items()}
