"""Hyperparameters that a changed script constructs otherwise than the saved run: one line each, never silence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, RMSprop, lr_scheduler

import monitor
from monitor.adapters.hyperparameters import reconcile
from store.errors import ModelMismatchError

Make = Callable[[Any], Any]
SCRIPT = {"resume": {"hyperparameters": "script"}}


class Script:
    """A model, an optimizer of ``kind`` with ``hyper``, and a schedule; trained by ``steps``."""

    def __init__(
        self, store: Path, kind: Any = AdamW, schedule: Make | None = None, settings: Any = None, **hyper: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.optimizer = kind(self.model.parameters(), **{"lr": 0.1, **hyper})
        self.schedule = schedule(self.optimizer) if schedule else None
        config = {"store": str(store), "every": 1, "metrics": {"enabled": False}, **(settings or {})}
        self.ckpt = monitor.attach(
            (self.model, self.optimizer), config, state=[self.schedule] if self.schedule is not None else []
        )
        self.start = self.ckpt.resume()

    def steps(self, count: int) -> list[float]:
        """The learning rate of each step."""
        rates = []
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 4)).square().mean().backward()
            rates.append(float(self.group["lr"]))
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            self.ckpt.step()
            self.ckpt.flush()
        return rates

    @property
    def group(self) -> dict[str, Any]:
        group: dict[str, Any] = self.optimizer.param_groups[0]
        return group

    @property
    def notes(self) -> list[str]:
        assert self.ckpt.resumed is not None
        return list(self.ckpt.resumed.notes)

    @property
    def exact(self) -> bool:
        assert self.ckpt.certificate is not None
        return self.ckpt.certificate.exact

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self.ckpt.close()


def ramp(peak: float) -> Callable[[int], float]:
    return lambda step: peak * min(1.0, step / 4)


SCHEDULES: dict[str, Make] = {
    "none": lambda _: None,
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=ramp(1.0)),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=40),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=20),
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.5),
    "plateau": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[2],
    ),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    return tmp_path / "store"  # type: ignore[return-value]


CHANGES = [
    (AdamW, "lr", 0.1, 0.05),
    (AdamW, "betas", (0.9, 0.999), (0.9, 0.95)),
    (AdamW, "weight_decay", 0.01, 0.1),
    (AdamW, "amsgrad", False, True),
    (AdamW, "maximize", False, True),
    (SGD, "momentum", 0.0, 0.9),
    (Adagrad, "lr_decay", 0.0, 0.1),
]


@pytest.mark.parametrize(("kind", "key", "saved", "script"), CHANGES)
def test_the_store_wins_and_says_so(
    store: Path, caplog: pytest.LogCaptureFixture, kind: Any, key: str, saved: Any, script: Any
) -> None:
    with Script(store, kind, **{key: saved}) as one:
        one.steps(2)
    for _ in range(2):  # at each restart, not only at the first one
        with caplog.at_level(logging.WARNING), Script(store, kind, **{key: script}) as two:
            found = f"{saved!r} in the store and {script!r} in this script: the store's is used"
            line = f"{key} of param group 0 is {found}"
            assert [note.split(";")[0] for note in two.notes] == [line]
            assert line in caplog.text
            assert two.exact and two.group[key] == saved
            two.steps(1)
        caplog.clear()


@pytest.mark.parametrize("key", ["fused", "foreach"])
def test_how_a_step_is_computed_is_the_scripts(store: Path, key: str) -> None:
    with Script(store) as one:
        one.steps(1)
    with Script(store, **{key: True}) as two:
        found = "None in the store and True in this script: the script's is used"
        assert two.notes == [f"{key} of param group 0 is {found}"]
        assert two.group[key] is True


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("settings", [{}, SCRIPT])
def test_what_a_schedule_moved_is_no_difference(store: Path, name: str, settings: Any) -> None:
    with Script(store, schedule=SCHEDULES[name]) as one:
        one.steps(3)
        rest = one.steps(0)
    with Script(store, schedule=SCHEDULES[name], settings=settings) as two:
        assert two.start == 3 and not two.notes and two.exact
        rest = two.steps(4)
    with Script(store.with_name("whole"), schedule=SCHEDULES[name]) as whole:
        assert whole.steps(7)[3:] == rest


@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize("settings", [None, SCRIPT])
def test_where_a_schedule_stood_when_it_was_attached_is_no_setting(store: Path, settings: Any, trained: int) -> None:
    """As in a job that loads an earlier checkpoint of its own before it begins with Driftpoint."""

    def begun(optimizer: Any) -> Any:
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 7, "_step_count": 8})
        return schedule

    with Script(store, schedule=begun) as one:
        one.steps(trained)
        one.ckpt.save(wait=True)
    with Script(store, schedule=partial(lr_scheduler.CosineAnnealingLR, T_max=20), settings=settings) as two:
        assert two.notes == []
        assert two.schedule is not None and two.schedule.last_epoch == 7 + trained


def test_what_a_loop_moved_by_hand_is_no_difference(store: Path) -> None:
    with Script(store) as one:
        one.group["lr"] = 0.03
        one.steps(1)
    with Script(store, settings=SCRIPT) as two:
        assert not two.notes and two.group["lr"] == 0.03


@pytest.mark.parametrize("name", ["none", "lambda", "cosine", "exponential", "sequential"])
def test_the_scripts_learning_rate_goes_through_the_schedule(store: Path, name: str) -> None:
    with Script(store, schedule=SCHEDULES[name]) as one:
        one.steps(3)
    with Script(store, schedule=SCHEDULES[name], settings=SCRIPT, lr=0.05) as two:
        assert len(two.notes) == 1 and two.notes[0].startswith("lr of param group 0 is 0.1 in the store and 0.05")
        assert not two.exact
        rates = two.steps(4)
    with Script(store.with_name("whole"), schedule=SCHEDULES[name], lr=0.05) as whole:
        assert rates == pytest.approx(whole.steps(7)[3:])
    with Script(store, schedule=SCHEDULES[name], lr=0.05) as three:
        assert three.start == 7 and not three.notes


def test_one_cycle_takes_the_scripts_peak(store: Path) -> None:
    def cycle(peak: float) -> Make:
        return partial(lr_scheduler.OneCycleLR, max_lr=peak, total_steps=40)

    with Script(store, schedule=cycle(0.1)) as one:
        one.steps(3)
    with Script(store, schedule=cycle(0.2)) as two:
        assert {note.split(" ")[0] for note in two.notes} == {"lr", "max_lr", "min_lr"}
        assert two.group["max_lr"] == 0.1 and two.exact
    with Script(store, schedule=cycle(0.2), settings=SCRIPT) as three:
        rates = three.steps(3)
    with Script(store.with_name("whole"), schedule=cycle(0.2)) as whole:
        assert rates == pytest.approx(whole.steps(6)[3:])


def sequence(last: int, second: int = 3) -> Make:
    def make(optimizer: Any) -> Any:
        parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.StepLR(optimizer, second)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[last])

    return make


SETTINGS: list[tuple[str, Make, Make]] = [
    ("T_max", *(partial(lr_scheduler.CosineAnnealingLR, T_max=steps) for steps in (20, 40))),
    ("milestones", *(partial(lr_scheduler.MultiStepLR, milestones=[5, last]) for last in (8, 9))),
    ("_milestones", sequence(5), sequence(6)),
    ("_schedulers.1.step_size", sequence(5), sequence(5, 4)),
]


@pytest.mark.parametrize(("key", "before", "after"), SETTINGS, ids=[key for key, *_ in SETTINGS])
def test_a_changed_setting_of_a_schedule_is_told(store: Path, key: str, before: Make, after: Make) -> None:
    with Script(store, schedule=before) as one:
        one.steps(3)
    for _ in range(2):
        with Script(store, schedule=after) as two:
            assert len(two.notes) == 1 and two.notes[0].startswith(f"{key} of state[0] (a ")
            assert "the store's is used" in two.notes[0] and two.exact
            assert two.schedule is not None and two.schedule.state_dict()["last_epoch"] == two.start
    with Script(store, schedule=after, settings=SCRIPT) as three:
        assert three.notes[0].endswith("the script's is used") and not three.exact
        rates = three.steps(6)
    with Script(store.with_name("whole"), schedule=after) as whole:
        assert rates == pytest.approx(whole.steps(9)[3:]) or key == "T_max"  # whose formula goes on from the last rate
    with Script(store, schedule=after) as four:
        assert four.start == 9 and not four.notes


def test_the_scripts_rate_and_setting_go_into_a_schedule_together(store: Path) -> None:
    with Script(store, schedule=partial(lr_scheduler.CosineAnnealingLR, T_max=20)) as one:
        one.steps(3)
    longer = partial(lr_scheduler.CosineAnnealingLR, T_max=40)
    with Script(store, schedule=longer, settings=SCRIPT, lr=0.05) as two:
        assert [note.split(" ")[0] for note in two.notes] == ["T_max", "lr"]
        assert two.schedule is not None and two.schedule.T_max == 40
        assert (two.schedule.last_epoch, two.schedule.base_lrs) == (3, [0.05])


def test_a_changed_function_of_a_schedule_is_the_scripts_and_told_once(store: Path) -> None:
    with Script(store, schedule=partial(lr_scheduler.LambdaLR, lr_lambda=ramp(1.0))) as one:
        one.steps(3)
    half = partial(lr_scheduler.LambdaLR, lr_lambda=ramp(0.5))
    with Script(store, schedule=half) as two:
        assert len(two.notes) == 1 and two.notes[0].startswith("lr_lambdas of state[0] (a LambdaLR) is ['a function (")
        assert two.notes[0].endswith("the script's is used")
        assert two.steps(2)[1] == pytest.approx(0.05)
    with Script(store, schedule=half) as three:
        assert three.start == 5 and not three.notes


def grouped(**more: Any) -> Make:
    return lambda parameters, **hyper: AdamW([{"params": list(parameters), **more}], **hyper)


@pytest.mark.parametrize("settings", [{}, SCRIPT])
def test_a_hyperparameter_that_one_of_both_lacks_is_told(store: Path, settings: Any) -> None:
    with Script(store, grouped(scale=0.5, old=1)) as one:
        one.steps(1)
    with Script(store, grouped(scale=0.5, new=2), settings=settings) as two:
        assert sorted(note.split(";")[0] for note in two.notes) == [
            "new of param group 0 is absent in the store and 2 in this script: the script's is used",
            (
                "old of param group 0 is 1 in the store and absent in this script: "
                f"the {'script' if settings else 'store'}'s is used"
            ),
        ]
        assert two.group["new"] == 2 and ("old" in two.group) is (not settings)


def test_state_that_another_class_goes_on_with_is_told(store: Path) -> None:
    with Script(store, SGD, momentum=0.9) as one:
        one.steps(1)

    class Averaged(SGD):
        pass

    with Script(store, Averaged, momentum=0.9) as two:
        assert two.notes == ["the optimizer state was saved by SGD, and Averaged goes on with it"]


@pytest.mark.parametrize(
    ("kind", "key", "saved", "script"),
    [(AdamW, "amsgrad", False, True), (RMSprop, "centered", True, False), (RMSprop, "momentum", 0.0, 0.9)],
)
def test_the_scripts_value_is_refused_where_it_needs_other_state(
    store: Path, kind: Any, key: str, saved: Any, script: Any
) -> None:
    with Script(store, kind, **{key: saved}) as one:
        one.steps(1)
    with pytest.raises(ModelMismatchError, match=f"{key} is {saved} in the store and {script}"):
        Script(store, kind, settings=SCRIPT, **{key: script})


def test_groups_with_the_same_difference_share_a_line_and_names_stay(store: Path) -> None:
    def named(lr: float, count: int) -> Make:
        def make(parameters: Any, **_: Any) -> AdamW:
            named = [("weight", next(parameters)), ("bias", next(parameters))]
            groups = [{"params": named}] if count == 1 else [{"params": [one]} for one in named]
            return AdamW(groups, lr=lr)

        return make

    with Script(store, named(0.1, 1)) as one:
        one.steps(1)
    with Script(store, named(0.2, 2)) as two:
        assert len(two.notes) == 1 and two.notes[0].startswith("lr of param group 0, param group 1 is 0.1")
        assert [group["param_names"] for group in two.optimizer.param_groups] == [["weight"], ["bias"]]


def test_a_store_of_an_older_release_is_compared_where_nothing_can_have_moved() -> None:
    hyper = {"lr": 0.03, "initial_lr": 0.1, "max_momentum": 0.9, "betas": (0.85, 0.99), "eps": 1e-8}
    saved = {"optimizer": "AdamW", "param_groups": [{"params": ["w"], "hyper": hyper}]}
    live = [{"params": ["w"], "hyper": {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6}}]
    assert [note.split(" ")[0] for note in reconcile(saved, live, {"w": live[0]["hyper"]}, "store")[2]] == ["eps"]


# ---- values that groups share, and groups without parameters


def two_groups(parameters: Iterator[nn.Parameter], **hyper: Any) -> AdamW:
    first, *others = parameters
    return AdamW([{"params": [first]}, {"params": others}], **hyper)


def empty_group(parameters: Iterator[nn.Parameter], **hyper: Any) -> AdamW:
    return AdamW([{"params": list(parameters)}, {"params": []}], **hyper)


def test_a_tensor_that_torch_gave_to_several_groups_takes_the_value_of_each(tmp_path: Path) -> None:
    def script() -> Script:
        return Script(tmp_path / "store", two_groups, lr=torch.tensor(0.25))

    with script() as one:
        assert one.optimizer.param_groups[0]["lr"] is one.optimizer.param_groups[1]["lr"]
        one.optimizer.param_groups[1]["lr"] = torch.tensor(0.5)
        one.steps(1)
    with script() as two:
        assert [float(group["lr"]) for group in two.optimizer.param_groups] == [0.25, 0.5] and two.exact
    with Script(tmp_path / "other", two_groups, lr=torch.tensor(0.25)) as one:
        one.group["lr"].fill_(0.125)  # as schedules do
        one.steps(1)
    with Script(tmp_path / "other", two_groups, lr=torch.tensor(0.25)) as two:
        first, second = (group["lr"] for group in two.optimizer.param_groups)
        assert first is second and float(first) == 0.125 and two.exact


def test_the_first_of_several_groups_keeps_the_tensor_of_the_script(tmp_path: Path) -> None:
    def three_groups(parameters: Iterator[nn.Parameter], **hyper: Any) -> AdamW:
        first, second = parameters
        return AdamW([{"params": [first]}, {"params": [second]}, {"params": []}], **hyper)

    with Script(tmp_path / "store", three_groups, lr=torch.tensor(0.25)) as one:
        one.optimizer.param_groups[1]["lr"] = torch.tensor(0.5)
        one.steps(1)
    rate = torch.tensor(0.25)
    with Script(tmp_path / "store", three_groups, lr=rate) as two:
        first, second, third = (group["lr"] for group in two.optimizer.param_groups)
        assert first is rate and third is rate and two.optimizer.defaults["lr"] is rate
        assert float(rate) == 0.25 and float(second) == 0.5 and second.is_leaf


def test_a_tensor_may_be_replaced_by_another_value(tmp_path: Path) -> None:
    with Script(tmp_path / "store", lr=torch.tensor(0.25)) as one:
        one.steps(1)
        one.group["lr"] = 0.5
        one.steps(2)
        assert one.ckpt.save(wait=True).skipped is None
    with Script(tmp_path / "store", lr=torch.tensor(0.25)) as two:
        assert two.start == 3 and float(two.group["lr"]) == 0.5


def test_a_group_without_parameters_gets_its_values_back(tmp_path: Path) -> None:
    schedule = partial(lr_scheduler.ExponentialLR, gamma=0.5)
    with Script(tmp_path / "store", empty_group, schedule) as one:
        one.steps(2)
    with Script(tmp_path / "store", empty_group, schedule) as two:
        assert [group["lr"] for group in two.optimizer.param_groups] == [0.025, 0.025] and two.exact


def test_groups_of_several_optimizers_have_hyperparameters_of_their_own_kinds(tmp_path: Path) -> None:
    """Adafactor's ``eps`` are two values, AdamW's is a number."""
    for step in (0, 2):
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        optimizers = [torch.optim.Adafactor(model[0].parameters()), AdamW(model[1].parameters())]
        with monitor.attach((model, optimizers), {"store": str(tmp_path), "metrics": {"enabled": False}}) as ckpt:
            assert ckpt.resume() == step
            for _ in range(2):
                model[1](model[0](torch.ones(2, 4))).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                ckpt.step()


def test_betas_in_tensors(tmp_path: Path) -> None:
    """They are those in the optimizer's ``defaults``, too, and a resume fills them."""
    for start in (0, 2, 4):
        betas = torch.tensor(0.9 if start else 0.8), torch.tensor(0.99)
        one = Script(tmp_path, torch.optim.Adam, betas=betas, lr=torch.tensor(0.1))
        assert one.start == start and one.group["betas"][0].item() == torch.tensor(0.8).item()
        one.steps(2)
        one.ckpt.close()
