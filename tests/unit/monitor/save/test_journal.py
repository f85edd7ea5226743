"""The journal of a job of one process: what it brings back, and where it stops.

A job ends here without a save, as one that died: its steps since the last save are in the journal only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from store.catalog import open_catalog
from store.journal import find_chain, journal_catalog
from store.names import SaveId
from store.storage.local import LocalFiles
from tests.support.journaled import DAMAGE, STEPS, Job, damage, records, same, straight

POLICIES: list[Any] = ["full", {"name": "parity", "k": 2}, {"name": "parity", "k": 4}]
POLICIES += [{"name": "filter", "n": 1, "m": 3}, {"name": "threshold", "threshold": 0.05}]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_job_that_died_goes_on_from_the_step_before(tmp_path: Path, policy: Any) -> None:
    losses, end = straight()
    assert Job().run(Job().attach(tmp_path / "x"), 1)  # another store: nothing is shared
    job = Job()
    job.run(job.attach(tmp_path / "store", every=2, policy=policy), 7)
    for died in (10, STEPS):
        job = Job(seed=2)
        ckpt = job.attach(tmp_path / "store", every=2, policy=policy)
        seen = job.run(ckpt, died)
        assert ckpt.certificate is not None
        assert ckpt.certificate.exact
        assert ckpt.certificate.max_staleness == 0
        assert seen == {step: losses[step] for step in seen}
        assert min(seen) == (7 if died == 10 else 10)
    assert same(job.state(), end)


OPTIMIZERS = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.Rprop, {}),
]


@pytest.mark.parametrize(("kind", "hyper"), OPTIMIZERS)
def test_the_jobs_own_optimizer_takes_the_steps(tmp_path: Path, kind: Any, hyper: Any) -> None:
    losses, end = straight(kind=kind, **hyper)
    job = Job(kind=kind, **hyper)
    job.run(job.attach(tmp_path), 7)
    job = Job(seed=2, kind=kind, **hyper)
    seen = job.run(job.attach(tmp_path), STEPS)
    assert seen == {step: losses[step] for step in range(7, STEPS)}
    assert same(job.state(), end)


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_record_ends_the_replay_before_it(tmp_path: Path, how: str) -> None:
    losses, end = straight()
    job = Job()
    job.run(job.attach(tmp_path), 8, after=lambda _: None)
    (tmp_path / "manifests/00000008-000001.json").unlink()
    assert [one.name for one in records(tmp_path)] == [f"{step:08d}-000001" for step in range(5, 9)]
    DAMAGE[how](tmp_path / "journal/segments/00000007-000001")
    job = Job(seed=2)
    ckpt = job.attach(tmp_path)
    seen = job.run(ckpt, STEPS)
    assert min(seen) == 6
    assert ckpt.certificate is not None
    assert ckpt.certificate.exact
    assert seen == {step: losses[step] for step in range(6, STEPS)}
    assert same(job.state(), end)


@pytest.mark.parametrize("how", DAMAGE)
def test_a_resume_tells_where_the_journal_is_not_followed(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    job.run(job.attach(tmp_path), 8, after=lambda _: None)
    (tmp_path / "manifests/00000008-000001.json").unlink()
    DAMAGE[how](tmp_path / "journal/segments/00000007-000001")
    ckpt = Job(seed=2).attach(tmp_path)
    caplog.clear()
    assert ckpt.resume() == 6
    assert "followed up to step 6" in caplog.text or "lead on from step 6 of the journal's 8" in caplog.text
    ckpt.close(save=False)


class Momentum(torch.optim.AdamW):
    """Not known to update each element by itself."""


def test_a_composite_that_the_journal_does_not_bring_forward_tells_of_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(kind=Momentum)
    job.run(job.attach(tmp_path, every=2, policy={"name": "parity", "k": 2}), 7)
    job = Job(seed=2, kind=Momentum)
    ckpt = job.attach(tmp_path, every=2, policy={"name": "parity", "k": 2})
    ckpt.resume()
    assert "lead on from" not in caplog.text
    ckpt.close(save=False)


def test_a_composite_whose_records_are_damaged_is_resumed_as_one(tmp_path: Path) -> None:
    job = Job()
    job.run(job.attach(tmp_path, every=2, policy={"name": "parity", "k": 2}), 8)
    damage(tmp_path / "journal/segments/00000007-000001/rank-00000.safetensors")
    job = Job(seed=2)
    ckpt = job.attach(tmp_path, every=2, policy={"name": "parity", "k": 2})
    ckpt.resume()
    assert ckpt.certificate is not None
    assert not ckpt.certificate.exact
    assert ckpt.certificate.step == 8
    assert ckpt.certificate.max_staleness == 2
    ckpt.finish(clean=False)


@pytest.mark.parametrize("policy", ["full", {"name": "parity", "k": 2}], ids=str)
@pytest.mark.parametrize("died", [6, 7])
def test_a_commit_with_a_damaged_slot_gives_way_to_an_older_one_and_its_records(
    tmp_path: Path, policy: Any, died: int
) -> None:
    losses, end = straight()
    job = Job()
    job.run(job.attach(tmp_path, every=2, policy=policy), died)
    damage(tmp_path / "segments/00000006-000001/rank-00000.safetensors")
    job = Job(seed=2)
    ckpt = job.attach(tmp_path, every=2, policy=policy)
    seen = job.run(ckpt, STEPS)
    assert min(seen) == died
    assert ckpt.certificate is not None
    assert ckpt.certificate.exact
    assert seen == {step: losses[step] for step in range(died, STEPS)}
    assert same(job.state(), end)


def test_without_the_records_between_a_damaged_slot_is_replaced_by_its_older_version(tmp_path: Path) -> None:
    job = Job()
    job.run(job.attach(tmp_path, every=2), 7)
    damage(tmp_path / "segments/00000006-000001/rank-00000.safetensors")
    DAMAGE["gone"](tmp_path / "journal/segments/00000005-000001")
    job = Job(seed=2)
    ckpt = job.attach(tmp_path, every=2)
    ckpt.resume()
    assert ckpt.certificate is not None
    assert not ckpt.certificate.exact
    assert (ckpt.certificate.step, ckpt.certificate.max_staleness) == (6, 2)
    ckpt.finish(clean=False)


def test_a_composite_that_is_not_joined_is_resumed_as_one_by_any_implementation(tmp_path: Path) -> None:
    """Where samples cannot be compared, since the steps are computed otherwise."""
    settings: dict[str, Any] = {"every": 2, "policy": {"name": "parity", "k": 4}}
    job = Job(foreach=False)
    job.run(job.attach(tmp_path, **settings), 8)
    damage(tmp_path / "journal/segments/00000005-000001/rank-00000.safetensors")
    again = Job(seed=2, fused=True)
    ckpt = again.attach(tmp_path, **settings, resume={"at": "newest"})
    assert ckpt.resume() == 8
    assert ckpt.certificate is not None
    assert not ckpt.certificate.exact
    assert ckpt.certificate.max_staleness == 6
    ckpt.finish(clean=False)


class Langevin(torch.optim.Optimizer):
    """Adds noise to each step: its numbers come from torch's global generator."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad + 0.1 * torch.randn_like(parameter), alpha=-group["lr"])
        return closure


def test_an_optimizer_that_draws_random_numbers(tmp_path: Path) -> None:
    losses, end = straight(kind=Langevin)
    job = Job(kind=Langevin)
    job.run(job.attach(tmp_path), 7)
    job = Job(seed=2, kind=Langevin)
    seen = job.run(job.attach(tmp_path), STEPS)
    assert seen == {step: losses[step] for step in range(7, STEPS)}
    assert same(job.state(), end)


def test_a_layer_of_another_branch_is_not_joined(tmp_path: Path) -> None:
    """The records lead to the step of a layer's version, but from another state than that in which it was saved."""
    settings: dict[str, Any] = {"every": 2, "policy": {"name": "parity", "k": 2}}
    job = Job()
    job.run(job.attach(tmp_path, **settings), 9)
    catalog = open_catalog(LocalFiles(tmp_path))
    versions = {SaveId.parse(name) for name in catalog.manifest(SaveId(8, 1)).groups}
    assert versions == {SaveId(6, 1), SaveId(8, 1)}
    journal = journal_catalog(catalog)
    chain = find_chain(journal, SaveId(8, 1), versions)
    assert chain is not None
    assert [one.save.step for one in chain.steps] == [7, 8, 9]
    assert find_chain(journal, SaveId(8, 1), {SaveId(6, 2), SaveId(8, 1)}) is None


def test_the_hyperparameters_of_the_script_hold_after_a_replay(tmp_path: Path) -> None:
    job = Job(weight_decay=0.1)
    job.run(job.attach(tmp_path), 7)
    again = Job(seed=2, weight_decay=0.3)
    ckpt = again.attach(tmp_path, resume={"hyperparameters": "script"})
    assert ckpt.resume() == 7
    assert again.optimizer.param_groups[0]["weight_decay"] == 0.3
    ckpt.finish(clean=False)


def test_steps_taken_by_another_implementation_are_not_called_exact(tmp_path: Path) -> None:
    job = Job(foreach=False)
    job.run(job.attach(tmp_path), 7)
    again = Job(seed=2, fused=True)
    ckpt = again.attach(tmp_path)
    assert ckpt.resume() == 7
    assert ckpt.certificate is not None
    assert not ckpt.certificate.exact
    ckpt.finish(clean=False)


def test_a_skipped_optimizer_step_is_a_step(tmp_path: Path) -> None:
    """As a gradient scaler skips one after an overflow: counters go on, weights stay."""
    job, kept = Job(), dict[int, Any]()
    ckpt = job.attach(tmp_path)
    ckpt.resume()
    for step in range(1, 8):
        if step == 6:
            job.schedule.step()
        else:
            job.train_one_step()
        ckpt.step()
        ckpt.flush()
        kept[step] = {name: value.clone() for name, value in job.model.state_dict().items()}
    ckpt.finish(clean=False)
    again = Job(seed=2)
    ckpt = again.attach(tmp_path)
    assert ckpt.resume() == 7
    assert same(again.model.state_dict(), kept[7])
    assert again.schedule.last_epoch == job.schedule.last_epoch
    ckpt.finish(clean=False)
