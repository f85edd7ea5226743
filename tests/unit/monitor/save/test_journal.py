"""The journal of a job of one process: what it brings back, where it stops, and what it never does.

A job ends here without a save, as one that died: its steps since the last save are in the journal only.
"""

from __future__ import annotations

import copy
import json
import logging
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from store.catalog import open_catalog
from store.errors import ConfigError, DriftpointError, FencedError, NothingToResumeError
from store.journal import find_chain, journal_catalog, prune_journal
from store.names import SaveId
from store.segment import write_segment
from store.session import claim_epoch
from store.storage.local import LocalFiles

STEPS = 12


class Job:
    """A small job whose data comes from torch's global generator, with dropout, a buffer and a schedule."""

    def __init__(self, seed: int = 1, kind: Any = torch.optim.AdamW, **hyper: Any) -> None:
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)) for _ in range(4)]
        self.model = nn.Sequential(*blocks)
        self.optimizer = kind(self.model.parameters(), **{"lr": 1e-2, **hyper})
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)

    def attach(self, store: Path, **settings: Any) -> monitor.Checkpointer:
        settings = {"store": str(store), "every": 4, "journal": {"enabled": True}, **settings}
        settings.setdefault("metrics", {"enabled": False})
        return monitor.attach((self.model, self.optimizer), settings, state=[self.schedule])

    def train_one_step(self) -> float:
        x = torch.randn(5, 6)
        loss = (self.model(x) - x.roll(1, 1)).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def run(
        self,
        ckpt: monitor.Checkpointer,
        last: int,
        before: Callable[[int], None] = lambda _: None,
        after: Callable[[int], None] = lambda _: None,
    ) -> dict[int, float]:
        """Train up to step ``last`` and die. before, after: called around ``ckpt.step()`` of a step."""
        losses = {}
        for step in range(ckpt.resume(), last):
            losses[step] = self.train_one_step()
            before(step + 1)
            ckpt.step()
            ckpt.flush()
            after(step + 1)
        ckpt.finish(clean=False)
        return losses

    def state(self) -> Mapping[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}


def straight(**job: Any) -> tuple[dict[int, float], Mapping[str, Any]]:
    """The losses and the end of a run without Driftpoint."""
    run = Job(**job)
    return {step: run.train_one_step() for step in range(STEPS)}, run.state()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


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


def records(store: Path) -> list[Path]:
    return sorted((store / "journal/segments").iterdir())


def damage(path: Path) -> None:
    """Flip a bit in the middle of the largest tensor's bytes."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_gradient(record: Path) -> None:
    """Flip a bit of the first gradient."""
    part, path = json.loads((record / "rank-00000.json").read_bytes())["body"], record / "rank-00000.safetensors"
    entry = next(entry for entry in part["entries"] if entry["slot"] == "grad")
    data = bytearray(path.read_bytes())
    data[part["header_bytes"] + entry["offset"]] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "gradient flipped": damage_gradient,
    "flipped": lambda one: damage(one / "rank-00000.safetensors"),
    "torn": lambda one: (one / "rank-00000.safetensors").write_bytes(b"torn"),
    "part lost": lambda one: (one / "rank-00000.json").unlink(),
    "part flipped": lambda one: damage(one / "rank-00000.json"),
    "swapped": lambda one: (one / "rank-00000.safetensors").write_bytes(
        (one.parent / "00000005-000001/rank-00000.safetensors").read_bytes()
    ),
    "gone": lambda one: one.rename(one.parent.parent / "elsewhere"),
}


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


def test_moments_that_a_script_changes_are_not_those_of_the_record(tmp_path: Path) -> None:
    job, kept = Job(), dict[int, Any]()

    def reset(step: int) -> None:
        if step == 6:
            for state in job.optimizer.state.values():
                state["exp_avg"].zero_()

    job.run(job.attach(tmp_path), 7, before=reset, after=keep(job, kept))
    again = Job(seed=2)
    ckpt = again.attach(tmp_path)
    first = ckpt.resume()
    assert first == 5
    assert same(again.state(), kept[first])
    ckpt.finish(clean=False)


def test_records_of_an_abandoned_branch_are_not_followed(tmp_path: Path) -> None:
    """A job goes back by a resume in mid-run, sees other data, and saves before the step that it had reached."""
    job = Job()
    ckpt = job.attach(tmp_path, every=100)
    ckpt.resume()
    job.train_one_step()
    ckpt.step()
    ckpt.save(wait=True)
    for _ in range(5):
        job.train_one_step()
        ckpt.step()
    ckpt.flush()
    assert len(records(tmp_path)) == 5
    kept = {one.name: one for one in records(tmp_path)}
    hidden = tmp_path / "hidden"
    (tmp_path / "journal/segments").rename(hidden)
    assert ckpt.resume() == 1
    hidden.rename(tmp_path / "journal/segments")
    torch.manual_seed(77)
    for _ in range(2):
        job.train_one_step()
        ckpt.step()
    ckpt.save(wait=True)
    reached = {name: value.clone() for name, value in job.model.state_dict().items()}
    ckpt.finish(clean=False)
    assert {f"{step:08d}-000001" for step in range(4, 7)} <= kept.keys() & {one.name for one in records(tmp_path)}
    assert find_chain(journal_catalog(open_catalog(LocalFiles(tmp_path))), SaveId(3, 2), ()) is None
    job = Job(seed=2)
    ckpt = job.attach(tmp_path, every=100)
    assert ckpt.resume() == 3
    assert same(job.model.state_dict(), reached)
    ckpt.finish(clean=False)


def keep(job: Job, kept: dict[int, Any]) -> Callable[[int], None]:
    """Return what copies the state of each step."""

    def after(step: int) -> None:
        kept[step] = copy.deepcopy(job.state())

    return after


@pytest.mark.parametrize("policy", ["full", {"name": "parity", "k": 2}], ids=str)
@pytest.mark.parametrize("step", [5, 6, 7, 8])
def test_a_resume_goes_back_to_a_step_and_a_failure_after_it_does_not_return(
    tmp_path: Path, policy: Any, step: int
) -> None:
    settings, kept = {"every": 2, "policy": policy}, dict[int, Any]()
    job = Job()
    job.run(job.attach(tmp_path, **settings), 9, after=keep(job, kept))
    again = Job(seed=2)
    ckpt = again.attach(tmp_path, **settings)
    assert ckpt.resume(step=step) == step
    assert same(again.state(), kept[step])
    assert again.schedule.last_epoch == step
    assert ckpt.certificate is not None
    assert ckpt.certificate.exact
    ckpt.finish(clean=False)
    third = Job(seed=3)
    ckpt = third.attach(tmp_path, **settings)
    assert ckpt.resume() == step
    assert same(third.state(), kept[step])
    torch.manual_seed(99)  # other data
    third.train_one_step()
    ckpt.step()
    ckpt.flush()
    reached = copy.deepcopy(third.state())
    ckpt.finish(clean=False)
    fourth = Job(seed=4)
    ckpt = fourth.attach(tmp_path, **settings)
    assert ckpt.resume() == step + 1
    assert same(fourth.state(), reached)
    ckpt.finish(clean=False)


def test_a_job_goes_back_in_mid_run(tmp_path: Path) -> None:
    job, kept = Job(), dict[int, Any]()
    ckpt = job.attach(tmp_path)
    ckpt.resume()
    for step in range(1, 8):
        job.train_one_step()
        ckpt.step()
        ckpt.flush()
        keep(job, kept)(step)
    assert ckpt.resume(step=5) == 5
    assert same(job.state(), kept[5])
    job.train_one_step()
    ckpt.step()
    ckpt.flush()
    keep(job, kept)(6)
    ckpt.finish(clean=False)
    again = Job(seed=2)
    ckpt = again.attach(tmp_path)
    assert ckpt.resume() == 6
    assert same(again.state(), kept[6])
    ckpt.finish(clean=False)


def test_a_resume_goes_back_to_a_commit_without_the_journal(tmp_path: Path) -> None:
    job, kept, off = Job(), dict[int, Any](), {"every": 2, "journal": {"enabled": False}}
    job.run(job.attach(tmp_path, **off), 7, after=keep(job, kept))
    again = Job(seed=2)
    ckpt = again.attach(tmp_path, **off)
    before = copy.deepcopy(again.state())
    for step in (3, 7, 100):
        with pytest.raises(NothingToResumeError, match=f"no commit is of step {step}"):
            ckpt.resume(step=step)
    assert same(again.state(), before)
    assert ckpt.resume(step=4) == 4
    assert same(again.state(), kept[4])
    ckpt.finish(clean=False)
    third = Job(seed=3)
    ckpt = third.attach(tmp_path, **off)
    assert ckpt.resume() == 4
    ckpt.finish(clean=False)


def test_a_step_behind_a_damaged_record_is_refused_and_nothing_is_saved(tmp_path: Path) -> None:
    job = Job()
    job.run(job.attach(tmp_path), 8)
    damage(tmp_path / "journal/segments/00000006-000001/rank-00000.safetensors")
    again = Job(seed=2)
    ckpt = again.attach(tmp_path)
    with pytest.raises(DriftpointError, match="step 7 cannot be reached"):
        ckpt.resume(step=7)
    with pytest.raises(ConfigError, match="failed midway"):
        ckpt.save(wait=True)
    assert ckpt.resume(step=5) == 5
    ckpt.finish(clean=False)


def test_there_is_no_step_to_go_back_to_in_an_empty_store(tmp_path: Path) -> None:
    ckpt = Job().attach(tmp_path)
    with pytest.raises(NothingToResumeError, match="no commit"):
        ckpt.resume(step=3)
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


def test_a_job_that_lost_the_store_removes_no_records(tmp_path: Path) -> None:
    job = Job()
    job.run(job.attach(tmp_path), 7)
    files = LocalFiles(tmp_path)
    claim_epoch(files, open_catalog(files).store_id)
    with pytest.raises(FencedError):
        prune_journal(files.below("journal"), files, 1, 7)
    assert [one.name for one in records(tmp_path)] == [f"{step:08d}-000001" for step in range(5, 8)]


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


def clamp(job: Job) -> None:
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.clamp_(-0.2, 0.2)


OTHERWISE: dict[str, tuple[Callable[[Job], Any], str]] = {
    "weights clamped": (clamp, "changed by other means"),
    "state dict loaded": (lambda job: job.model.load_state_dict(job.model.state_dict()), "by other means"),
    "two steps": (lambda job: job.train_one_step(), "two steps between two calls"),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_a_change_by_other_means_interrupts_the_journal_until_the_next_save(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, message = OTHERWISE[case]
    job, kept = Job(), dict[int, Any]()

    def after(step: int) -> None:
        kept[step] = {name: value.clone() for name, value in job.model.state_dict().items()}

    with caplog.at_level(logging.WARNING, "driftpoint"):
        job.run(job.attach(tmp_path), 7, before=lambda step: change(job) if step == 6 else None, after=after)
    assert sum(message in one for one in caplog.messages) == 1
    again = Job(seed=2)
    ckpt = again.attach(tmp_path)
    first = ckpt.resume()
    assert first in (4, 5, 6)
    assert same(again.model.state_dict(), kept[first])
    ckpt.finish(clean=False)


def test_a_save_after_an_interruption_is_continued(tmp_path: Path) -> None:
    job, kept = Job(), dict[int, Any]()

    def after(step: int) -> None:
        kept[step] = {name: value.clone() for name, value in job.model.state_dict().items()}

    job.run(job.attach(tmp_path), 11, before=lambda step: clamp(job) if step == 6 else None, after=after)
    again = Job(seed=2)
    ckpt = again.attach(tmp_path)
    assert ckpt.resume() == 11
    assert same(again.model.state_dict(), kept[11])
    ckpt.finish(clean=False)


def halve_gradients(job: Job) -> None:
    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    job.optimizer.register_step_pre_hook(hook)


def train_blocks_in_turns(job: Job) -> None:
    def drop(parameter: torch.Tensor) -> None:
        if (job.schedule.last_epoch + parameter.ndim) % 3:
            parameter.grad = None

    for parameter in job.model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)


def hold_a_teacher(job: Job) -> None:
    job.model.append(nn.Linear(6, 6).requires_grad_(False))


@torch.no_grad()
def move_the_teacher(job: Job, _: int) -> None:
    job.model[-1].weight.lerp_(job.model[0][0].weight, 0.1)  # type: ignore[index, union-attr, operator, call-overload]


def move_the_teacher_unseen(job: Job, _: int) -> None:
    job.model[-1].weight.data.lerp_(job.model[0][0].weight.data, 0.1)  # type: ignore[index, union-attr, operator, call-overload]


def clamp_unseen(job: Job, _: int) -> None:
    for parameter in job.model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def freeze(job: Job) -> None:
    job.model[0].requires_grad_(False)


def unfreeze(job: Job, step: int) -> None:
    job.model[0].requires_grad_(step >= 2)


def nothing(*_: Any) -> None:
    pass


BESIDE: dict[str, tuple[Callable[[Job], None], Callable[[Job, int], None], int]] = {
    "a hook that changes gradients": (halve_gradients, nothing, 7),
    "gradients of some parameters only": (train_blocks_in_turns, nothing, 7),
    "a frozen teacher moved": (hold_a_teacher, move_the_teacher, 4),
    "a teacher moved through data": (hold_a_teacher, move_the_teacher_unseen, 4),
    "weights clamped through data": (nothing, clamp_unseen, 4),
    "a layer that the next job has frozen": (freeze, unfreeze, 4),
}


@pytest.mark.parametrize("case", BESIDE)
def test_a_resume_gives_the_state_of_the_step_that_it_names(tmp_path: Path, case: str) -> None:
    """Whatever a script does beside the optimizer's step: that step may be the one of the last save."""
    prepare, beside, expected = BESIDE[case]
    job, kept = Job(), dict[int, Any]()
    prepare(job)

    def after(step: int) -> None:
        kept[step] = {name: value.clone() for name, value in job.model.state_dict().items()}

    job.run(job.attach(tmp_path), 7, before=lambda step: beside(job, step), after=after)
    again = Job(seed=2)
    prepare(again)
    ckpt = again.attach(tmp_path)
    assert ckpt.resume() == expected
    assert same(again.model.state_dict(), kept[expected])
    ckpt.finish(clean=False)


def test_a_state_changed_between_a_step_and_its_save_is_not_that_of_the_record(tmp_path: Path) -> None:
    job, kept = Job(), dict[int, Any]()
    ckpt = job.attach(tmp_path, every=100)
    ckpt.resume()
    for step in range(1, 8):
        job.train_one_step()
        ckpt.step()
        kept[step] = {name: value.clone() for name, value in job.model.state_dict().items()}
        if step == 5:
            clamp(job)
        if step in (2, 5):
            ckpt.save(wait=True)
    ckpt.finish(clean=False)
    (tmp_path / "manifests/00000005-000001.json").unlink()
    again = Job(seed=2)
    ckpt = again.attach(tmp_path)
    assert ckpt.resume() == 5
    assert same(again.model.state_dict(), kept[5])
    ckpt.finish(clean=False)


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


def test_the_trainer_of_hugging_face_refuses_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="the Trainer fixes its place in the data"):
        monitor.CheckpointCallback({"store": str(tmp_path), "journal": {"enabled": True}})


def test_an_optimizer_with_a_closure_is_told_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(kind=torch.optim.LBFGS, lr=0.1)
    ckpt = job.attach(tmp_path, self_check=False)
    ckpt.resume()
    x = torch.randn(5, 6)

    def closure() -> torch.Tensor:
        job.optimizer.zero_grad()
        loss = job.model(x).pow(2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(6):
        job.optimizer.step(closure)
        ckpt.step()
    ckpt.flush()
    assert sum("given a closure" in one for one in caplog.messages) == 1
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


def test_records_go_once_two_commits_do_not_need_them(tmp_path: Path) -> None:
    job = Job()
    job.run(job.attach(tmp_path), 11)
    assert [int(one.name[:8]) for one in records(tmp_path)] == list(range(5, 12))
    again = Job(seed=2)
    again.run(again.attach(tmp_path), 18)
    assert [int(one.name[:8]) for one in records(tmp_path)] == list(range(9, 19))


def test_records_that_a_composite_needs_stay(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"every": 2, "policy": {"name": "parity", "k": 4}}
    job, kept = Job(), dict[int, Any]()
    job.run(job.attach(tmp_path, **settings), 13, after=keep(job, kept))
    assert int(records(tmp_path)[0].name[:8]) == 3, "the commit of step 8 takes a layer of step 2"
    again = Job(seed=2)
    ckpt = again.attach(tmp_path, **settings)
    assert ckpt.resume() == 13
    assert same(again.state(), kept[13])
    ckpt.finish(clean=False)


def test_records_that_lead_to_the_newest_commit_stay(tmp_path: Path) -> None:
    """It may be damaged: then they lead there from the one before."""
    job = Job()
    ckpt = job.attach(tmp_path, every=100)
    ckpt.resume()
    for step in range(1, 10):
        job.train_one_step()
        ckpt.step()
        if step in (2, 4, 8):
            ckpt.save(wait=True)
    ckpt.flush()
    kept = copy.deepcopy(job.state())
    ckpt.finish(clean=False)
    assert [int(one.name[:8]) for one in records(tmp_path)] == list(range(5, 10))
    damage(tmp_path / "segments/00000008-000001/rank-00000.safetensors")
    again = Job(seed=2)
    ckpt = again.attach(tmp_path, every=100)
    assert ckpt.resume() == 9
    assert same(again.state(), kept)
    ckpt.finish(clean=False)


def test_what_is_rounded_is_no_base(tmp_path: Path) -> None:
    for settings in ({"encoding": "compact"}, {"memory": {"enabled": True, "encoding": "compact"}}):
        with pytest.raises(ConfigError, match="encoding: raw"):
            Job().attach(tmp_path, **settings)


def test_without_the_setting_nothing_is_written(tmp_path: Path) -> None:
    job = Job()
    job.run(job.attach(tmp_path, journal={"enabled": False}), 6)
    assert not (tmp_path / "journal").exists()


def test_gradients_of_bfloat16_take_two_bytes(tmp_path: Path) -> None:
    """As those that DeepSpeed hands to its optimizer in float32; with others beside, each as it needs."""
    kept: dict[str, torch.Tensor] = {}
    for name, rounded in (("short", True), ("long", False)):
        job = Job()
        for parameter in job.model.parameters() if rounded else ():
            parameter.register_hook(lambda grad: grad.bfloat16().float())  # type: ignore[no-untyped-call]
        ckpt = job.attach(tmp_path / name)
        job.run(ckpt, 7)
        kept[name] = torch.cat([one.flatten() for one in job.model.state_dict().values()])
    sizes = {name: (records(tmp_path / name)[-1] / "rank-00000.safetensors").stat().st_size for name in kept}
    count = sum(one.numel() for one in Job().model.parameters())
    assert 0 < sizes["long"] - sizes["short"] <= 2 * count + 64
    for name, state in kept.items():
        again = Job(seed=2)
        ckpt = again.attach(tmp_path / name)
        assert ckpt.resume() == 7
        assert torch.equal(torch.cat([one.flatten() for one in again.model.state_dict().values()]), state)
        ckpt.finish(clean=False)


@pytest.mark.parametrize("under_way", [False, True], ids=["", "a save under way"])
def test_the_save_of_a_preempted_job_does_not_wait_for_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, under_way: bool
) -> None:
    """Nor is it held up by a save that waits for them: storage may take longer for them than there is time."""
    job, release = Job(), threading.Event()

    def recorded(*given: Any) -> Any:
        assert release.wait(180)
        return write_segment(*given)

    preemption = {"signals": ["SIGTERM"], "exit": False, "grace_seconds": 120}
    ckpt = job.attach(tmp_path, every=4 if under_way else 100, preemption=preemption)
    ckpt.resume()
    job.train_one_step()
    ckpt.step()
    ckpt.save(wait=True)
    monkeypatch.setattr("monitor.save.journaled_saver.write_segment", recorded)
    for _ in range(2, 5):
        job.train_one_step()
        ckpt.step()
    signal.raise_signal(signal.SIGTERM)
    job.train_one_step()
    report = ckpt.step()
    assert report is not None
    assert report.preempted
    assert not release.is_set()
    assert report.skipped is None
    assert (tmp_path / "manifests/00000005-000001.json").exists()
    assert (tmp_path / "manifests/00000004-000001.json").exists() == under_way
    release.set()
    kept = copy.deepcopy(job.state())
    ckpt.finish(clean=False)
    again = Job(seed=2)
    ckpt = again.attach(tmp_path)
    assert ckpt.resume() == 5
    assert same(again.state(), kept)
    ckpt.finish(clean=False)


def test_a_save_is_written_after_the_records_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a composite may be the newest commit, and lack the steps that bring its layers together."""
    job, slow, written = Job(), threading.Event(), list[str]()
    ckpt = job.attach(tmp_path, every=2, policy={"name": "parity", "k": 2})
    ckpt.resume()
    for _ in range(3):
        job.train_one_step()
        ckpt.step()
        ckpt.flush()

    def recorded(files: Any, draft: Any, *more: Any) -> Any:
        assert slow.wait(60)
        part = write_segment(files, draft, *more)
        written.append(f"record {draft.save.step}")
        return part

    def saved(files: Any, draft: Any, *more: Any) -> Any:
        written.append(f"save {draft.save.step}")
        return write_segment(files, draft, *more)

    monkeypatch.setattr("monitor.save.journaled_saver.write_segment", recorded)
    monkeypatch.setattr("monitor.save.save_task.write_segment", saved)
    job.train_one_step()
    ckpt.step()
    threading.Timer(0.5, slow.set).start()
    ckpt.flush()
    assert written == ["record 4", "save 4"]
    ckpt.finish(clean=False)
