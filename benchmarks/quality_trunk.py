"""The run of a seed that nothing interrupts: what all rows share, and what they are held against.

It also tells what a step is worth (the loss at the end of runs that are some steps shorter), and how far units move in
so many steps, as the product measures it.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import monitor
from benchmarks.learner import Learner
from benchmarks.quality_settings import Setting
from store.names import WEIGHTS

PROBED = (10, 20, 40, 80)
"""Steps after which drift is looked at before the first save."""

State = dict[str, Any]


def state_of(learner: Learner) -> State:
    """A copy of everything that the next step depends on."""
    return copy.deepcopy(
        {
            "model": learner.model.state_dict(),
            "optimizer": learner.optimizer.state_dict(),
            "schedule": learner.schedule.state_dict(),
            "batches": learner.batches.state_dict(),
        }
    )


def take(learner: Learner, state: State) -> Learner:
    """The learner, with that state."""
    state = copy.deepcopy(state)
    learner.model.load_state_dict(state["model"])
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.schedule.load_state_dict(state["schedule"])
    learner.batches.load_state_dict(state["batches"])
    return learner


def placed(learner: Learner) -> State:
    """Where a learner is: its schedule, its place in the text, and the steps that its optimizer has counted."""
    counted = {one["step"].item() for one in learner.optimizer.state.values()}
    if len(counted) != 1:
        raise RuntimeError(f"parameters have taken {sorted(counted)} steps")
    return copy.deepcopy(
        {"schedule": learner.schedule.state_dict(), "batches": learner.batches.state_dict(), "counted": counted.pop()}
    )


def place(learner: Learner, where: State) -> None:
    """Go on from there, with the weights and moments that it has."""
    learner.schedule.load_state_dict(copy.deepcopy(where["schedule"]))
    learner.batches.load_state_dict(where["batches"])
    for one in learner.optimizer.state.values():
        one["step"].fill_(where["counted"])
    for group, rate in zip(learner.optimizer.param_groups, learner.schedule.get_last_lr(), strict=True):
        group["lr"] = rate


@dataclass(frozen=True)
class Base:
    """A run up to its first save. early: steps before it -> its state then, if the rate falls from there on.

    drift: unit -> steps since a version -> drift, by the product's sketch."""

    state: State
    early: Mapping[int, State]
    drift: Mapping[str, Mapping[int, float]]

    def thresholds(self) -> dict[int, dict[str, float]]:
        """Period -> slot -> what the median layer drifts in a period."""
        slots = {name.rsplit("/", 1)[1] for name in self.drift}
        return {
            period: {
                slot: median(steps[period] for name, steps in self.drift.items() if name.endswith(f"/{slot}"))
                for slot in slots
            }
            for period in PROBED
            if all(period in steps for steps in self.drift.values())
        }


def base(setting: Setting, seed: int) -> Base:
    """From the first step to the first save."""
    learner, probed = setting.begin(seed), min(max(PROBED), setting.span.start // 2)
    for _ in range(setting.span.start - probed):
        learner.step()
    early = {probed: state_of(learner)} if setting.span.start == setting.span.falls else {}
    drift: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory(prefix="driftpoint-bench-") as store:
        config = {
            "store": store,
            "every": 10,
            "policy": {"name": "threshold", "threshold": 1e9},
            "metrics": {"enabled": False},
            "trace": {"enabled": False},
        }
        with monitor.attach((learner.model, learner.optimizer), config, state=learner.state) as ckpt:
            ckpt.resume()
            ckpt.save(wait=True)
            for steps in range(1, probed + 1):
                learner.step()
                report = ckpt.step()
                for one in report.stats if report is not None else ():
                    if one.moving and one.drift is not None:
                        drift.setdefault(f"{one.unit.layer}/{one.unit.slot}", {})[steps] = float(f"{one.drift:.4g}")
    return Base(state_of(learner), early, drift)


@dataclass(frozen=True)
class Trunk:
    """losses: by step. places: of each step from the first save on.

    shorter: steps -> loss at the end of a run that is so much shorter: its rate began to fall so many steps earlier,
    and from then on it read the same text as this one."""

    losses: Mapping[int, float]
    places: Mapping[int, State]
    shorter: Mapping[int, float]


def run(setting: Setting, seed: int, begun: Base, each: Callable[[Learner], None]) -> Trunk:
    """From the first save to the end; ``each`` is called there, and after every step up to the last failure."""
    span = setting.span
    learner = take(setting.begin(seed), begun.state)
    losses: dict[int, float] = {}
    places: dict[int, State] = {}
    early = {steps: state for steps, state in begun.early.items() if span.start == span.falls}
    shorter: dict[int, float] = {}
    for step in range(span.start, span.end + 1):
        if step > span.start:
            learner.step()
        if step <= span.last:
            each(learner)
            places[step] = placed(learner)
        if (step % 5 == 0 and step <= span.last) or step % setting.grid == 0 or step == span.end:
            losses[step] = learner.loss()
        if span.falls - step in setting.delays:
            early[span.falls - step] = state_of(learner)
        if step == span.falls:
            shorter = {steps: _ended(setting, seed, state, placed(learner)) for steps, state in early.items()}
    return Trunk(losses, places, shorter)


def _ended(setting: Setting, seed: int, state: State, where: State) -> float:
    """Loss at the end of a run that goes on with that state from there."""
    learner = take(setting.begin(seed), state)
    place(learner, where)
    while learner.schedule.last_epoch < setting.span.end:
        learner.step()
    return learner.loss()


def is_weights(unit: str) -> bool:
    """Whether a unit's name is one of weights."""
    return unit.endswith(f"/{WEIGHTS}")
