"""What a failure costs in quality, by how the state was saved: loss above the uninterrupted run's at equal compute.

    python benchmarks/precision.py [--seeds 5] [--steps 300] [--settings pretraining fine-tuning] [--rows NAME ...]
                                 [--json FILE]

A Llama of about a million parameters learns to read bytes: from scratch at a rate of 1e-3, and, from a checkpoint
that this script makes first, another text at 5e-5. Each run fails three times and resumes in a new model from its
store; what is saved, and how, is the row (``benchmarks/precision_rows.py``). All of it goes through
``monitor.attach`` and ``resume``. One thread.

The noise that a row is held against is the exact rows': what the final loss would have been at other moments of
failure. A run that resumes exactly is the uninterrupted run with the lost steps left off its end, bit for bit
(checked), so that noise can be read off the uninterrupted run. A second one is the row whose weights are nudged by
one unit in the last place at each resume. Exits 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from benchmarks.figures import Figure, report  # noqa: E402
from benchmarks.learner import Course, Learner, Shape, reference, sources  # noqa: E402
from benchmarks.precision_rows import COMPACT, EVERY, EXACT, PARTS, ROWS, Row  # noqa: E402
from benchmarks.precision_run import Begin, Outcome, run_seed  # noqa: E402

SHAPE = Shape()
PRETRAINED_STEPS = 1000
STRANGER = 1000
"""Added to a seed for the values that a resume must replace."""

NAMED = {row.name: row for row in (*ROWS, *PARTS)}

STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""97.5 % points of Student's t by degrees of freedom."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=5, choices=range(2, 11), metavar="2..10")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--rows", nargs="+", default=[row.name for row in ROWS], choices=list(NAMED), metavar="NAME")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name, row in NAMED.items() if name in (EXACT, *options.rows)]
    figures: list[Figure] = []
    for name in options.settings:
        setting = SETTINGS[name](options.steps)
        outcomes = []
        for seed in range(options.seeds):
            outcomes.append(_seed(setting, options.steps, seed, rows))
            _tell(name, seed, outcomes[-1])
        figures += summed_up(name, outcomes, rows)
    return report("loss after three failures, above the uninterrupted run at equal compute", figures, options.json)


@dataclass(frozen=True)
class Setting:
    """A course, and the weights that a run begins with; None for random ones."""

    course: Course
    weights: Mapping[str, torch.Tensor] | None = None

    def begin(self, seed: int) -> Begin:
        """Learners of one seed."""

        def learner(stranger: bool) -> Learner:
            made = Learner(SHAPE, self.course, seed, init=seed + STRANGER * stranger)
            if self.weights is not None and not stranger:
                made.model.load_state_dict(self.weights)
            return made

        return learner


def pretraining(steps: int) -> Setting:
    """From scratch."""
    return Setting(Course(sources(), 1e-3, steps))


def fine_tuning(steps: int) -> Setting:
    """Another text, from weights that are made here."""
    teacher = Learner(SHAPE, Course(sources(), 1e-3, PRETRAINED_STEPS), STRANGER - 1)
    for _ in range(PRETRAINED_STEPS):
        teacher.step()
    return Setting(Course(reference(), 5e-5, steps), teacher.model.state_dict())


SETTINGS = {"pretraining": pretraining, "fine-tuning": fine_tuning}


def _seed(setting: Setting, steps: int, seed: int, rows: Sequence[Row]) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="driftpoint-bench-") as folder:
        return run_seed(setting.begin(seed), steps, seed, rows, Path(folder))


def _tell(setting: str, seed: int, outcome: Outcome) -> None:
    """A line a seed, while the others still run."""
    gaps = ", ".join(f"{name} {outcome.gap(name):+.5f}" for name in outcome.rows)
    lost = max(outcome.uninterrupted) - outcome.rows[EXACT].step
    spread = exact_spread(outcome.uninterrupted)
    print(f"{setting}, seed {seed}: {lost} steps lost; spread of exact {spread:.5f}; gaps: {gaps}", flush=True)


def summed_up(setting: str, outcomes: Sequence[Outcome], rows: Sequence[Row]) -> list[Figure]:
    """Means over seeds; the rows against the exact one, seed by seed."""
    ends = [one.uninterrupted[max(one.uninterrupted)] for one in outcomes]
    strays = sum(one.rows[EXACT].loss != one.uninterrupted[one.rows[EXACT].step] for one in outcomes)
    spread = fmean(exact_spread(one.uninterrupted) for one in outcomes)
    figures = [
        Figure(f"{setting}: loss", fmean(ends), "nats", f"uninterrupted; +-{stdev(ends):.2g} over {len(ends)} seeds"),
        Figure(f"{setting}: exact resumes off by a bit", strays, "", "the uninterrupted run", 0),
        Figure(f"{setting}: spread of exact", spread, "nats", "other moments of failure"),
    ]
    for row in rows:
        figures += _of_row(setting, row, outcomes, spread)
    return figures


def _of_row(setting: str, row: Row, outcomes: Sequence[Outcome], spread: float) -> list[Figure]:
    name = f"{setting}, {row.name}"
    gaps = [one.gap(row.name) for one in outcomes]
    figures = [
        Figure(f"{name}: bytes", fmean(one.rows[row.name].save_bytes for one in outcomes), "a parameter"),
        Figure(f"{name}: gap", fmean(gaps), "nats", f"uninterrupted; +-{stdev(gaps):.2g} over seeds"),
    ]
    if row.name != EXACT:
        apart = [one.gap(row.name) - one.gap(EXACT) for one in outcomes]
        mean, around = fmean(apart), STUDENT[len(apart) - 1] * stdev(apart) / sqrt(len(apart))
        goal = spread if row.name == COMPACT else None
        figures += [
            Figure(f"{name}: difference", mean, "nats", f"exact, seed by seed; +-{around:.2g} at 95 %"),
            Figure(f"{name}: upper end of that", mean + around, "nats", "spread of exact", goal),
        ]
    return figures


def exact_spread(uninterrupted: Mapping[int, float]) -> float:
    """Standard deviation of the final loss over all moments of three failures, when each resumes exactly."""
    lost = Counter(sum(offsets) for offsets in product(range(EVERY), repeat=3))
    last = max(uninterrupted)
    total = sum(lost.values())
    mean = sum(count * uninterrupted[last - steps] for steps, count in lost.items()) / total
    return sqrt(sum(count * (uninterrupted[last - steps] - mean) ** 2 for steps, count in lost.items()) / total)


if __name__ == "__main__":
    sys.exit(main())
