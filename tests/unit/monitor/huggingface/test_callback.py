"""CheckpointCallback and resume_path in one process with a real Trainer: refusals, preemption, damage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import compare_trainer_and_checkpoint_args

import monitor
from monitor.distributed import current_group
from monitor.huggingface.resume import ResumePrediction, trainer_state
from store.catalog import open_catalog
from store.errors import ModelMismatchError, StoreError, UsageError
from store.names import SaveId
from store.storage.local import LocalFiles
from tests.support.slow import others_slow
from tests.support.trainers import Flushing

ROOT = Path(__file__).resolve().parents[4]


class Model(nn.Module):
    """Two layers and a loss."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.second(self.dropout(torch.tanh(self.first(x))))
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


DATA = [{"x": torch.full((6,), index / 10), "labels": torch.tensor([index % 3 / 2])} for index in range(20)]


class At(TrainerCallback):
    """Does something at the end of one step."""

    def __init__(self, step: int, what: Any) -> None:
        self.step, self.what = step, what

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.what()


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"store": str(tmp_path / "store"), "every": 2, "metrics": {"enabled": False}}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder


def trainer(
    tmp_path: Path, ours: monitor.CheckpointCallback, *more: TrainerCallback, seed: int = 1, **arguments: Any
) -> Trainer:
    defaults: dict[str, Any] = {
        "output_dir": str(tmp_path / "out"),
        "save_strategy": "no",
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    return Trainer(
        model=Model(seed),
        args=TrainingArguments(**{**defaults, **arguments}),
        train_dataset=DATA,
        eval_dataset=DATA[:4],
        callbacks=[ours, Flushing(ours), *more],
    )


def losses(of: Trainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in of.state.log_history if "loss" in entry}


class Boom(Exception):
    pass


def boom() -> None:
    raise Boom


@pytest.mark.slow
def test_training_resumes_in_the_same_process_after_an_error(
    tmp_path: Path, settings: dict[str, Any], temporary: Path
) -> None:
    broken = trainer(tmp_path, ours := monitor.CheckpointCallback(settings), At(7, boom))
    with pytest.raises(Boom):
        broken.train(resume_from_checkpoint=ours.resume_path())
    left: list[Path] = []
    look = At(8, lambda: left.extend(temporary.glob("driftpoint-*")))
    again = trainer(tmp_path, after := monitor.CheckpointCallback(ours.config), look, seed=5)
    assert ours.checkpointer is not None
    again.train(resume_from_checkpoint=monitor.resume_path(ours.config))
    reference = trainer(tmp_path, monitor.CheckpointCallback({**settings, "store": str(tmp_path / "other")}))
    reference.train()
    assert losses(again) == losses(reference)
    assert again.state.global_step == 10

    assert (after.checkpointer, ours.checkpointer) == (None, None)
    assert left == []  # a process that is killed from here on leaves nothing there


def test_a_trainer_without_the_callback_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours = monitor.CheckpointCallback(settings)
    running = trainer(tmp_path, ours)
    running.train()
    with pytest.raises(UsageError, match="this Trainer does not have the CheckpointCallback"):
        trainer(tmp_path, _Nothing(), seed=2).train(resume_from_checkpoint=monitor.resume_path(settings))
    running.train(resume_from_checkpoint=monitor.resume_path(settings))
    assert running.state.global_step == 10


def test_training_from_scratch_into_a_store_with_commits_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours = monitor.CheckpointCallback(settings)
    running = trainer(tmp_path, ours)
    assert ours.resume_path() is None
    running.train()
    with pytest.raises(UsageError, match="holds commits, but the Trainer does not resume from them"):
        running.train()
    with pytest.raises(UsageError, match="holds commits"):
        trainer(tmp_path, monitor.CheckpointCallback(settings)).train()


@pytest.mark.slow
def test_one_trainer_may_train_again(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours = monitor.CheckpointCallback(settings)
    running = trainer(tmp_path, ours, num_train_epochs=1, lr_scheduler_type="constant")
    running.train()
    running.args.num_train_epochs = 2
    running.train(resume_from_checkpoint=monitor.resume_path(settings))
    assert running.state.global_step == 10
    assert sorted(losses(running)) == list(range(1, 11))


@pytest.mark.parametrize("length", others_slow([{"max_steps": 6}, {"num_train_epochs": 1.2}]))
def test_a_finished_training_is_not_continued(tmp_path: Path, settings: dict[str, Any], length: dict[str, Any]) -> None:
    first = trainer(tmp_path, monitor.CheckpointCallback(settings), **length)
    first.train()
    again = trainer(tmp_path, monitor.CheckpointCallback(settings), seed=3, **length)
    again.train(resume_from_checkpoint=monitor.resume_path(settings))
    assert again.state.global_step == first.state.global_step == 6
    assert losses(again) == losses(first)
    for mine, theirs in zip(again.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("every", "policy"), others_slow([(3, "full"), (100, "full"), (2, "full"), (100, "observe")]))
def test_the_last_step_is_saved_at_any_interval(
    tmp_path: Path, settings: dict[str, Any], every: int, policy: str
) -> None:
    first = trainer(tmp_path, monitor.CheckpointCallback({**settings, "every": every, "policy": policy}), max_steps=4)
    first.train()
    if policy == "observe":
        assert not Path(settings["store"]).exists()
        return
    commits = [save.name for save in open_catalog(LocalFiles(Path(settings["store"]))).saves()]
    assert commits[0] == "00000004-000001" and len(commits) == len(set(range(every, 5, every)) | {4})
    again = trainer(tmp_path, monitor.CheckpointCallback(settings), seed=3, max_steps=4)
    again.train(resume_from_checkpoint=monitor.resume_path(settings))
    for mine, theirs in zip(again.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_evaluation_alone_does_not_touch_the_store(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours = monitor.CheckpointCallback(settings)
    assert "eval_loss" in trainer(tmp_path, ours).evaluate()
    assert ours.checkpointer is None
    assert not Path(settings["store"]).exists()


def test_preemption_exits_with_75(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours = monitor.CheckpointCallback({**settings, "every": 100})

    def announce() -> None:
        assert ours.checkpointer is not None
        ours.checkpointer.preempt()

    running = trainer(tmp_path, ours, At(3, announce))
    with pytest.raises(monitor.Preempted) as ended:
        running.train(resume_from_checkpoint=ours.resume_path())
    assert (ended.value.code, ended.value.report.step) == (75, 3)
    again = trainer(tmp_path, monitor.CheckpointCallback(settings))
    again.train(resume_from_checkpoint=monitor.resume_path(settings))
    assert sorted(losses(again)) == list(range(1, 11))


@pytest.mark.slow
def test_preemption_without_exit_stops_the_trainer(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours = monitor.CheckpointCallback({**settings, "every": 100, "preemption": {"exit": False}})
    running = trainer(tmp_path, ours, At(3, lambda: ours.checkpointer and ours.checkpointer.preempt()))
    running.train(resume_from_checkpoint=ours.resume_path())
    assert (running.state.global_step, ours.preempted) == (4, True)
    again = trainer(tmp_path, after := monitor.CheckpointCallback(settings))
    again.train(resume_from_checkpoint=monitor.resume_path(settings))
    assert sorted(losses(again)) == list(range(1, 11))
    assert not after.preempted


def test_resume_path_without_the_callback_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no CheckpointCallback of the store"):
        monitor.resume_path({**settings, "store": str(tmp_path / "unknown")})
    ours = monitor.CheckpointCallback(settings)
    with pytest.raises(UsageError, match="before there is a Trainer with this callback"):
        monitor.resume_path(settings)
    del ours


@pytest.mark.parametrize("objects", [0, 1])
def test_a_store_of_another_loop_is_refused(tmp_path: Path, settings: dict[str, Any], objects: int) -> None:
    model, state = Model(1), [_Counter() for _ in range(objects)]
    with monitor.attach((model, torch.optim.AdamW(model.parameters())), settings, state=state) as ckpt:
        ckpt.resume()
        ckpt.save(wait=True)
    ours = monitor.CheckpointCallback(settings)
    trainer(tmp_path, ours)
    with pytest.raises(ModelMismatchError, match=r"not written by monitor\.CheckpointCallback"):
        ours.resume_path()


def test_an_imported_commit_gives_the_step_only(tmp_path: Path) -> None:
    ours = _Nothing()
    args = trainer(tmp_path, ours, eval_strategy="steps", eval_steps=3).args
    state = trainer_state(ResumePrediction(SaveId(4, 1), None, memory=False), None, args, current_group())
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    found = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    compare_trainer_and_checkpoint_args(args, found)
    assert (found.global_step, found.logging_steps, found.eval_steps) == (4, 1, 3)


class _Counter:
    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.slow
def test_checkpoints_of_the_trainer_itself_can_be_resumed(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(Boom):
        trainer(tmp_path, _Nothing(), At(8, boom), save_strategy="steps", save_steps=3).train()
    ours = monitor.CheckpointCallback(settings)
    running = trainer(tmp_path, ours, save_strategy="steps", save_steps=3)
    running.train(resume_from_checkpoint=True)
    again = trainer(tmp_path, monitor.CheckpointCallback(settings))
    again.train(resume_from_checkpoint=monitor.resume_path(settings))
    assert sorted(losses(again)) == list(range(1, 11))


@pytest.mark.slow
def test_damage_found_while_reading_costs_one_attempt(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours = monitor.CheckpointCallback({**settings, "every": 3})
    with pytest.raises(Boom):
        trainer(tmp_path, ours, At(8, boom)).train()
    ours.close(clean=False)
    payload = next((tmp_path / "store" / "segments").glob("00000006-*/rank-00000.safetensors"))
    damage(payload, "/fp32/")
    attempt = trainer(tmp_path, again := monitor.CheckpointCallback(ours.config))
    with pytest.raises(StoreError, match="step 6 was predicted"):
        attempt.train(resume_from_checkpoint=again.resume_path())
    attempt = trainer(tmp_path, again := monitor.CheckpointCallback(ours.config))
    attempt.train(resume_from_checkpoint=again.resume_path())
    assert sorted(losses(attempt)) == list(range(1, 11))
    assert not (tmp_path / "store.resume.json").exists()


@pytest.mark.slow
def test_a_composite_under_a_budget_resumes_at_its_effective_step(tmp_path: Path, settings: dict[str, Any]) -> None:
    limits = {"policy": "budget", "budget": {"bytes_per_hour": 2e6, "burst_seconds": 2}, "every": 1}
    ours = monitor.CheckpointCallback({**settings, **limits, "encoding": "compact"})
    with pytest.raises(Boom):
        trainer(tmp_path, ours, At(8, boom)).train()
    ours.close(clean=False)
    again = monitor.CheckpointCallback(ours.config)
    seen: list[Any] = []
    attempt = trainer(tmp_path, again, seed=4)
    attempt.add_callback(Begun(lambda: seen.append((again.checkpointer, again.checkpointer.certificate))))
    attempt.train(resume_from_checkpoint=again.resume_path())
    ((_, certificate),) = seen
    assert certificate is not None and not certificate.exact
    assert sorted(losses(attempt)) == list(range(1, 11))


def damage(payload: Path, marked: str) -> None:
    """Flip a bit in every tensor whose name holds that."""
    data = bytearray(payload.read_bytes())
    body = 8 + int.from_bytes(data[:8], "little")
    for name, tensor in json.loads(data[8:body]).items():
        if marked in name:
            data[body + tensor["data_offsets"][0]] ^= 1
    payload.chmod(0o644)
    payload.write_bytes(data)


class Begun(TrainerCallback):
    """Does something when training begins."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.what()


class _Nothing(TrainerCallback):
    checkpointer = None


@pytest.mark.slow
def test_monitor_needs_no_transformers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        "import monitor\n"
        "try:\n    monitor.CheckpointCallback\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (
        done.stdout == "monitor.CheckpointCallback needs transformers and accelerate: `pip install 'driftpoint[hf]'`\n"
    )
