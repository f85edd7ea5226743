"""Files of ``torch.save``, and folders with ``optimizer.pt``: imported and resumed bit for bit, or refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file, save_model
from torch.distributed.checkpoint.state_dict import get_state_dict

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


def merged(directory: Path, job: Job) -> Path:
    """As ``driftpoint merge --layout torch``, which writes no file for the schedule."""
    import_checkpoint(plan_import(folder(directory, job)), directory / "first")
    merge(directory / "first", directory / "merged", target=Target("torch"))
    torch.save(job.scheduler.state_dict(), directory / "merged" / "scheduler.bin")
    return directory / "merged"


@pytest.mark.parametrize(
    ("made", "named"), [(numbered_file, False), (named_file, True), (folder, False), (merged, True), (merged, False)]
)
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


def test_no_name_of_a_tensor_with_three_is_lost(tmp_path: Path) -> None:
    """A copy of tied tensors, such as a target network, that was just synchronized and is tied in itself."""
    job = Job(1)
    job.train(0, 1)
    state = job.state()
    copy = state["model"]["embed.weight"].clone()
    state["model"] |= {"target.embed.weight": copy, "target.head.weight": copy}
    torch.save(state, tmp_path / "last.pt")
    found = read(tmp_path / "last.pt").tensors
    names = {name for fqn, record in found.items() for name in (fqn, *record.aliases)}
    assert names == state["model"].keys()


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


class Doubled(torch.nn.Module):
    """A module named ``module`` beside a frozen one of the same shape, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(3, 3, bias=False)
        self.weight = torch.nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.module(x) @ self.weight).sum() + self.empty.sum()


def doubled(*, frozen: bool = True) -> tuple[Doubled, list[torch.optim.Optimizer]]:
    model = Doubled()
    model.weight.requires_grad_(not frozen)
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    cut = 0 if frozen else 1
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(named[:cut], lr=0.1, momentum=0.9)] if cut else []
    optimizers.append(torch.optim.AdamW(named[cut:]))
    model(torch.ones(2, 3)).backward()
    for one in optimizers:
        one.step()
    return model, optimizers


def test_a_module_named_module_keeps_its_parameters(tmp_path: Path) -> None:
    model, (optimizer,) = doubled()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    import_checkpoint(plan_import(tmp_path / "last.pt"), tmp_path / "store")
    merge(tmp_path / "store", tmp_path / "out", target=Target("torch"))
    (group,) = read(tmp_path / "store").framework_state["param_groups"]
    assert sorted(group["params"]) == ["empty", "module.weight"]
    found = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)["state"]
    expected = optimizer.state_dict()
    assert equal(
        found,
        {
            group["params"].index(name): expected["state"][number]
            for number, name in enumerate(expected["param_groups"][0]["param_names"])
        },
    )


def test_several_optimizers_go_on_from_one_state(tmp_path: Path) -> None:
    model, optimizers = doubled(frozen=False)
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizers), strict=True))
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    import_checkpoint(plan_import(tmp_path / "saved"), tmp_path / "store")
    again, others = doubled(frozen=False)
    with monitor.attach((again, others), {"store": str(tmp_path / "store"), "metrics": {"enabled": False}}) as ckpt:
        assert ckpt.resume() == 1
    assert equal(again.state_dict(), model.state_dict())
    for one, other in zip(others, optimizers, strict=True):
        assert equal(one.state_dict(), other.state_dict())


def shards(path: Path, *, mixed: bool) -> None:
    whole = load_file(path / "model.safetensors")
    names = sorted(whole)
    parts = {"model-1.safetensors": names[:2], "model-2.safetensors": names[2:]}
    table = {name: part for part, own in parts.items() for name in own}
    for part, own in parts.items():
        more = {names[0]: whole[names[0]] + 1} if mixed else {}
        save_file({**{name: whole[name] for name in own}, **more}, path / part)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def test_weights_in_several_files(tmp_path: Path) -> None:
    job = Job(1)
    job.train(0, 1)
    path = folder(tmp_path, job)
    for mixed in (True, False):
        shards(path, mixed=mixed)
        plan_import(path)  # as the Trainer does: the file of all, where there is one
    (path / "model.safetensors").unlink()
    merge(path, tmp_path / "out", target=Target("torch"))
    found = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    expected = {name: value for name, value in job.model.state_dict().items() if name in found}
    assert equal(found, expected) and job.model.state_dict().keys() - found.keys() <= {"embed.weight", "head.weight"}
    shards_of_another = path / "model-2.safetensors"
    save_file({**load_file(shards_of_another), "embed.weight": torch.zeros(11, 6)}, shards_of_another)
    with pytest.raises(MergeError, match="files of different saves are mixed"):
        read(path)
    shards_of_another.unlink()
    with pytest.raises(MergeError, match=r"names model-2\.safetensors, which the folder lacks: copy all files"):
        read(path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": ')
    with pytest.raises(MergeError, match=r"index\.json is not JSON: .*; restore it, or name another folder"):
        read(path)
    for part in path.glob("model*"):
        part.unlink()
    with pytest.raises(UnsupportedError, match=r"no weights in model\.safetensors"):
        read(path)
    torch.save(job.model.state_dict(), path / "pytorch_model.bin")
    assert read(path).step == 1
    torch.save(job.model.state_dict(), path / "pytorch_model_1.bin")
    with pytest.raises(UnsupportedError, match=r"several models or optimizers \(pytorch_model_1.bin\)"):
        read(path)


@pytest.mark.parametrize(("name", "converted"), [("Llama", False), ("Mixtral", True)])
def test_a_folder_of_the_trainer_is_told_to_be_taken_in_its_own_order(
    tmp_path: Path, name: str, converted: bool
) -> None:
    """Of a model whose files hold other tensors than its memory (fused experts), nothing is concluded."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{name}Config")(**sizes, vocab_size=16, num_key_value_heads=2)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.save_pretrained(tmp_path)
    decay = transformers.Trainer.get_decay_parameter_names(None, model)
    groups = [[p for n, p in model.named_parameters() if (n in decay) is first] for first in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    sum(one.sum() for one in model.parameters()).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    progress = {"global_step": 1, "max_steps": 2, "num_train_epochs": 1}
    (tmp_path / "trainer_state.json").write_text(json.dumps(progress))
    if converted:
        with pytest.raises(UnsupportedError, match="not guessed"):
            read(tmp_path)
        return
    found = read(tmp_path)
    names = {id(one): fqn for fqn, one in model.named_parameters()}
    assert [group["params"] for group in found.framework_state["param_groups"]] == [
        [names[id(one)] for one in group] for group in groups
    ]
    assert any("in the order of the Trainer's own" in note for note in found.notes)


@pytest.mark.parametrize("noted", [-1, True])
def test_a_note_that_is_no_step_is_not_taken_for_one(tmp_path: Path, noted: Any) -> None:
    job = Job(1, kind=torch.optim.SGD)
    job.train(0, 2)
    torch.save({**job.state(), "step": noted}, tmp_path / "last.pt")
    with pytest.raises(UnsupportedError, match="does not say its step"):
        read(tmp_path / "last.pt")
