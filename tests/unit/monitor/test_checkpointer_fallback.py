"""Keep the previous version of a unit whose newest values are NaN, Inf or damaged on disk."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from store.catalog import open_catalog
from store.errors import NotFiniteError, SaveError
from store.names import Unit
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.jobs import Job, committed_steps, flip_bit, job


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("policy", ["full", {"name": "threshold", "threshold": 0.0}])
def test_a_layer_with_nan_or_inf_keeps_its_previous_version(store: Path, policy: object, broken: float) -> None:
    with job(store, policy=policy) as one:
        one.step()
        good = one.weights()
        one.update()
        with torch.no_grad():
            one.model.blocks[1][0].weight[0, 0] = broken
        one.ckpt.step()
        one.ckpt.flush()
        then = one.weights()
    with job(store) as other:
        assert other.ckpt.resume() == 2
        assert other.ckpt.certificate is not None and not other.ckpt.certificate.exact
        for name, tensor in other.weights().items():
            expected = good if name.startswith("blocks.1.") else then
            assert torch.equal(tensor, expected[name]), name


def test_the_first_save_is_withheld_if_a_layer_is_not_finite(store: Path) -> None:
    with job(store, policy={"name": "threshold", "threshold": 0.0}) as one:
        one.update()
        with torch.no_grad():
            one.model.head.bias[0] = float("nan")
        report = one.ckpt.step()
        assert report is not None and report.skipped == "withheld"
        assert one.metric("driftpoint_saves_skipped_total", reason="withheld") == 1
    assert committed_steps(store) == []


def test_the_first_full_save_fails_if_a_layer_is_not_finite(store: Path) -> None:
    with job(store) as one:
        one.update()
        with torch.no_grad():
            one.model.head.bias[0] = float("nan")
        one.ckpt.step()
    assert one.metric("driftpoint_failures_total", reason="NotFiniteError") == 1
    assert committed_steps(store) == []


def test_a_flipped_byte_makes_only_its_unit_fall_back(store: Path) -> None:
    states = {}
    with job(store) as one:
        for step in (1, 2):
            one.step()
            states[step] = one.weights()
    flip_bit(store, Unit("blocks.1", "exp_avg"), "00000002-000001")
    with job(store) as other:
        assert other.ckpt.resume() == 2
        certificate = other.ckpt.certificate
        assert certificate is not None and not certificate.exact
        fallen = [(unit.layer, unit.slot, unit.step) for unit in certificate.units if unit.fallback]
        assert fallen == [("blocks.1", "exp_avg", 1)]
        assert any("blocks.1/exp_avg" in problem for problem in certificate.problems)
        assert other.metric("driftpoint_resume_fallback_units") == 1
        for name, tensor in other.weights().items():
            fell = name.startswith("blocks.1.") and name.endswith("/exp_avg")
            assert torch.equal(tensor, states[1 if fell else 2][name]), name
        other.step()
    assert verify(open_catalog(LocalFiles(store))).commits


@pytest.mark.parametrize("policy", ["full", {"name": "parity", "k": 2}])
def test_where_nan_ends_the_job_nothing_is_committed_beside_it(store: Path, policy: Any) -> None:
    """One layer has NaN: the others are not committed either, so that a supervisor sees no progress."""
    one = Job(store, policy=policy, bounds={"nonfinite": "raise"})
    for _ in range(2):
        one.step()
    before = committed_steps(store)
    one.model.head.bias.data.fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="head"):
        for _ in range(2):
            one.ckpt.step()
            one.ckpt.flush()
    assert committed_steps(store) == before
    with pytest.raises(SaveError):
        one.ckpt.close()
    assert committed_steps(store) == before


def test_a_layer_that_is_finite_again_ends_the_job_once_only(store: Path) -> None:
    one = Job(store, every=2, bounds={"nonfinite": "raise"})
    one.ckpt.resume()
    raised = []
    for step in range(1, 11):
        one.update()
        if step == 4:
            clean = copy.deepcopy((one.model.state_dict(), one.optimizer.state_dict()))
            one.model.head.bias.data[0] = float("nan")
        try:
            one.ckpt.step()
            one.ckpt.flush()
        except NotFiniteError:
            raised.append(step)
        if step == 5:
            one.model.load_state_dict(clean[0])
            one.optimizer.load_state_dict(clean[1])
    assert raised == [6]
    one.ckpt.close(save=False)
    assert committed_steps(store) == [2, 8, 10]
