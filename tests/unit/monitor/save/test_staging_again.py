"""Saves of the same units take the buffers of the one before; others get theirs one by one, and none is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from monitor.save.async_copy import CopyTiming
from monitor.save.staging import Stager
from monitor.types import DecisionResult
from store.errors import StorageError
from store.names import Unit
from tests.support.hooked import nothing
from tests.support.internals import buffers_of, saver_of, staging_buffers
from tests.support.jobs import Job, committed_steps, job, same

UNITS = 15  # of five layers
SETTINGS: list[dict[str, Any]] = [
    {},
    {"policy": {"name": "parity", "k": 2}},
    {"policy": {"name": "filter", "n": 1, "m": 3}},
    {"policy": {"name": "threshold", "threshold": 1e-3}, "bounds": {"max_staleness": 3}},
    {"encoding": "compact"},
    {"encoding": "compact", "encode": "staging"},
    {"staging": "lazy"},
]


def resumed(store: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    with job(store, **settings) as two:
        two.update()
        two.ckpt.resume()
        return two.weights()


def counted(one: Job) -> dict[Unit, int]:
    """Sets of buffers that each unit has."""
    free = staging_buffers(one.ckpt)
    return {unit: free.count(unit) for unit in free}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_unit_has_one_set_of_buffers_whatever_is_saved(settings: dict[str, Any], tmp_path: Path) -> None:
    with job(tmp_path / "s", **settings) as one:
        one.ckpt.resume()
        for step in range(1, 13):
            one.step()
            if step % 5 == 0:
                one.ckpt.save(wait=True)
                assert counted(one) == dict.fromkeys(counted(one), 1) and len(counted(one)) == UNITS
        expected = one.weights()
        one.ckpt.save(wait=True)
    if "encoding" not in settings:
        assert same(resumed(tmp_path / "s", settings), expected)


def test_a_save_of_the_same_units_uses_the_same_buffers_and_holds_its_own_state(tmp_path: Path) -> None:
    with job(tmp_path / "s") as one:
        one.ckpt.resume()
        one.step()
        one.step()  # the layout is known
        first, staged = buffers_of(one.ckpt), saver_of(one.ckpt).task.staged  # type: ignore[union-attr]
        one.step()
        assert saver_of(one.ckpt).task.staged is staged and buffers_of(one.ckpt) == first  # type: ignore[union-attr]
        one.step()
        expected = one.weights()
    assert committed_steps(tmp_path / "s")[-1] == 4
    assert same(resumed(tmp_path / "s", {}), expected)


def test_a_parameter_that_is_frozen_meanwhile_takes_the_next_save_apart(tmp_path: Path) -> None:
    with job(tmp_path / "s") as one:
        one.ckpt.resume()
        for _ in range(3):
            one.step()
        one.model.head.weight.requires_grad_(False)
        for _ in range(3):
            one.step()
        expected = one.weights()
        one.ckpt.save(wait=True)
        assert set(counted(one).values()) == {1}
    assert same(resumed(tmp_path / "s", {}), expected)


def test_a_failed_save_gives_its_buffers_back(tmp_path: Path) -> None:
    def refuse(operation: str, _: str) -> None:
        if operation == "create":
            raise StorageError("no write")

    with job(tmp_path / "s") as one:
        one.ckpt.resume()
        for _ in range(2):
            one.step()
        hooked = one.hook()
        hooked.before = refuse
        one.step()
        hooked.before = nothing
        one.step()
        assert counted(one) == {}  # the save under way has them
        one.ckpt.save(wait=True)
        assert counted(one) == dict.fromkeys(counted(one), 1) and len(counted(one)) == UNITS
        expected = one.weights()
    assert same(resumed(tmp_path / "s", {}), expected)


def test_a_save_that_cannot_be_staged_gives_its_buffers_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with job(tmp_path / "s") as one:
        one.ckpt.resume()
        for _ in range(2):
            one.step()
        with monkeypatch.context() as patch:
            patch.setattr(CopyTiming, "start", lambda *_: 1 / 0)
            one.step()
        one.step()
        one.ckpt.save(wait=True)
        assert counted(one) == dict.fromkeys(counted(one), 1) and len(counted(one)) == UNITS
        expected = one.weights()
    assert same(resumed(tmp_path / "s", {}), expected)


def test_the_order_of_a_decision_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Stager.stage_all

    def backwards(self: Stager, decided: DecisionResult, *rest: Any) -> Any:
        saved = dict(reversed(decided.saved.items()))
        return real(self, replace(decided, saved=saved), *rest)

    with job(tmp_path / "s", staging="eager") as one:
        one.ckpt.resume()
        for _ in range(3):
            one.step()
        monkeypatch.setattr(Stager, "stage_all", backwards)
        one.step()
        expected = one.weights()
    assert committed_steps(tmp_path / "s")[-1] == 4
    assert same(resumed(tmp_path / "s", {}), expected)
