"""What was attached changes in mid-run: a parameter from elsewhere, a new module, another optimizer. Training goes on,
saving stops with the reason rather than save a part and call it whole, and goes on once the job is whole again.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from store.errors import ConfigError, ModelMismatchError, UnsupportedError
from store.names import Unit
from tests.support.fingerprint import differing, of_job
from tests.support.jobs import Job, committed_steps, job, same, skip_reason

Change = Callable[[Job], Callable[[], None]]
"""Changes a job, and gives what undoes it."""


def another_group(one: Job) -> Callable[[], None]:
    first = one.optimizer.param_groups[0]
    one.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    return lambda: one.optimizer.param_groups.clear() or one.optimizer.param_groups.append(first)


def a_guest_in_a_group(one: Job) -> Callable[[], None]:
    members = one.optimizer.param_groups[0]["params"]
    members.append(nn.Parameter(torch.ones(3)))
    return lambda: members.__delitem__(-1)


def another_module(one: Job) -> Callable[[], None]:
    one.model.add_module("adapter", nn.Linear(2, 2))
    return lambda: delattr(one.model, "adapter")


def another_parameter(one: Job) -> Callable[[], None]:
    one.model.blocks[1].register_parameter("gain", nn.Parameter(torch.ones(1)))
    return lambda: delattr(one.model.blocks[1], "gain")


def a_parameter_without_elements(one: Job) -> Callable[[], None]:
    one.model.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    return lambda: delattr(one.model, "nothing")


def another_buffer(one: Job) -> Callable[[], None]:
    one.model.register_buffer("seen", torch.zeros(4))
    return lambda: delattr(one.model, "seen")


def a_module_in_place_of_one(one: Job) -> Callable[[], None]:
    """The optimizer holds on to the parameters that are gone from the model."""
    before = one.model.head
    one.model.head = nn.Linear(8, 2)

    def undo() -> None:
        one.model.head = before

    return undo


def a_strided_weight(one: Job) -> Callable[[], None]:
    weight = one.model.blocks[0][0].weight
    weight.data = weight.data.repeat(1, 2)[:, : weight.shape[1]]

    def undo() -> None:
        weight.data = weight.data.contiguous()

    return undo


def a_buffer_that_cannot_be_stored(one: Job) -> Callable[[], None]:
    one.model.embed.register_buffer("turns", torch.zeros(2, dtype=torch.complex128))
    return lambda: delattr(one.model.embed, "turns")


def state_of_no_parameter(one: Job) -> Callable[[], None]:
    """Some optimizers count in an entry of their own, which ``state_dict()`` has too."""
    one.optimizer.state["all"] = {"count": 3}
    return lambda: one.optimizer.state.__delitem__("all")


def state_that_cannot_be_stored(one: Job) -> Callable[[], None]:
    state = one.optimizer.state[one.model.head.weight]
    state["phase"] = torch.zeros(2, 8, dtype=torch.complex128)
    return lambda: state.__delitem__("phase")


CHANGES: list[tuple[Change, str]] = [
    (another_group, r"param group 1 of AdamW holds a parameter of shape \(3,\) that is not in the model"),
    (a_guest_in_a_group, r"param group 0 of AdamW holds a parameter of shape \(3,\)"),
    (another_module, r"adapter\.weight was added to the model after monitor\.attach"),
    (another_parameter, r"blocks\.1\.gain was added"),
    (a_parameter_without_elements, "nothing was added"),
    (another_buffer, "seen was added"),
    (a_module_in_place_of_one, r"param group 0 of AdamW holds a parameter of shape \(2, 8\)"),
    (a_strided_weight, r"blocks\.0\.0\.weight \(fp32\) is not contiguous"),
    (a_buffer_that_cannot_be_stored, "complex128"),
    (state_of_no_parameter, "AdamW keeps state under 'all', which is not a parameter"),
    (state_that_cannot_be_stored, "complex128"),
]
EACH = pytest.mark.parametrize(("change", "words"), CHANGES, ids=lambda value: getattr(value, "__name__", ""))


def unsupported(one: Job) -> float:
    return one.metric("driftpoint_saves_skipped_total", reason="unsupported")


@EACH
@pytest.mark.parametrize("policy", ["full", {"name": "threshold", "threshold": 0.0}])
def test_training_goes_on_and_saving_stops_with_the_reason(
    store: Path, change: Change, words: str, policy: object, caplog: pytest.LogCaptureFixture
) -> None:
    with job(store, policy=policy) as one:
        for _ in range(2):
            one.step()
        undo = change(one)
        for number in range(1, 3):
            caplog.clear()
            report = one.step()
            assert report is not None
            assert (report.skipped, report.saved or {}, report.staged_bytes) == ("unsupported", {}, 0)
            assert report.problem is not None
            assert re.search(words, report.problem)
            assert unsupported(one) == number
            assert report.problem in caplog.text and f"no save at step {2 + number}" in caplog.text
            assert [record.levelname for record in caplog.records] == ["ERROR"]
        asked = one.ckpt.save(wait=True, strict=False)
        assert (asked.skipped, asked.problem) == ("unsupported", report.problem)
        assert committed_steps(store) == [1, 2]
        undo()
        assert [report.skipped for _ in range(2) if (report := one.step())] == [None, None]
        saved = one.weights()
    assert committed_steps(store) == [1, 2, 5, 6]
    with job(store) as other:
        assert other.ckpt.resume() == 6
        assert same(other.weights(), saved)
        assert other.ckpt.certificate is not None and other.ckpt.certificate.exact


@pytest.mark.parametrize("change", [a_module_in_place_of_one, another_group, another_module])
def test_so_it_does_at_the_first_decision_of_a_process(store: Path, change: Change) -> None:
    with job(store) as one:
        undo = change(one)
        assert skip_reason(one.step()) == "unsupported"
        undo()
        assert skip_reason(one.step()) is None
    assert committed_steps(store) == [2]


def test_no_state_is_no_objects(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    settings = {"store": str(tmp_path / "s"), "metrics": {"enabled": False}}
    with monitor.attach((model, torch.optim.SGD(model.parameters())), settings, state=None) as ckpt:
        assert ckpt.resume() == 0
        ckpt.close(save=False)


@EACH
def test_observing_tells_it_too(store: Path, change: Change, words: str) -> None:
    with job(store, policy="observe") as one:
        one.step()
        change(one)
        report = one.step()
    assert report is not None and report.skipped == "unsupported"


@pytest.mark.parametrize(("change", "words"), CHANGES[:-1], ids=lambda value: getattr(value, "__name__", ""))
def test_a_resume_is_refused_and_nothing_changed(store: Path, change: Change, words: str) -> None:
    with job(store) as one:
        one.step()
    with job(store) as other:
        other.update()
        change(other)
        before = of_job(other.model, other.optimizer)
        with pytest.raises((UnsupportedError, ModelMismatchError)):
            other.ckpt.resume()
        assert differing(before, of_job(other.model, other.optimizer)) == []


@pytest.mark.parametrize(("change", "words"), [CHANGES[0], CHANGES[7], CHANGES[8]], ids=["group", "strided", "dtype"])
def test_attaching_is_refused_and_the_store_stays_free(store: Path, change: Change, words: str) -> None:
    with job(store) as one:
        one.step()
        model, optimizer = one.model, one.optimizer
        undo = change(one)
    settings = {"store": str(store), "metrics": {"enabled": False}}
    with pytest.raises(UnsupportedError, match=words):
        monitor.attach((model, optimizer), settings)
    undo()
    with monitor.attach((model, optimizer), settings) as ckpt:
        assert ckpt.resume() == 1


def test_a_tied_name_is_no_stranger(store: Path) -> None:
    with job(store) as one:
        one.step()
        one.model.add_module("again", one.model.head)
        report = one.step()
        assert report is not None and report.skipped is None


class Peculiar(nn.Module):
    """Its parameters cannot be listed any more: nothing that is foreseen."""

    def named_parameters(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
        raise ZeroDivisionError("peculiar")


def test_what_nobody_foresaw_stops_saving_not_training(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    with job(store) as one:
        one.step()
        one.model.__class__ = type("Odd", (Peculiar, type(one.model)), {})
        report = one.step()
        assert report is not None and report.skipped == "unsupported"
        assert report.problem is not None and "ZeroDivisionError('peculiar')" in report.problem
        assert "Traceback" in caplog.text
    assert committed_steps(store) == [1]


# ---- another process


@pytest.mark.parametrize("call", ["step", "save", "resume", "commit_last_step"])
def test_a_forked_child_saves_nothing(store: Path, call: str) -> None:
    """It would write to its parent's store and, by inherited descriptors, end the tracking of its parent's pages."""
    with job(store) as one:
        one.step()
        if (child := os.fork()) == 0:
            signal.alarm(20)
            try:
                getattr(one.ckpt, call)()
            except ConfigError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        one.step()
    assert committed_steps(store) == [1, 2]


# ---- another optimizer


def train_with(one: Job, optimizer: torch.optim.Optimizer) -> monitor.StepReport | None:
    optimizer.zero_grad()
    one.trained(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    report = one.ckpt.step()
    one.ckpt.flush()
    return report


@pytest.mark.parametrize("trained", [0, 2])
def test_an_optimizer_that_was_replaced_is_told(store: Path, trained: int, caplog: pytest.LogCaptureFixture) -> None:
    """The moments of the one that trains are nowhere: a save would pass the old ones off as theirs."""
    with job(store) as one:
        for _ in range(trained):
            one.step()
        other = torch.optim.AdamW(one.model.parameters(), lr=1e-3)
        for _ in range(2):
            report = train_with(one, other)
            assert report is not None and report.skipped == "unsupported"
            assert report.problem is not None and "the attached AdamW took no step" in report.problem
        assert "close() and attach" in caplog.text
        assert committed_steps(store) == list(range(1, 1 + trained))
        assert train_with(one, one.optimizer).skipped is None  # type: ignore[union-attr]


def test_several_steps_without_an_update_are_no_replacement(store: Path) -> None:
    """As a gradient scaler does after an overflow: nothing moves."""
    with job(store) as one:
        one.step()
        for _ in range(3):
            report = one.ckpt.step()
            one.ckpt.flush()
            assert report is not None and report.skipped is None


def test_weights_set_by_hand_before_a_save_are_no_replacement(store: Path) -> None:
    with job(store, every=100) as one:
        one.step()
        with torch.no_grad():
            one.model.head.weight.mul_(2)
        assert one.ckpt.save(wait=True).skipped is None


def test_weights_clipped_after_every_step_are_no_replacement(store: Path) -> None:
    with job(store, every=2) as one:
        for _ in range(4):
            one.update()
            with torch.no_grad():
                one.model.head.weight.clamp_(-0.1, 0.1)
            report = one.ckpt.step()
            one.ckpt.flush()
            assert report is None or report.skipped is None
    assert committed_steps(store) == [2, 4]


def attached(store: Path, optimizer: type[torch.optim.Optimizer]) -> tuple[nn.Linear, Any, monitor.Checkpointer]:
    model = nn.Linear(3, 2)
    made = optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    return model, made, monitor.attach((model, made), {"store": str(store), "every": 1, "metrics": {"enabled": False}})


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_resume_is_no_replacement(store: Path, make: type[torch.optim.Optimizer]) -> None:
    """The step after it was left out for an overflow; SGD has no state that would show that it was loaded."""
    model, optimizer, ckpt = attached(store, make)
    with ckpt:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        ckpt.step()
    _, _, ckpt = attached(store, make)
    with ckpt:
        assert ckpt.resume() == 1
        report = ckpt.step()
        assert report is not None and report.skipped is None


class Peer(torch.optim.Adagrad):
    """It updates in a method of its own, which no hook sees."""

    def update(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["sum"] += parameter.grad.square()
                parameter.sub_(0.1 * parameter.grad)


def test_an_optimizer_that_updates_in_its_own_way_is_no_replacement(store: Path) -> None:
    model, optimizer, ckpt = attached(store, Peer)
    with ckpt:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).sum().backward()
            optimizer.update()
            report = ckpt.step()
            ckpt.flush()
            assert report is not None and report.skipped is None


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad])
def test_optimizers_of_all_kinds_are_seen_to_step(store: Path, make: type[torch.optim.Optimizer]) -> None:
    model, optimizer, ckpt = attached(store, make)
    with ckpt:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            report = ckpt.step()
            ckpt.flush()
            assert report is not None and report.skipped is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know:UserWarning")
def test_a_compiled_step_is_seen(store: Path) -> None:
    with job(store) as one:
        step = torch.compile(one.optimizer.step, backend="eager")
        for _ in range(2):
            one.optimizer.zero_grad()
            one.model(torch.randn(4, 3)).sum().backward()
            step()
            report = one.ckpt.step()
            one.ckpt.flush()
            assert report is not None and report.skipped is None


@pytest.mark.parametrize("policy", ["full", {"name": "threshold", "threshold": 1e9}])
def test_a_layer_unfrozen_during_training_is_saved(store: Path, policy: object) -> None:
    one = Job(store, policy=policy)
    one.model.blocks[1].requires_grad_(False)
    with one.ckpt:
        one.step()
        one.model.blocks[1].requires_grad_(True)
        report = one.step()
        assert report is not None and report.skipped is None
        saved = one.weights()
    with job(store) as other:
        assert other.ckpt.resume() == 2
        resumed = other.weights()
    for name in saved:
        if name.startswith("blocks.1."):
            assert torch.equal(resumed[name], saved[name])


def test_a_bias_unfrozen_during_training_forces_a_save_of_its_unit(store: Path) -> None:
    one = Job(store, policy={"name": "threshold", "threshold": 1e9})
    bias = one.model.head.bias
    bias.requires_grad_(False)
    with one.ckpt:
        one.step()
        assert skip_reason(one.step()) == "nothing"
        bias.requires_grad_(True)
        report = one.step()
        assert report is not None and report.saved is not None
        assert Unit("head", "fp32") in report.saved
        assert skip_reason(one.step()) == "nothing"
