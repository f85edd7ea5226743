"""Bytes of saves on real training state: a learner at one rate, attached to a store in every way at once.

Everything goes through ``monitor.attach`` and is read back from what the stores hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

import monitor
from benchmarks.learner import Course, Learner, Shape, at_rate
from benchmarks.stored import SaveBytes, newest_save
from benchmarks.turns import TurnsConfig
from monitor.config.load import Config
from store.names import WEIGHTS

TURNS = 8
SLOTS = ("fp32", "exp_avg", "exp_avg_sq")

PLAIN: Mapping[str, Mapping[str, Any]] = {
    "raw": {},
    "raw, zstd 1": {"packing": 1},
    "compact": {"encoding": "compact"},
    "compact, zstd 1": {"encoding": "compact", "packing": 1},
    "compact, zstd 3": {"encoding": "compact", "packing": 3},
    "careful, zstd 1": {"encoding": "careful", "packing": 1},
}
"""Ways whose saves are all alike: the first ones are enough."""

LASTING: Mapping[str, Mapping[str, Any]] = {
    "raw, zstd 1, differences": {"packing": 1, "differences": True},
    "compact, zstd 1, differences": {"encoding": "compact", "packing": 1, "differences": True},
    "compact, zstd 3, differences": {"encoding": "compact", "packing": 3, "differences": True},
    "eighth, zstd 1, differences": {"encoding": "compact", "packing": 1, "differences": True, "turns": TURNS},
}
"""Ways whose saves depend on those before. eighth: all weights, and the moments of every eighth layer in turn."""


@dataclass(frozen=True)
class Seen:
    """One way at one rate: bytes a parameter, by slot and of all files; means over all saves but the first, which is
    always full. least: of the smallest save. differing: share of the weights stored as differences, and the bytes that
    each of those takes."""

    slots: Mapping[str, float]
    files: float
    least: float
    differing: tuple[float, float]

    @property
    def values(self) -> float:
        """All slots."""
        return sum(self.slots.values())


@dataclass(frozen=True)
class AtRate:
    """drift: of all weights from one save to the next, the middle one. ways: what saves took."""

    rate: float
    drift: float
    ways: Mapping[str, Seen]


class Warm:
    """What all rates begin from: one short pretraining."""

    def __init__(self, shape: Shape, course: Course) -> None:
        self.shape, self.course = shape, course
        self.learner = Learner(shape, course, 0)
        for _ in range(course.steps):
            self.learner.step()

    def at(self, rate: float) -> Learner:
        """Going on at another rate, over text in another order."""
        learner = Learner(self.shape, at_rate(self.course, rate), 1)
        learner.model.load_state_dict(self.learner.model.state_dict())
        state = self.learner.optimizer.state_dict()["state"]
        learner.optimizer.load_state_dict({**learner.optimizer.state_dict(), "state": state})
        return learner


def at_one_rate(warm: Warm, rate: float, saves: int, every: int, folder: Path) -> AtRate:
    """Train on and save every so many steps, in every way."""
    learner, drifts = warm.at(rate), []
    seen: dict[str, list[SaveBytes]] = {name: [] for name in (*PLAIN, *LASTING)}
    with _attached(learner, {**PLAIN, **LASTING}, every, folder) as ckpts:
        before = None
        for number in range(saves):
            for _ in range(every):
                learner.step()
                reports = {name: ckpt.step() for name, ckpt in ckpts.items()}
            for name, ckpt in ckpts.items():
                report = reports[name]
                if report is None or report.skipped is not None:
                    raise RuntimeError(f"{name}: save {number + 1} did not come about: {report}")
                ckpt.flush()
                seen[name].append(newest_save(folder / name))
            if number == 2:
                for name in PLAIN:
                    ckpts.pop(name).close(save=False)
            weights = learner.flat("fp32")
            if before is not None:
                drifts.append(float(torch.linalg.vector_norm(weights - before) / torch.linalg.vector_norm(before)))
            before = weights
    return AtRate(rate, median(drifts), {name: _seen(found[1:], learner.parameters) for name, found in seen.items()})


def _seen(saves: list[SaveBytes], parameters: int) -> Seen:
    numel, nbytes = (sum(one.differences.get(WEIGHTS, (0, 0))[k] for one in saves) for k in (0, 1))
    return Seen(
        {slot: fmean(one.slots.get(slot, 0) for one in saves) / parameters for slot in SLOTS},
        fmean(one.files for one in saves) / parameters,
        min(one.values for one in saves) / parameters,
        (numel / (len(saves) * parameters), nbytes / max(1, numel)),
    )


@contextmanager
def _attached(
    learner: Learner, ways: Mapping[str, Mapping[str, Any]], every: int, folder: Path
) -> Iterator[dict[str, monitor.Checkpointer]]:
    ckpts = {name: attached(learner, folder / name, {"every": every, **settings}) for name, settings in ways.items()}
    try:
        yield ckpts
    finally:
        for ckpt in ckpts.values():
            ckpt.close(save=False)


def attached(learner: Learner, store: Path, settings: Mapping[str, Any]) -> monitor.Checkpointer:
    """A checkpointer on a store of its own."""
    values = {
        "store": str(store),
        "staging": "eager",
        "metrics": {"enabled": False},
        "retention": {"keep_last": 1, "log_spaced": False},
        **settings,
    }
    config = (TurnsConfig if "turns" in values else Config).model_validate(values)
    ckpt = monitor.attach((learner.model, learner.optimizer), config, state=learner.state)
    ckpt.resume()
    return ckpt
