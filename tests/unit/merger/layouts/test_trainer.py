"""The trainer layout: what is brought to another step, what is left out, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from merger.checkpoint import RankState
from merger.layouts.base import Target
from merger.layouts.trainer import rescale_state, rng_files, scheduler_file, trainer_layout
from merger.merge import merge
from store.errors import MergeError, UnsupportedError, UsageError
from tests.support.described import described, tensor
from tests.support.plain_stores import PlainStore

STATE: dict[str, Any] = {
    "global_step": 20,
    "epoch": 2.0,
    "total_flos": 400.0,
    "num_input_tokens_seen": 1000,
    "max_steps": 40,
    "log_history": [{"step": step, "loss": 1.0} for step in (5, 10, 15, 20)],
    "best_metric": 0.5,
    "best_global_step": 15,
    "best_model_checkpoint": "run/checkpoint-15",
    "stateful_callbacks": {"TrainerControl": {"args": {"should_training_stop": True, "should_save": True}}},
}


def run_folder(tmp_path: Path, **change: Any) -> Path:
    """A Trainer's folder at step 20, with a scheduler."""
    folder = tmp_path / "checkpoint-20"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({**STATE, **change}))
    torch.save({"output_dir": "run"}, folder / "training_args.bin")
    torch.save(scheduler_at(20), folder / "scheduler.pt")
    return folder


def scheduler_at(step: int) -> dict[str, Any]:
    """What transformers' linear schedule keeps after a number of steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 - at / 40)
    for _ in range(step):
        optimizer.step()
        scheduler.step()
    return scheduler.state_dict()


def test_the_state_of_the_same_step_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    moved = rescale_state(folder, 20)
    assert moved.same_step and moved.document == (folder / "trainer_state.json").read_bytes() and moved.notes == ()
    file, note = scheduler_file(folder, moved, [0.25])
    assert file is not None and note is None
    assert file.container.data == (folder / "scheduler.pt").read_bytes()  # type: ignore[attr-defined]


def test_a_later_state_is_taken_back(tmp_path: Path) -> None:
    moved = rescale_state(run_folder(tmp_path), 10)
    state = json.loads(moved.document)
    assert (state["global_step"], state["epoch"], state["total_flos"]) == (10, 1.0, 200.0)
    assert state["num_input_tokens_seen"] == 500 and type(state["num_input_tokens_seen"]) is int
    assert [entry["step"] for entry in state["log_history"]] == [5, 10]
    assert [state[key] for key in ("best_metric", "best_global_step", "best_model_checkpoint")] == [None] * 3
    control = state["stateful_callbacks"]["TrainerControl"]["args"]
    assert control == {"should_training_stop": False, "should_save": False}
    assert state["max_steps"] == 40
    assert any("best metric" in note for note in moved.notes)


def test_the_best_so_far_stays_if_it_was_before(tmp_path: Path) -> None:
    moved = rescale_state(run_folder(tmp_path), 15)
    assert json.loads(moved.document)["best_metric"] == 0.5
    assert not any("best metric" in note for note in moved.notes)


def test_an_earlier_state_is_brought_forward(tmp_path: Path) -> None:
    moved = rescale_state(run_folder(tmp_path), 30)
    state = json.loads(moved.document)
    assert (state["global_step"], state["epoch"], len(state["log_history"])) == (30, 3.0, 4)
    assert any("nothing of steps 21 to 30" in note for note in moved.notes)


@pytest.mark.parametrize("step", [7, 33])
def test_a_schedule_that_is_a_function_of_the_step_is_brought_along(tmp_path: Path, step: int) -> None:
    folder = run_folder(tmp_path)
    expected = scheduler_at(step)
    file, note = scheduler_file(folder, rescale_state(folder, step), expected["_last_lr"])
    assert file is not None and note is not None and "of step 20" in note
    file_path = tmp_path / "scheduler.pt"
    file_path.write_bytes(file.container.data)  # type: ignore[attr-defined]
    assert torch.load(file_path, weights_only=True) == expected


@pytest.mark.parametrize("state", [{"best": 1.0, "num_bad_epochs": 2, "last_epoch": 20}, "no scheduler"])
def test_a_schedule_that_depends_on_more_is_left_out(tmp_path: Path, state: Any) -> None:
    folder = run_folder(tmp_path)
    torch.save(state, folder / "scheduler.pt")
    file, note = scheduler_file(folder, rescale_state(folder, 7), [0.1])
    assert file is None and note is not None and "cannot be brought to step 7" in note


def test_a_schedule_of_another_optimizer_is_left_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    assert scheduler_file(folder, rescale_state(folder, 7), [0.1, 0.2])[0] is None


@pytest.mark.parametrize("step", [None, "20", True, -1])
def test_a_state_that_names_no_step(tmp_path: Path, step: Any) -> None:
    with pytest.raises(MergeError, match="no valid global_step"):
        rescale_state(run_folder(tmp_path, global_step=step), 20)


def test_a_whole_merge(store: PlainStore, tmp_path: Path) -> None:
    store.save(10)
    files = run_folder(tmp_path)
    result = merge(store.root, tmp_path / "out", target=Target("trainer", files=files))
    folder = result.out / "checkpoint-10"
    assert result.tag == folder.name
    assert sorted(path.name for path in folder.iterdir()) == [
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "trainer_state.json",
        "training_args.bin",
    ]
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    assert optimizer["param_groups"][0]["lr"] == 0.5 and optimizer["state"][0]["step"].item() == 10
    scheduler = torch.load(folder / "scheduler.pt", weights_only=True)
    assert (scheduler["last_epoch"], scheduler["_last_lr"]) == (10, [0.5])
    assert (folder / "training_args.bin").read_bytes() == (files / "training_args.bin").read_bytes()
    assert any("no random-number states" in note for note in result.notes)  # this store has not all of them
    assert result.load == (f"trainer.train(resume_from_checkpoint='{folder}')",)


OPTIMIZER = {"param_groups": [{"params": ["w"], "hyper": {"lr": 0.1}}], "scalars": {}, "slots": {}}


def lay_out(**given: Any) -> Any:
    return trainer_layout(None, described({"w": tensor(2)}, state=OPTIMIZER, **given), Target("trainer"))


def test_what_a_trainer_could_not_resume_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"name a checkpoint-N folder of the run.*--files"):
        lay_out()
    with pytest.raises(UsageError, match=r"no trainer_state\.json; name a checkpoint-N folder"):
        lay_out(files=tmp_path)
    folder = run_folder(tmp_path)
    with pytest.raises(UsageError, match=r"no trainer_state\.json; name one of those in it: checkpoint-20"):
        lay_out(files=tmp_path)
    (folder / "scheduler.pt").unlink()
    with pytest.raises(MergeError, match=r"no scheduler\.pt, without which a Trainer does not load optimizer\.pt"):
        lay_out(files=folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="adapters only"):
        lay_out(files=folder)
    with pytest.raises(MergeError, match="no optimizer state"):
        trainer_layout(None, described({"w": tensor(2)}, files=folder), Target("trainer"))


def test_a_loss_scale_of_another_step_is_left_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    torch.save({"scale": 2.0}, folder / "scaler.pt")
    same, other = lay_out(files=folder, step=20), lay_out(files=folder, step=10)
    assert any(file.path == "checkpoint-20/scaler.pt" for file in same.files)
    assert not any(file.path.endswith("scaler.pt") for file in other.files)
    assert any("scaler.pt is left out" in note for note in other.notes)


def rng() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "cuda": [], "numpy": np.random.get_state(), "python": random.getstate()}


@pytest.mark.parametrize("ranks", [1, 3])
def test_random_numbers_go_on_where_every_rank_kept_them(tmp_path: Path, ranks: int) -> None:
    states = {rank: RankState(rng(), None) for rank in range(ranks)}
    checkpoint = described({"w": tensor(2)}, run_states=states)
    files, note = rng_files(checkpoint, tmp_path, ranks, same_step=False, distributed=False)
    names = ["rng_state.pth"] if ranks == 1 else ["rng_state_0.pth", "rng_state_1.pth", "rng_state_2.pth"]
    assert [file.path for file in files] == names and note is None
    (tmp_path / "one.pth").write_bytes(files[0].container.data)  # type: ignore[attr-defined]
    found = torch.load(tmp_path / "one.pth", weights_only=False)
    before = (random.random(), np.random.rand(), torch.rand(1))
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["cpu"])
    assert (random.random(), np.random.rand(), torch.rand(1)) == before
    fewer, note = rng_files(checkpoint, tmp_path, ranks + 1, same_step=False, distributed=False)
    assert fewer == () and note is not None


@pytest.mark.parametrize(
    ("there", "ranks", "same_step", "copied"),
    [(2, 2, True, 2), (2, 2, False, 0), (2, 3, True, 0), (3, 2, True, 0), (0, 2, True, 0)],
)
def test_random_numbers_of_the_folder(tmp_path: Path, there: int, ranks: int, same_step: bool, copied: int) -> None:
    for rank in range(there):
        torch.save(rng(), tmp_path / f"rng_state_{rank}.pth")
    files, note = rng_files(described({"w": tensor(2)}), tmp_path, ranks, same_step=same_step, distributed=True)
    expected = [(tmp_path / f"rng_state_{rank}.pth").read_bytes() for rank in range(copied)]
    assert [file.container.data for file in files] == expected  # type: ignore[attr-defined]
    assert (note is None) == bool(copied)


class Code:
    """An object that runs a function when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def with_extra_record(path: Path, name: str) -> None:
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(f"{path.stem}/{name}", b"x")


@pytest.mark.parametrize("how", ["a function", "no archive", "a program"])
@pytest.mark.parametrize("name", ["training_args.bin", "scaler.pt", "rng_state.pth", "scheduler.pt"])
def test_a_file_that_could_run_code_where_it_is_unpickled_is_left_out(tmp_path: Path, name: str, how: str) -> None:
    """All of them are unpickled by some release of transformers; the certificate would call the folder its own."""
    folder, mark = run_folder(tmp_path), tmp_path / "ran"
    if how == "no archive":
        (folder / name).write_bytes(pickle.dumps(Code(mark)))
    else:
        torch.save({"x": Code(mark) if how == "a function" else 1}, folder / name)
    if how == "a program":
        with_extra_record(folder / name, "constants.pkl")
    if name == "scheduler.pt":
        with pytest.raises(MergeError, match=r"scheduler\.pt: left out"):
            lay_out(files=folder, step=20)
    else:
        laid = lay_out(files=folder, step=20)
        assert not any(file.path.endswith(name) for file in laid.files)
        (note,) = (note for note in laid.notes if name in note)
        assert "left out" in note and (how != "a function" or "posix.mkdir" in note)
    assert not mark.exists()


def test_the_arguments_of_transformers_itself_are_copied(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = run_folder(tmp_path)
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "run"), report_to=[], use_cpu=True)
    torch.save(arguments, folder / "training_args.bin")
    laid = lay_out(files=folder, step=20)
    assert [file for file in laid.files if file.path.endswith("training_args.bin")]
