"""Files of ``torch.save``, and folders with ``optimizer.pt``: imported and resumed bit for bit, or refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model

import monitor
from merger.checkpoint import Checkpoint
from merger.import_checkpoint import import_checkpoint, plan_import
from merger.layouts.base import Target
from merger.merge import merge
from merger.sources import open_source
from store.errors import DamagedError, MergeError, ModelMismatchError, UnsupportedError, UsageError
from tests.support.torch_jobs import LAST, STEPS, Job, equal


def read(path: Path) -> Checkpoint:
    return open_source(path).checkpoint(None, frozenset())


def numbered_file(directory: Path, job: Job) -> Path:
    (directory / "param_names.json").write_text(json.dumps(job.names))
    torch.save({**job.state(), "lr_scheduler": job.scheduler.state_dict(), "epoch": 0}, directory / "last.pt")
    return directory / "last.pt"


def named_file(directory: Path, job: Job) -> Path:
    whole = {f"{key}_state_dict": value for key, value in job.state().items()}
    torch.save({**whole, "lr_scheduler_state_dict": job.scheduler.state_dict()}, directory / "last.pth")
    return directory / "last.pth"


def folder(directory: Path, job: Job) -> Path:
    """As Accelerate's save_state, without FSDP."""
    (directory / "saved").mkdir()
    save_model(job.model, str(directory / "saved" / "model.safetensors"))
    torch.save(job.optimizer.state_dict(), directory / "saved" / "optimizer.bin")
    torch.save(job.scheduler.state_dict(), directory / "saved" / "scheduler.bin")
    (directory / "saved" / "param_names.json").write_text(json.dumps(job.names))
    return directory / "saved"


@pytest.mark.parametrize(("made", "named"), [(numbered_file, False), (named_file, True), (folder, False)])
def test_a_job_resumes_bitwise(tmp_path: Path, made: Callable[[Path, Job], Path], named: bool) -> None:
    job = Job(1, named=named)
    job.train(0, STEPS)
    source = made(tmp_path, job)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    found = import_checkpoint(plan_import(source), tmp_path / "store")
    assert found.save.step == STEPS and found.certificate.as_found
    assert {path: path.read_bytes() for path in before} == before
    again = Job(2, named=named)
    settings = {"store": str(tmp_path / "store"), "every": 1, "metrics": {"enabled": False}}
    target = (again.model, again.optimizer)
    with monitor.attach(target, settings, state={"lr_scheduler": again.scheduler}) as ckpt:
        assert not equal(again.state()["model"], job.state()["model"])
        assert ckpt.resume() == STEPS
        assert equal(again.state(), job.state())
        assert again.train(STEPS, LAST) == job.train(STEPS, LAST)
        assert equal(again.state(), job.state())
        ckpt.step()


def test_the_schedule_is_never_dropped_in_silence(tmp_path: Path) -> None:
    job = Job(1)
    job.train(0, STEPS)
    plan = plan_import(named_file(tmp_path, job))
    assert any("except lr_scheduler" in note for note in plan.notes)
    import_checkpoint(plan, tmp_path / "store")
    again = Job(2)
    settings = {"store": str(tmp_path / "store"), "metrics": {"enabled": False}}
    with monitor.attach((again.model, again.optimizer), settings) as ckpt, pytest.raises(ModelMismatchError):
        ckpt.resume()


def test_without_names_the_order_is_not_guessed(tmp_path: Path) -> None:
    job = Job(1, named=False)
    job.train(0, 1)
    torch.save(job.state(), tmp_path / "last.pt")
    with pytest.raises(UnsupportedError, match=r"not guessed.*named_parameters.*param_names\.json"):
        read(tmp_path / "last.pt")
    for wrong in ([job.names[0]], job.names[::-1], [*job.names, []], [job.names[0], [*job.names[1][:-1], "shift2"]]):
        (tmp_path / "param_names.json").write_text(json.dumps(wrong))
        with pytest.raises(MergeError):
            read(tmp_path / "last.pt")


def test_kinds_and_ties(tmp_path: Path) -> None:
    job = Job(1)
    job.train(0, 1)
    found = read(named_file(tmp_path, job))
    kinds = {fqn: (record.kind, record.aliases) for fqn, record in found.tensors.items()}
    assert kinds.pop("embed.weight") == ("trainable", ("head.weight",))
    assert kinds.pop("shift") == kinds.pop("seen") == ("frozen", ())
    assert set(kinds.values()) == {("trainable", ())} and len(kinds) == 4
    assert found.framework_state["slots"]["layers.0.bias"] == ["exp_avg", "exp_avg_sq"]


def test_a_repeated_tensor_is_tied_only_to_one_that_it_equals(tmp_path: Path) -> None:
    job = Job(1)
    job.train(0, 1)
    for change, expected in ((0.0, ("head.weight",)), (1.0, ())):
        state = job.state()
        state["model"]["head.weight"] = state["model"]["embed.weight"].clone() + change
        torch.save(state, tmp_path / "last.pt")
        assert read(tmp_path / "last.pt").tensors["embed.weight"].aliases == expected


@pytest.mark.parametrize(
    ("noted", "kind", "expected"),
    [({"step": 70}, torch.optim.AdamW, 2), ({"global_step": 9}, torch.optim.SGD, 9), ({}, torch.optim.SGD, None)],
)
def test_the_step_is_the_optimizers_where_it_counts(
    tmp_path: Path, noted: dict[str, int], kind: Any, expected: int | None
) -> None:
    job = Job(1, kind=kind)
    job.train(0, 2)
    torch.save({**job.state(), **noted}, tmp_path / "last.pt")
    if expected is None:
        with pytest.raises(UnsupportedError, match="does not say its step"):
            read(tmp_path / "last.pt")
        return
    assert read(tmp_path / "last.pt").step == expected
    with pytest.raises(MergeError, match="is one checkpoint"):
        open_source(tmp_path / "last.pt").checkpoint(expected + 1, frozenset())


def test_what_is_refused(tmp_path: Path) -> None:
    job, path = Job(1), tmp_path / "last.pt"
    job.train(0, 1)
    state = job.state()
    torch.save({"model": state["model"]}, path)
    with pytest.raises(UnsupportedError, match=r"not both a model .* and an optimizer"):
        read(path)
    torch.save({**state, "mine": Path("/tmp")}, path)
    with pytest.raises(UnsupportedError, match="pathlib"):
        read(path)
    moments = state["optimizer"]["state"][1]
    torch.save(
        {**state, "optimizer": {**state["optimizer"], "state": {1: {**moments, "exp_avg": torch.zeros(5)}}}}, path
    )
    with pytest.raises(MergeError, match=r"exp_avg of .* has the shape"):
        read(path)
    torch.save(state, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises((DamagedError, MergeError)):
        read(path)


def test_a_changed_byte_is_found_by_the_import(tmp_path: Path) -> None:
    job, path = Job(1), tmp_path / "last.pt"
    job.train(0, 1)
    torch.save(job.state(), path)
    value = job.model.embed.weight.detach().numpy().tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(value) + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError):
        import_checkpoint(plan_import(path), tmp_path / "store")


@pytest.mark.parametrize("cut", [9, -1])
def test_a_weights_file_that_is_cut_off(tmp_path: Path, cut: int) -> None:
    job = Job(1)
    job.train(0, 1)
    path = folder(tmp_path, job) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DamagedError):
        read(path.parent)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    job = Job(1)
    job.train(0, 1)
    with torch.no_grad():
        job.model.layers[0].bias[1] = math.nan
    source = folder(tmp_path, job)
    with pytest.raises(MergeError, match="NaN"):
        import_checkpoint(plan_import(source), tmp_path / "store")


def test_a_merge_takes_a_file_and_a_composite_stays_one(tmp_path: Path) -> None:
    job = Job(1)
    job.train(0, STEPS)
    result = merge(named_file(tmp_path, job), tmp_path / "out", target=Target("dcp"))
    assert result.certificate.as_found and not result.certificate.exact
    plan = plan_import(tmp_path / "out")
    assert plan.checkpoint.step == STEPS and plan.checkpoint.certificate.as_found
    document = json.loads((tmp_path / "out" / "driftpoint-certificate.json").read_text())
    (tmp_path / "out" / "driftpoint-certificate.json").write_text(json.dumps({**document, "as_found": False}))
    with pytest.raises(UsageError, match="not exact"):
        plan_import(tmp_path / "out")
