"""What a script does beside the optimizer's step interrupts the journal; a resume names the step whose state it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from store.errors import ConfigError
from tests.support.journaled import Job, keep, same


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


def test_the_trainer_of_hugging_face_refuses_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="the Trainer fixes its place in the data"):
        monitor.CheckpointCallback({"store": str(tmp_path), "journal": {"enabled": True}})


def test_what_is_rounded_is_no_base(tmp_path: Path) -> None:
    for settings in ({"encoding": "compact"}, {"memory": {"enabled": True, "encoding": "compact"}}):
        with pytest.raises(ConfigError, match="encoding: raw"):
            Job().attach(tmp_path, **settings)
