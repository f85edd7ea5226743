"""Save and resume in one process, on a real store; policy `observe`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import monitor
from store.catalog import open_catalog
from store.storage.local import LocalFiles
from tests.support.jobs import LAYERS, committed_steps, job, same, skip_reason
from tests.support.launch import ENVIRONMENT
from tests.support.slow import others_slow


def test_resume_of_an_empty_store_returns_step_0(store: Path) -> None:
    with job(store) as one:
        assert one.ckpt.resume() == 0
        assert one.ckpt.certificate is None


def test_resume_restores_the_saved_state_exactly(store: Path) -> None:
    with job(store) as one:
        for _ in range(3):
            one.step()
        saved = one.weights()
    with job(store) as other:
        assert not same(other.weights(), {key: saved[key] for key in other.weights()})
        assert other.ckpt.resume() == 3
        assert same(other.weights(), saved)
        assert other.ckpt.certificate is not None and other.ckpt.certificate.exact


def test_layers_returns_the_names_in_model_order(store: Path) -> None:
    with job(store) as one:
        assert one.ckpt.layers == LAYERS


def test_step_decides_every_n_steps(store: Path) -> None:
    with job(store, every=3) as one:
        reports = [one.step() for _ in range(7)]
    assert [report.step for report in reports if report is not None] == [3, 6]
    assert committed_steps(store) == [3, 6]


def test_save_saves_all_units_regardless_of_policy(store: Path) -> None:
    with job(store, every=100, policy={"name": "parity", "k": 2}) as one:
        one.update()
        one.ckpt.step()
        report = one.ckpt.save(wait=True)
        assert report.skipped is None and report.saved is not None
        assert {unit.layer for unit in report.saved} == set(LAYERS)
        assert committed_steps(store) == [1]
        assert one.metric("driftpoint_saves_total") == 1


def test_save_after_a_partial_save_of_the_same_step(store: Path) -> None:
    """As when a signal asks for a full save in the very step that a partial one was made in."""
    with job(store, policy={"name": "parity", "k": 2}) as one:
        one.step()
        one.step()
        saved = one.weights()
        assert one.ckpt.save(wait=True).skipped is None
        assert one.metric("driftpoint_failures_total", reason="StorageError") == 0
    with job(store) as other:
        assert other.ckpt.resume() == 2
        assert same(other.weights(), saved)
        assert other.ckpt.certificate is not None and other.ckpt.certificate.exact


def test_close_waits_for_the_pending_save(store: Path) -> None:
    with job(store) as one:
        one.step(flush=False)
    assert committed_steps(store) == [1]


WITHOUT_CLOSE = """
import sys, time
from pathlib import Path
from tests.support.jobs import Job
job = Job(Path(sys.argv[1]))
job.hook().before = lambda operation, path: time.sleep(0.05) if operation == "write" else None
job.step(flush=False)
if sys.argv[2] == "error":
    raise RuntimeError("training went wrong")
"""


@pytest.mark.parametrize(("ending", "code"), others_slow([("end", 0), ("error", 1)]))
def test_a_script_without_close_commits_its_last_save(store: Path, ending: str, code: int) -> None:
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", WITHOUT_CLOSE, store, ending], env=environment, check=False)
    assert done.returncode == code
    assert committed_steps(store) == [1]


def test_a_step_after_a_resume_marks_the_commit_proven(store: Path) -> None:
    with job(store) as one:
        one.step()
    with job(store, every=10) as other:
        other.ckpt.resume()
        other.ckpt.flush()
        assert open_catalog(LocalFiles(store)).proven() == set()
        other.step()
        assert {save.name for save in open_catalog(LocalFiles(store)).proven()} == {"00000001-000001"}


def test_retention_prunes_old_commits_and_segments(store: Path) -> None:
    with job(store, retention={"keep_last": 2, "log_spaced": False}) as one:
        for _ in range(5):
            one.step()
    assert committed_steps(store) == [4, 5]
    assert sorted(path.name[:8] for path in (store / "segments").iterdir()) == ["00000004", "00000005"]


def test_parity_continues_its_rotation_after_a_restart(store: Path) -> None:
    policy = {"name": "parity", "k": 2}
    with job(store, policy=policy) as one:
        first = [one.step() for _ in range(2)]
    with job(store, policy=policy, resume={"at": "newest"}) as other:
        other.ckpt.resume()
        second = [other.step() for _ in range(2)]
    saved = [sorted({unit.layer for unit in report.saved or ()}) for report in [*first, *second] if report]
    assert saved == [sorted(LAYERS), sorted(LAYERS[0::2]), sorted(LAYERS[1::2]), sorted(LAYERS[0::2])]


class UnusualModel(torch.nn.Module):
    """Tied weights, batch norm, and parameters that are empty, without dimensions, or unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.gain = torch.nn.Parameter(torch.tensor(1.0))
        self.empty = torch.nn.Parameter(torch.empty(0, 3))
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))) * self.gain


@pytest.mark.parametrize("staging", ["eager", "lazy"])
def test_unusual_parameters_are_restored(store: Path, staging: str) -> None:
    def made() -> tuple[UnusualModel, torch.optim.Optimizer, monitor.Checkpointer]:
        model = UnusualModel()
        optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
        settings = {"store": str(store), "every": 1, "metrics": {"enabled": False}, "staging": staging}
        return model, optimizer, monitor.attach((model, optimizer), settings)

    model, optimizer, ckpt = made()
    with ckpt:
        for _ in range(2):
            ckpt.flush()
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
            ckpt.step()
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model, optimizer, ckpt = made()
    with ckpt:
        assert ckpt.resume() == 2
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, saved[name]), name
        assert model.unused not in optimizer.state
        assert optimizer.state[model.gain]["step"] == 2
        assert set(optimizer.state[model.gain]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def test_observe_reports_what_it_would_save_and_writes_nothing(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="driftpoint")
    with job(store, policy={"name": "observe", "inner": {"name": "parity", "k": 2}}) as one:
        assert one.ckpt.resume() == 0
        reports = [one.step() for _ in range(3)]
        assert one.ckpt.save(wait=True, strict=False).skipped == "observe"
    assert not store.exists()
    assert [skip_reason(report) for report in reports] == ["observe"] * 3
    layers = [sorted({unit.layer for unit in report.saved or ()}) for report in reports if report]
    assert layers == [sorted(LAYERS), sorted(LAYERS[0::2]), sorted(LAYERS[1::2])]
    assert "would have saved 15 of 15 layer slots" in caplog.text
    assert one.metric("driftpoint_observed_saves_total") == 4
    assert one.metric("driftpoint_saves_total") == 0
    drift = {one.unit: one.drift for one in reports[2].stats} if reports[2] else {}
    assert all(value is not None and value > 0 for value in drift.values())


def test_observe_resumes_from_a_store_without_changing_it(store: Path) -> None:
    with job(store) as one:
        one.step()
        saved = one.weights()
    before = sorted((str(path), path.stat().st_mtime_ns) for path in store.rglob("*"))
    with job(store, policy={"name": "observe"}) as other:
        assert other.ckpt.resume() == 1
        assert same(other.weights(), saved)
        other.step()
    assert sorted((str(path), path.stat().st_mtime_ns) for path in store.rglob("*")) == before
