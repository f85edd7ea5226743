"""What the precision benchmark rests on: when runs fail, the noise of exact ones, rows that change the state."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import pytest
import torch

from benchmarks.learner import Course, Learner, Shape, reference
from benchmarks.precision import exact_spread
from benchmarks.precision_rows import EVERY, EXACT, ROWS, Row, four_bits, nudge
from benchmarks.precision_run import failures, run_seed
from benchmarks.turns import MomentsInTurn
from policies.base import Budget, History, UnitStats
from store.names import Unit

TINY = Shape(hidden=32, inner=64, layers=2, heads=2, windows=2, length=16)


def learner(seed: int = 0) -> Learner:
    made = Learner(TINY, Course(reference(), 1e-3, 20), seed)
    for _ in range(2):
        made.step()
    return made


def test_failures_leave_each_stretch_a_save() -> None:
    for seed in range(20):
        moments = failures(300, seed)
        assert moments == failures(300, seed)
        assert all(later - earlier > EVERY for earlier, later in zip([0, *moments], [*moments, 300], strict=True))


def test_spread_of_exact_runs_is_that_of_the_steps_they_lose() -> None:
    # Three independent, even losses of 0 to 9 steps, on a loss that falls by one a step.
    losses = {step: -float(step) for step in range(100 - 3 * EVERY + 1, 101)}
    assert exact_spread(losses) == pytest.approx(sqrt(3 * (EVERY**2 - 1) / 12))


def test_every_moment_has_its_turn_once_in_a_round() -> None:
    stats = [
        UnitStats(Unit(f"layers.{i}", slot), i, True, 64, None, 10)
        for i in range(11)
        for slot in ("fp32", "exp_avg", "exp_avg_sq")
    ]
    rounds = [MomentsInTurn(8).select(stats, Budget(), History(step=10 * n, commits=n)).saved for n in range(1, 9)]
    for one in stats:
        assert sum(one.unit in saved for saved in rounds) == (8 if one.unit.slot == "fp32" else 1)


def test_a_nudge_is_one_unit_in_the_last_place() -> None:
    made = learner()
    before = made.flat("fp32")
    nudge(made)
    assert ((made.flat("fp32").view(torch.int32) - before.view(torch.int32)).abs() == 1).all()


def test_four_bits_leave_sixteen_values_a_block_and_never_less_of_a_second_moment() -> None:
    made = learner()
    exact = {slot: made.flat(slot) for slot in ("exp_avg", "exp_avg_sq")}
    four_bits(made)
    weight = made.model.model.layers[0].mlp.up_proj.weight
    for slot in exact:
        blocks = made.optimizer.state[weight][slot].view(-1, 64)
        assert max(len(block.unique()) for block in blocks) <= 16
    assert (made.flat("exp_avg_sq") >= exact["exp_avg_sq"] * (1 - 1e-6)).all()


@pytest.mark.slow
def test_exact_resumes_end_where_the_uninterrupted_run_was(tmp_path: Path) -> None:
    course = Course(reference(), 1e-3, 60)

    def begin(stranger: bool) -> Learner:
        return Learner(TINY, course, 1, init=99 if stranger else None)

    outcome = run_seed(begin, 60, 1, [row for row in ROWS if row.change is None], tmp_path)
    exact, compact = outcome.rows[EXACT], outcome.rows["compact"]
    assert exact.step < 60
    assert exact.loss == outcome.uninterrupted[exact.step]
    assert compact.step == exact.step
    assert compact.loss != exact.loss
    assert compact.loss == pytest.approx(exact.loss, abs=0.1)
    assert exact.save_bytes == 12.0
    assert 4.008 < compact.save_bytes < 4.1  # the small norms' blocks are not full


def test_rows_without_a_policy_of_their_own_save_everything() -> None:
    assert Row("any").config(Path("store")).policy == "full"
