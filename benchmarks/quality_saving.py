"""A learner attached to a row's store: what is saved when and in how many bytes; and a resume from a copy of it.

Every save is committed before the row's next decision, so none is skipped because another one is under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import monitor
from benchmarks.learner import Learner
from benchmarks.quality_rows import Row
from store.certificate import Certificate
from store.names import WEIGHTS


class Saving:
    """Attached at the row's first save.

    saved: step of the course -> payload bytes, of all saves but the first, and of the journal's records since the one
    before."""

    def __init__(self, learner: Learner, row: Row, store: Path) -> None:
        self._learner, self._row, self._store = learner, row, store
        self._begun = learner.schedule.last_epoch
        self._ckpt = monitor.attach((learner.model, learner.optimizer), row.config(store, learner), state=learner.state)
        self._ckpt.resume()
        self._ckpt.save(wait=True)
        self.saved: dict[int, int] = {}
        self._pending: int | None = None
        self._records: set[str] = set()  # that were counted

    def step(self) -> None:
        """After a step of the learner."""
        step = self._learner.schedule.last_epoch
        if (step - self._begun) % self._row.every == 0:
            self.settle()
        report = self._ckpt.step()
        if report is None or report.skipped == "nothing":
            return
        if report.skipped is not None:
            raise RuntimeError(f"{self._row.name}: the save of step {step} was skipped: {report.skipped}")
        self._pending = step

    def settle(self) -> None:
        """Wait for the save under way, and for records of the journal."""
        if self._row.journaled:
            self._ckpt.flush()
        if self._pending is not None:
            self._ckpt.flush()
            newest = max((self._store / "segments").iterdir(), key=lambda folder: folder.name)
            if int(newest.name.split("-")[0]) != self._pending - self._begun:
                raise RuntimeError(f"{self._row.name}: the save of step {self._pending} was not committed")
            written = [newest, *self._new_records()]
            self.saved[self._pending] = sum(
                file.stat().st_size for one in written for file in one.glob("*.safetensors")
            )
            self._pending = None

    def _new_records(self) -> list[Path]:
        found = [one for one in self._store.glob("journal/segments/*") if one.name not in self._records]
        self._records |= {one.name for one in found}
        return found

    def close(self) -> None:
        """Let go of the store."""
        self.settle()
        self._ckpt.close(save=False)


@dataclass(frozen=True)
class Resumed:
    """step: of the course, that was resumed."""

    step: int
    certificate: Certificate


def resume(stranger: Learner, row: Row, store: Path) -> Resumed:
    """Into a learner that begun with other values; nothing is saved from then on."""
    with monitor.attach(
        (stranger.model, stranger.optimizer), row.config(store, stranger), state=stranger.state
    ) as ckpt:
        ckpt.resume()
    if ckpt.certificate is None:
        raise RuntimeError(f"{row.name}: the store holds nothing")
    return Resumed(stranger.schedule.last_epoch, ckpt.certificate)


def told(certificate: Certificate, pace: Mapping[str, float]) -> dict[str, float]:
    """What the certificate says in sums over layers. pace: drift of a layer's weights a step.

    w, m, v: of squared drift, by slot. mp, vp: the same of moments, times pace squared, which is what policy budget
    weighs by its lags squared. lag: steps, mean staleness of weights by bytes. oldest: weights' staleness."""
    moving = [unit for unit in certificate.units if unit.moving]
    weights = [unit for unit in moving if unit.slot == WEIGHTS]
    sums: dict[str, float] = {"w": 0.0, "m": 0.0, "v": 0.0, "mp": 0.0, "vp": 0.0}
    for unit in moving:
        name = {WEIGHTS: "w", "exp_avg": "m", "exp_avg_sq": "v"}[unit.slot]
        squared = (unit.drift or 0.0) ** 2
        sums[name] += squared
        if unit.slot != WEIGHTS:
            sums[name + "p"] += squared * pace.get(unit.layer, 0.0) ** 2
    drifts = [unit.drift or 0.0 for unit in weights]
    sums["max"], sums["mean"] = max(drifts), sum(drifts) / len(drifts)
    sums["lag"] = sum(unit.staleness for unit in weights) / len(weights)
    sums["oldest"] = float(max(unit.staleness for unit in weights))
    return {name: float(f"{value:.4g}") for name, value in sums.items()}


def rewound(certificate: Certificate, numel: Mapping[str, int], pace: Mapping[str, float]) -> dict[str, int]:
    """By how many steps each rule goes back, rounded to a save that the composite still reads from.

    mean: staleness of weights, by values. paced: by values and pace. oldest: of weights."""
    weights = [unit for unit in certificate.units if unit.slot == WEIGHTS]
    steps = sorted({unit.staleness for unit in certificate.units if unit.moving})

    def mean(weigh: Mapping[str, float]) -> float:
        return sum(weigh[unit.layer] * unit.staleness for unit in weights) / sum(weigh[unit.layer] for unit in weights)

    ages = {
        "mean": mean(numel),
        "paced": mean({layer: count * pace[layer] for layer, count in numel.items()}),
        "oldest": float(max(unit.staleness for unit in weights)),
    }
    return {rule: min(steps, key=lambda step: (abs(step - age), -step)) for rule, age in ages.items()}
