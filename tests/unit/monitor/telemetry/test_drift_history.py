"""The ladder of earlier decisions: which ages are compared, how many are kept, and what is not known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from monitor.observe.drift_meter import Signature
from monitor.telemetry.drift_history import Compared, DriftHistory, compared_with
from tests.support.internals import history_bytes

WIDTH = 8


def signature(*values: float, finite: bool = True) -> Signature:
    return Signature(torch.tensor(values), (len(values),), finite)


def climbed(ladder: DriftHistory, decisions: int) -> list[Compared]:
    """At decision n the only value of the only unit is n + 1."""
    return [ladder.add(10 * n, [signature(n + 1.0)]) for n in range(decisions)]


@pytest.mark.parametrize("anchors", [1, 2, 6, 16])
def test_ages_are_about_powers_of_two(anchors: int) -> None:
    for number in range(300):
        ages = [number - at for at in compared_with(number, anchors)]
        assert ages == sorted(set(ages)) and all(1 <= age < 1 << anchors for age in ages)
        for j in range(anchors):
            if number >= 1 << j:
                assert any(1 << j <= age < 2 << j for age in ages)


@pytest.mark.parametrize("anchors", [1, 2, 6, 16])
def test_what_is_compared_is_what_was_added_then(anchors: int) -> None:
    ladder = DriftHistory(anchors, WIDTH)
    for number, compared in enumerate(climbed(ladder, 200)):
        assert compared.steps == tuple(10 * at for at in compared_with(number, anchors))
        for step, (moved, squared, unknown) in zip(compared.steps, compared.rows[:, 0].tolist(), strict=True):
            assert (moved, squared, unknown) == ((number - step / 10) ** 2, (step / 10 + 1) ** 2, 0.0)
        assert history_bytes(ladder) <= (anchors + 2) * WIDTH * 4


def test_the_first_decision_is_compared_with_nothing() -> None:
    ladder = DriftHistory(6, WIDTH)
    assert history_bytes(ladder) == 0
    assert [one.steps for one in climbed(ladder, 2)] == [(), (0,)]


def test_a_second_decision_in_a_step_is_not_looked_at() -> None:
    ladder = DriftHistory(6, WIDTH)
    ladder.add(1, [signature(1.0)])
    assert ladder.add(1, [signature(1.0)]).steps == ()
    assert ladder.add(2, [signature(3.0)]).rows.tolist() == [[[4.0, 1.0, 0.0]]]


def test_what_is_not_known_then_or_now_is_told_so() -> None:
    ladder = DriftHistory(6, WIDTH)
    sick = signature(math.nan, finite=False)
    ladder.add(0, [signature(1.0), None, signature(1.0), sick, signature(1.0)])
    rows = ladder.add(1, [signature(3.0), signature(1.0), None, signature(1.0), sick]).rows
    assert rows.tolist() == [[[4.0, 1.0, 0.0], *[[0.0, 0.0, 1.0]] * 4]]


def test_units_of_several_sizes_and_none_at_all() -> None:
    ladder = DriftHistory(2, WIDTH)
    ladder.add(0, [signature(*[1.0] * WIDTH), signature()])
    rows = ladder.add(1, [signature(*[2.0] * WIDTH), signature()]).rows
    assert rows[0].tolist() == [pytest.approx([8.0, 8.0, 0.0]), [0.0, 0.0, 0.0]]
    nothing = DriftHistory(2, WIDTH)
    nothing.add(0, [])
    assert nothing.add(1, []).rows.shape == (1, 0, 3)


def test_what_is_kept_does_not_change_with_what_was_given() -> None:
    ladder, live = DriftHistory(2, WIDTH), torch.ones(1)
    ladder.add(0, [Signature(live, (1,), True)])
    live += 1
    assert ladder.add(1, [Signature(live, (1,), True)]).rows.tolist() == [[[1.0, 1.0, 0.0]]]


@pytest.mark.parametrize("allowed", range(4))
def test_a_call_that_failed_is_repeated(allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank that lacked memory for a moment would leave out a sum that the others begin."""
    ladder, same = DriftHistory(3, WIDTH), DriftHistory(3, WIDTH)
    climbed(ladder, 4), climbed(same, 4)
    stack, calls = torch.stack, iter(range(allowed))

    def full(*args: Any, **settings: Any) -> torch.Tensor:
        if next(calls, None) is None:
            raise MemoryError
        return stack(*args, **settings)

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(torch, "stack", full)
        ladder.add(40, [signature(9.0)])
    found, expected = (one.add(40, [signature(9.0)]) for one in (ladder, same))
    assert found.steps == expected.steps == (30, 20, 0) and torch.equal(found.rows, expected.rows)
