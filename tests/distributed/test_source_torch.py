"""Checkpoints of FSDP2, Accelerate, torchtitan and the Trainer, as their own code saves them: imported, and resumed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from merger.import_checkpoint import import_checkpoint, plan_import
from merger.layouts.base import Target
from merger.merge import merge
from store.errors import ConfigError, UnsupportedError
from tests.support.launch import Launched, alone, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FORMS = ("nested", "flattened", "sharded")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Launched]:
    pytest.importorskip("accelerate")
    directory = tmp_path_factory.mktemp("fsdp2")
    launched = torchrun("source_torch.py", 2, {"role": "save"}, directory)
    assert launched.code == 0, launched.output[-6000:]
    for form in FORMS:
        found = import_checkpoint(plan_import(directory / form), directory / f"{form}-store")
        assert found.save.step == 3 and found.certificate.as_found
    return directory, launched


def resumed(directory: Path, ranks: int, tmp_path: Path, stores: dict[str, Path], **spec: Any) -> Launched:
    given = {"role": "resume", "state": str(directory / "state.pt"), **spec}
    launched = torchrun("source_torch.py", ranks, {**given, "stores": {k: str(v) for k, v in stores.items()}}, tmp_path)
    assert launched.code == 0, launched.output[-6000:]
    return launched


@pytest.mark.core
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_job_resumes_bitwise(saved: tuple[Path, Launched], tmp_path: Path, ranks: int) -> None:
    directory, launched = saved
    before = {one["rank"]: one for one in launched.of("saved")}
    stores = {form: directory / f"{form}-store" for form in (FORMS if ranks == 2 else FORMS[:1])}
    told = resumed(directory, ranks, tmp_path, stores).of("resumed")
    assert len(told) == ranks * len(stores)
    for one in told:
        assert (one["step"], one["differences"], one["as_found"]) == (3, [], True), one["name"]
        assert one["hyper"] == before[0]["hyper"]
        if ranks == 2:
            assert one["losses"] == before[one["rank"]]["losses"]


def test_tensors_cut_along_any_dimension(saved: tuple[Path, Launched], tmp_path: Path) -> None:
    directory, _ = saved
    merge(directory / "columns", tmp_path / "out", target=Target("torch"))
    expected = torch.load(directory / "state.pt", weights_only=True)
    model = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert torch.equal(model["head.weight"], model["embed.weight"])
    for name, slots in expected.items():
        assert torch.equal(model[name], slots.get("fp32", slots.get("buffer"))), name
    optimizer = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    names = [
        fqn
        for group in plan_import(directory / "columns").checkpoint.framework_state["param_groups"]
        for fqn in group["params"]
    ]
    for number, kept in optimizer["state"].items():
        for slot, value in kept.items():
            assert torch.equal(value, expected[names[number]][slot])


def test_torchtitan_both_ways(tmp_path: Path) -> None:
    """Its own checkpoint manager saves; a job resumes from the import; and it loads what is merged of that."""
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    folder = tmp_path / "checkpoint"
    spec = {"role": "torchtitan-save", "folder": str(folder), "seed": 0, "path": sys.path}
    first = torchrun("source_torch.py", 2, spec, tmp_path)
    assert first.code == 0, first.output[-6000:]
    plan = plan_import(folder)
    assert plan.kind == "dcp" and plan.checkpoint.step == 3
    import_checkpoint(plan, tmp_path / "store")
    (told, _) = resumed(tmp_path, 2, tmp_path, {"titan": tmp_path / "store"}, drop=["lr_scheduler"]).of("resumed")
    assert (told["step"], told["differences"]) == (3, [])
    merge(tmp_path / "store", tmp_path / "merged" / "step-3", target=Target("dcp"))
    again = {**spec, "role": "torchtitan-load", "folder": str(tmp_path / "merged"), "seed": 1}
    loaded = torchrun("source_torch.py", 2, {**again, "state": str(tmp_path / "state.pt")}, tmp_path)
    assert loaded.code == 0, loaded.output[-6000:]
    expected = {one["rank"]: one["losses"] for one in first.of("saved")}
    for one in loaded.of("loaded"):
        assert (one["step"], one["last_epoch"], one["differences"]) == (3, 3, [])
        assert one["losses"] == expected[one["rank"]]


def test_torchtitan_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Its optimizers, schedules and data loader, in the loop of its trainer, with the manager that its config names."""
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    spec = {"role": "torchtitan-train", "seed": 0, "path": sys.path, "steps": 9, "folder": str(tmp_path / "store")}
    whole = torchrun("source_torch.py", 2, {**spec, "enable": False}, tmp_path)
    assert whole.code == 0 and not (tmp_path / "store").exists(), whole.output[-6000:]
    killed = torchrun("source_torch.py", 2, {**spec, "enable": True, "dies": 6}, tmp_path)
    assert killed.code != 0
    again = torchrun("source_torch.py", 2, {**spec, "enable": True}, tmp_path)
    assert again.code == 0, again.output[-6000:]
    assert {(one["step"], one["resumed"]) for one in again.of("began")} == {(4, True)}
    assert again.of("done", rank=0) == whole.of("done", rank=0)
    for rank in (0, 1):
        expected = whole.of("loss", rank=rank)
        assert killed.of("loss", rank=rank) == [one for one in expected if one["step"] <= 6]
        assert again.of("loss", rank=rank) == [one for one in expected if one["step"] > 4]
    assert "the last step 9 is committed" in again.output


def test_torchtitans_settings_are_not_ignored(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    import monitor

    given: dict[str, Any] = {"dataloader": None, "optimizers": None, "lr_schedulers": None, "states": {}}
    for settings, error, told in (
        ({"keep_latest_k": 3}, ConfigError, "checkpoint.keep_latest_k"),
        ({"initial_load_path": "/data/step-9"}, ConfigError, "checkpoint.initial_load_path"),
        ({}, UnsupportedError, "2 stages"),
    ):
        config = monitor.TorchtitanCheckpointManager.Config(enable=True, **settings)
        with pytest.raises(error, match=told):
            config.build(model_parts=[torch.nn.Linear(1, 1)] * 2, sd_adapter=None, **given)
    off = monitor.TorchtitanCheckpointManager.Config().build(model_parts=[], sd_adapter=None, **given)
    assert off.load() is off.save(1) is False


def test_a_trainer_goes_on_from_its_own_folder(tmp_path: Path) -> None:
    """Without DeepSpeed or FSDP; parameters are named by transformers' own model, in the Trainer's own order."""
    pytest.importorskip("transformers")
    whole = alone("source_hf.py", {"role": "save", "output": str(tmp_path / "run")}, tmp_path)
    assert whole.code == 0, whole.output[-6000:]
    plan = plan_import(tmp_path / "run", "4")
    assert (plan.kind, plan.checkpoint.framework, plan.checkpoint.step) == ("trainer", "torch", 4)
    found = import_checkpoint(plan, tmp_path / "store")
    assert found.certificate.as_found and any("except TrainerProgress" in note for note in found.notes)
    again = alone(
        "source_hf.py", {"role": "resume", "store": str(tmp_path / "store"), "output": str(tmp_path / "2")}, tmp_path
    )
    assert again.code == 0, again.output[-6000:]
    expected, told = whole.one("trained"), again.one("trained")
    assert told["losses"] == expected["losses"][-len(told["losses"]) :] and len(told["losses"]) == 2 * (7 - 4)
    assert told["rates"] == expected["rates"]
    assert told["weights"] == expected["weights"]
