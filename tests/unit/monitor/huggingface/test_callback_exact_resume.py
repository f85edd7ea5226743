"""A resumed Trainer continues bit by bit, with shuffled data, stateful callbacks and logs, and saves are not torn."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

import monitor
from monitor.huggingface.trainer_state import StateText
from tests.support.internals import hold_writer
from tests.support.slow import others_slow
from tests.support.trainers import Flushing

EVALUATING = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "greater_is_better": False}


class Model(nn.Module):
    """Bags of tokens, and dropout: what the generators give shows in every loss."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.head = nn.Embedding(50, 8), nn.Linear(8, 1)
        self.dropout = nn.Dropout(0.3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.head(self.dropout(torch.tanh(self.tokens(input_ids).mean(1))))[:, 0]
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


def sample(index: int) -> dict[str, Any]:
    """Of a length and with tokens that are a function of the index."""
    tokens = torch.randint(50, (3 + index * 7 % 9,), generator=torch.Generator().manual_seed(index))
    return {"input_ids": tokens, "labels": torch.tensor(index % 7 / 3)}


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError
        return sample(index)


class Stream(IterableDataset[Any]):
    """Five steps long."""

    def __iter__(self) -> Any:
        return map(sample, range(20))


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tokens = nn.utils.rnn.pad_sequence([one["input_ids"] for one in samples], batch_first=True)
    return {"input_ids": tokens, "labels": torch.stack([one["labels"] for one in samples])}


class Recording(Trainer):
    """Keeps the losses of training to the last bit, by step."""

    losses: dict[int, str]

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, *args, **kwargs)
        if model.training:
            self.__dict__.setdefault("losses", {})[self.state.global_step] = float(found.detach()).hex()
        return found


class Boom(Exception):
    pass


class At(TrainerCallback):
    """Does something at an event of one step."""

    def __init__(self, step: int, event: str, what: Callable[[], Any]) -> None:
        self.step, self.what = step, what
        setattr(self, f"on_{event}", self._heard)

    def _heard(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.what()


Callbacks = Callable[[monitor.CheckpointCallback | None], list[TrainerCallback]]


class Runs:
    """Of one case: uninterrupted; and broken off at a step, and resumed from other weights."""

    def __init__(self, directory: Path, callbacks: Callbacks = lambda _: [], **arguments: Any) -> None:
        self.directory, self.callbacks, self.arguments = directory, callbacks, arguments
        self.settings = {"store": str(directory / "store"), "metrics": {"enabled": False}}

    def straight(self) -> Recording:
        trainer = self.trainer("straight", 1, None)
        trainer.train()
        return trainer

    def resumed(self, every: int, broken_at: int) -> Recording:
        settings = {**self.settings, "every": every}
        ours = monitor.CheckpointCallback(settings)
        with pytest.raises(Boom):
            self.trainer("broken", 1, ours, At(broken_at, "step_end", boom)).train()
        ours.close(clean=False)
        after = monitor.CheckpointCallback(settings)
        trainer = self.trainer("broken", 2, after)
        trainer.train(resume_from_checkpoint=monitor.resume_path(settings))
        return trainer

    def trainer(
        self, name: str, seed: int, ours: monitor.CheckpointCallback | None, *more: TrainerCallback
    ) -> Recording:
        given = dict(self.arguments)
        data = given.pop("data", None) or Samples()
        mine = [] if ours is None else [ours, Flushing(ours)]
        defaults: dict[str, Any] = {
            "output_dir": str(self.directory / name),
            "save_strategy": "no",
            "num_train_epochs": 3,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "logging_steps": 1,
        }
        return Recording(
            model=Model(seed),
            args=TrainingArguments(**{**defaults, **given}),
            data_collator=padded,
            train_dataset=data,
            eval_dataset=Samples(),
            callbacks=[*mine, *self.callbacks(ours), *more],
        )

    def require_alike(self, every: int, broken_at: int, first: int) -> Recording:
        straight, resumed = self.straight(), self.resumed(every, broken_at)
        assert resumed.losses == {step: loss for step, loss in straight.losses.items() if step >= first}
        assert resumed.state.global_step == straight.state.global_step
        return resumed


def boom() -> None:
    raise Boom


GROUPED = {"train_sampling_strategy": "group_by_length"}
LASTING = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}


@pytest.mark.parametrize(
    ("arguments", "every", "broken_at"),
    others_slow(
        [
            pytest.param({"accelerator_config": {"use_seedable_sampler": False}}, 3, 10, id="torch's own sampler"),
            pytest.param(GROUPED, 3, 10, id="grouped by length"),
            pytest.param({"data": Stream(), "max_steps": 14}, 5, 8, id="a second pass of an iterable"),
            pytest.param({**GROUPED, **LASTING}, 5, 12, id="workers that persist"),
        ]
    ),
)
def test_the_order_of_the_data_continues(tmp_path: Path, arguments: dict[str, Any], every: int, broken_at: int) -> None:
    Runs(tmp_path, **arguments).require_alike(every, broken_at, broken_at - broken_at % every or every)


class Stopping(TrainerCallback):
    """Ends the training after a step, as EarlyStoppingCallback does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.step


CONSTANT = {"lr_scheduler_type": "constant"}  # no schedule has the total number of steps in it


@pytest.mark.parametrize(
    ("arguments", "stopped", "last"),
    others_slow(
        [
            pytest.param({}, {}, 9, id="in an epoch"),
            pytest.param({}, {"max_steps": 9}, 9, id="by max_steps"),
            pytest.param({}, {}, 14, id="between two epochs"),
            pytest.param({"accelerator_config": {"use_seedable_sampler": False}}, {}, 9, id="torch's own sampler"),
            pytest.param(GROUPED, {"max_steps": 14}, 14, id="by max_steps between two epochs, grouped by length"),
        ]
    ),
)
def test_a_training_that_was_stopped_continues(
    tmp_path: Path, arguments: dict[str, Any], stopped: dict[str, Any], last: int
) -> None:
    runs = Runs(tmp_path, **CONSTANT, **arguments)
    straight, settings = runs.straight(), {**runs.settings, "every": 100}
    first = Runs(tmp_path, **CONSTANT, **arguments, **stopped)
    first.trainer("stopped", 1, monitor.CheckpointCallback(settings), Stopping(last)).train()
    trainer = runs.trainer("stopped", 2, monitor.CheckpointCallback(settings))
    trainer.train(resume_from_checkpoint=monitor.resume_path(settings))
    assert trainer.losses == {step: loss for step, loss in straight.losses.items() if step >= last}
    assert trainer.state.global_step == straight.state.global_step == 21


@pytest.mark.slow
def test_an_unknown_place_in_a_later_pass_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Runs(tmp_path, data=Stream(), max_steps=8).resumed(every=3, broken_at=7)
    (message,) = [one.message for one in caplog.records if "that pass starts again" in one.message]
    assert message.startswith("pass 2 over the data was in progress at step 6, and for data without a length")


@pytest.mark.parametrize(
    ("step", "event"), others_slow([(8, "step_end"), (7, "step_end"), (7, "epoch_end"), (9, "step_end")])
)
def test_a_save_requested_by_a_callback_resumes_exactly(tmp_path: Path, step: int, event: str) -> None:
    def saving(ours: monitor.CheckpointCallback | None) -> list[TrainerCallback]:
        if ours is None:
            return []
        return [At(step, event, lambda: ours.checkpointer and ours.checkpointer.save(wait=True))]

    Runs(tmp_path, saving).require_alike(every=100, broken_at=11, first=step)


@pytest.mark.slow
def test_exported_states_of_callbacks_are_saved(tmp_path: Path) -> None:
    losing_patience = {**EVALUATING, "learning_rate": 0.0, "restore_callback_states_from_checkpoint": True}
    runs = Runs(tmp_path, lambda _: [EarlyStoppingCallback(5)], **losing_patience)
    resumed = runs.require_alike(every=1, broken_at=9, first=8)
    assert resumed.state.global_step == 12


@pytest.mark.slow
def test_logs_of_types_unknown_to_json_are_saved(tmp_path: Path) -> None:
    def logging(ours: monitor.CheckpointCallback | None) -> list[TrainerCallback]:
        return [] if ours is None else [Logging()]

    resumed = Runs(tmp_path, logging).require_alike(every=3, broken_at=8, first=6)
    assert [one for one in resumed.state.log_history if "array" in one] == [
        {"array": 1.5, "tensor": 2.0, "object": "step 4", "step": 4}
    ]


class Logging(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            odd = {"array": np.float32(1.5), "tensor": torch.tensor(2.0), "object": Path("step 4")}
            state.log_history.append({**odd, "step": 4})


def test_a_long_history_is_serialized_once() -> None:
    class State:
        def __init__(self) -> None:
            self.log_history: list[Any] = []
            self.stateful_callbacks: dict[str, Any] = {"Kept": 1, "Replaced": 1}
            self.best_metric = float("inf")

    state, text = State(), StateText()
    for number in range(300):
        state.log_history.append({"loss": number / 7})
        if number:
            state.log_history[-2]["late"] = number  # callbacks do this
        whole = json.loads(text.serialize(state, {"Replaced": number}))
        assert whole["log_history"] == state.log_history
    assert whole["stateful_callbacks"] == {"Kept": 1, "Replaced": 299}
    assert whole["best_metric"] == float("inf")
    asked: list[int] = []
    state.log_history[0] = Counted(asked)
    json.loads(text.serialize(state, {}))
    assert asked == []
    state.log_history = state.log_history[:2]
    assert len(json.loads(text.serialize(state, {}))["log_history"]) == 2


class Counted(dict[str, Any]):
    """Notes when it is turned into text."""

    def __init__(self, asked: list[int]) -> None:
        super().__init__(loss=1.0)
        self.asked = asked

    def items(self) -> Any:
        self.asked.append(1)
        return super().items()


class Loading(Recording):
    """Loads as DeepSpeed does, where autograd does not see it; and only then is there time for what was begun."""

    held: threading.Event

    def _load_best_model(self) -> None:
        self.model.head.weight.data.zero_()
        self.held.set()


@pytest.mark.slow
def test_loading_the_best_model_does_not_corrupt_the_last_save(tmp_path: Path) -> None:
    best = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "num_train_epochs": 1}
    runs = Runs(tmp_path, **EVALUATING, **best)
    settings = {**runs.settings, "every": 7, "staging": "lazy"}
    ours = monitor.CheckpointCallback(settings)
    trainer = runs.trainer("out", 1, ours)
    trainer.__class__, trainer.held = Loading, threading.Event()
    last: list[torch.Tensor] = []

    def hold() -> None:
        last.append(trainer.model.head.weight.detach().clone())
        hold_writer(ours.checkpointer, trainer.held)
        threading.Timer(3, trainer.held.set).start()  # the end of training waits for the last commit

    trainer.add_callback(At(7, "step_end", hold))
    trainer.train()
    again = Runs(tmp_path, num_train_epochs=1).trainer("out", 2, after := monitor.CheckpointCallback(settings))
    again.train(resume_from_checkpoint=after.resume_path())
    assert again.state.global_step == 7
    assert torch.equal(again.model.head.weight, last[0])
