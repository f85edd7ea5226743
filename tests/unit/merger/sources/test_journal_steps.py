"""Steps that have no commit are merged from the journal: to the bit of the job that was there, and labelled."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import monitor.save.journaled_saver as journaled_saver
from merger.checkpoint import Checkpoint
from merger.import_checkpoint import plan_import
from merger.layouts.base import Target
from merger.merge import merge
from merger.sources.store import StoreSource
from store.errors import MergeError, UnsupportedError, UsageError
from store.fragments import FragmentIndex
from tests.support.journaled import DAMAGE, Job, damage, keep, records

POLICIES = ["full", {"name": "parity", "k": 2}]


def trained(store: Path, last: int = 9, job: Job | None = None, **settings: Any) -> dict[int, Any]:
    """Train with the journal, and return the state of each step."""
    kept: dict[int, Any] = {}
    job = job or Job()
    job.run(job.attach(store, **settings), last, after=keep(job, kept))
    return kept


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """The store of a job with commits at steps 4 and 8 that died after step 9, and the state of each step."""
    store = tmp_path_factory.mktemp("job") / "store"
    return store, trained(store)


@pytest.fixture
def store(job: tuple[Path, dict[int, Any]], tmp_path: Path) -> Path:
    """A copy of that store."""
    return Path(shutil.copytree(job[0], tmp_path / "store"))


def merged(store: Path, out: Path, step: int) -> tuple[dict[str, Any], dict[str, Any], Any]:
    result = merge(store, out, save=step, target=Target("torch"))
    model, optimizer = (torch.load(out / name, weights_only=False) for name in ("model.pt", "optimizer.pt"))
    return model, optimizer, result


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("step", [5, 9])
def test_a_step_between_two_commits(tmp_path: Path, policy: Any, step: int) -> None:
    kept = trained(tmp_path / "store", every=2, policy=policy)
    model, optimizer, result = merged(tmp_path / "store", tmp_path / "out", step)
    for name, value in kept[step]["model"].items():
        assert torch.equal(model[name], value), name
    for number, state in kept[step]["optimizer"].items():
        assert state.keys() == optimizer["state"][number].keys()
        for slot, value in state.items():
            assert torch.equal(optimizer["state"][number][slot], value), (number, slot)
    assert result.certificate.step == step
    assert not result.certificate.exact
    assert "taken again from the journal" in result.certificate.problems[0]


def assert_weights(out: Path, state: dict[str, Any]) -> None:
    found = load_file(out / "model.safetensors")
    for name, value in state["model"].items():
        assert torch.equal(found[name], value), name


class Renamed(torch.optim.AdamW):
    """A class of the job's own: who knows what its steps do."""


def test_weights_alone(job: tuple[Path, dict[int, Any]], tmp_path: Path) -> None:
    store, kept = job
    merge(store, tmp_path / "out", save="7", target=Target("hf"))
    assert_weights(tmp_path / "out", kept[7])


@pytest.mark.parametrize(
    "job",
    [
        {"kind": torch.optim.SGD, "momentum": 0.9},
        {"kind": torch.optim.RMSprop},
        {"amsgrad": True, "foreach": True},
        {"fused": True},
    ],
    ids=str,
)
def test_other_optimizers(tmp_path: Path, job: dict[str, Any]) -> None:
    kept = trained(tmp_path / "store", job=Job(**job), packing="auto")
    _, optimizer, _ = merged(tmp_path / "store", tmp_path / "out", 7)
    for number, state in kept[7]["optimizer"].items():
        assert all(torch.equal(torch.as_tensor(optimizer["state"][number][slot]), state[slot]) for slot in state)


@pytest.mark.parametrize("kind", [Renamed, torch.optim.NAdam], ids=lambda kind: kind.__name__)
def test_optimizers_whose_steps_are_not_known_are_refused(tmp_path: Path, kind: Any) -> None:
    trained(tmp_path / "store", job=Job(kind=kind))
    with pytest.raises(UnsupportedError, match=kind.__name__):
        merged(tmp_path / "store", tmp_path / "out", 7)
    assert not (tmp_path / "out").exists()


def test_records_of_a_release_that_does_not_tell_the_optimizer_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journaled_saver, "KIND", "unknown")
    trained(tmp_path / "store")
    with pytest.raises(UnsupportedError, match="older release"):
        merged(tmp_path / "store", tmp_path / "out", 7)


@pytest.mark.parametrize("step", [3, 10, 100])
def test_a_step_that_the_journal_does_not_lead_to_is_refused(store: Path, tmp_path: Path, step: int) -> None:
    """3: before the first commit."""
    with pytest.raises(UsageError, match=f"no checkpoint {step}.*steps 8, 4"):
        merged(store, tmp_path / "out", step)


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_record_is_never_taken(
    job: tuple[Path, dict[int, Any]], store: Path, tmp_path: Path, what: str
) -> None:
    DAMAGE[what](next(one for one in records(store) if one.name.startswith("00000006")))
    with pytest.raises((MergeError, UsageError)):
        merged(store, tmp_path / "out", 7)
    assert not (tmp_path / "out").exists()
    merge(store, tmp_path / "before", save=5, target=Target("hf"))
    assert_weights(tmp_path / "before", job[1][5])


def test_a_damaged_commit_gives_way_to_the_one_before(
    job: tuple[Path, dict[int, Any]], store: Path, tmp_path: Path
) -> None:
    kept = job[1]
    damage(store / "segments/00000008-000001/rank-00000.safetensors")
    model, _, result = merged(store, tmp_path / "out", 9)
    assert all(torch.equal(model[name], value) for name, value in kept[9]["model"].items())
    assert "the steps after 4 were taken again" in "".join(result.certificate.problems)


def test_records_of_an_abandoned_branch_are_not_taken(store: Path, tmp_path: Path) -> None:
    """A job that went back claims an epoch: its own steps are meant, not those that it left."""
    kept: dict[int, Any] = {}
    again = Job(seed=2)
    ckpt = again.attach(store)
    assert ckpt.resume(step=5) == 5
    torch.manual_seed(99)
    for step in (6, 7):
        again.train_one_step()
        ckpt.step()
        ckpt.flush()
        keep(again, kept)(step)
    ckpt.finish(clean=False)
    model, _, _ = merged(store, tmp_path / "out", 7)
    assert all(torch.equal(model[name], value) for name, value in kept[7]["model"].items())


def test_a_parameter_that_was_frozen_at_the_commit_is_refused(tmp_path: Path) -> None:
    """The journal is interrupted there."""
    job, store = Job(), tmp_path / "store"
    bias = job.model.get_parameter("0.0.bias").requires_grad_(False)
    job.run(job.attach(store), 7, before=lambda step: setattr(bias, "requires_grad", step >= 5))
    with pytest.raises(UsageError, match="no checkpoint 7"):
        merge(store, tmp_path / "out", save=7, target=Target("hf"))


def test_a_parameter_that_the_commit_does_not_hold_is_refused(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge fails, instead of writing the model without it."""
    whole = StoreSource._checkpoint

    def without_one(source: StoreSource, *arguments: Any) -> Checkpoint:
        found = whole(source, *arguments)
        held = (one for (fqn, _), stored in found.index.names().items() if fqn != "0.0.bias" for one in stored)
        return replace(found, index=FragmentIndex(held))

    monkeypatch.setattr(StoreSource, "_checkpoint", without_one)
    with pytest.raises(UnsupportedError, match=r"0\.0\.bias: trained since commit 00000004"):
        merge(store, tmp_path / "out", save=7, target=Target("hf"))


def sign(optimizer: torch.optim.Optimizer) -> None:
    for one in optimizer.param_groups[0]["params"]:
        one.grad.sign_()


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_steps_with_hooks_of_the_script_are_refused(tmp_path: Path, kind: str) -> None:
    """A hook before the step comes after the record was taken, and none is called here."""
    job, store = Job(), tmp_path / "store"
    getattr(job.optimizer, f"register_step_{kind}_hook")(lambda optimizer, *_: sign(optimizer))
    trained(store, job=job)
    with pytest.raises(UnsupportedError, match="with hooks of the script"):
        merge(store, tmp_path / "out", save=7, target=Target("hf"))


def test_a_damaged_buffer_is_never_taken(store: Path, tmp_path: Path) -> None:
    record = next(one for one in records(store) if one.name.startswith("00000007"))
    part, path = json.loads((record / "rank-00000.json").read_bytes())["body"], record / "rank-00000.safetensors"
    data, entry = bytearray(path.read_bytes()), next(one for one in part["entries"] if one["slot"] == "buffer")
    data[part["header_bytes"] + entry["offset"]] ^= 1
    path.write_bytes(data)
    with pytest.raises(MergeError, match="the record of step 7 is damaged"):
        merge(store, tmp_path / "out", save=7, target=Target("hf"))


def test_a_damaged_run_state_of_the_commit_gives_way_to_the_commit_before(
    job: tuple[Path, dict[int, Any]], store: Path, tmp_path: Path
) -> None:
    path = store / "segments/00000008-000001/rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # run state comes last
    path.write_bytes(data)
    result = merge(store, tmp_path / "out", save=9, target=Target("hf"))
    assert "the steps after 4 were taken again" in result.problems[-1]
    assert_weights(tmp_path / "out", job[1][9])


@pytest.mark.parametrize("wanted", [8, "00000008-000002"], ids=str)
def test_a_step_of_the_newest_branch_goes_before_a_commit_of_one_that_was_left(
    job: tuple[Path, dict[int, Any]], store: Path, tmp_path: Path, wanted: Any
) -> None:
    again, kept = Job(seed=2), dict[int, Any]()
    ckpt = again.attach(store, every=100)
    assert ckpt.resume(step=5) == 5
    torch.manual_seed(99)
    for step in (6, 7, 8):
        again.train_one_step()
        ckpt.step()
        ckpt.flush()
        keep(again, kept)(step)
    ckpt.finish(clean=False)
    merge(store, tmp_path / "out", save=wanted, target=Target("hf"))
    assert_weights(tmp_path / "out", kept[8])
    left = merge(store, tmp_path / "left", save="00000008-000001", target=Target("hf"))
    assert left.certificate.exact
    assert not left.problems
    assert_weights(tmp_path / "left", job[1][8])
    DAMAGE["torn"](store / "journal/segments/00000007-000002")
    if wanted == 8:
        left = merge(store, tmp_path / "torn", save=wanted, target=Target("hf"))
        assert "step 8 of a newer branch, to which no whole records lead" in left.problems[0]
        assert_weights(tmp_path / "torn", job[1][8])


def test_a_parameter_that_was_frozen_after_training_keeps_its_moments(tmp_path: Path) -> None:
    job, store = Job(), tmp_path / "store"
    bias = job.model.get_parameter("0.0.bias")
    kept: dict[int, Any] = {}
    freeze = lambda step: setattr(bias, "requires_grad", step < 3)  # noqa: E731
    job.run(job.attach(store), 9, before=freeze, after=keep(job, kept))
    _, optimizer, _ = merged(store, tmp_path / "out", 9)
    for number, state in kept[9]["optimizer"].items():
        assert all(torch.equal(optimizer["state"][number][slot], value) for slot, value in state.items())


def test_a_layer_that_is_trained_in_some_steps_only_in_a_composite(tmp_path: Path) -> None:
    job, store, kept = Job(), tmp_path / "store", dict[int, Any]()
    skipped = list(job.model[2].parameters())
    train = job.train_one_step

    def train_one_step() -> float:
        for one in skipped:
            one.grad = None
            one.requires_grad_(True)
        hooks = [one.register_post_accumulate_grad_hook(drop) for one in skipped] if len(kept) % 3 == 1 else []
        loss = train()
        for hook in hooks:
            hook.remove()
        return loss

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    job.train_one_step = train_one_step  # type: ignore[method-assign]
    job.run(job.attach(store, every=2, policy={"name": "parity", "k": 3}), 13, after=keep(job, kept))
    for step in (11, 13):
        merge(store, tmp_path / f"{step}", save=step, target=Target("hf"))
        assert_weights(tmp_path / f"{step}", kept[step])


@pytest.mark.parametrize("step", ["9" * 5000, "\uff17", "0007", "00000007-000003", "tag"], ids=lambda step: step[:20])
def test_what_names_no_step_is_refused(store: Path, tmp_path: Path, step: str) -> None:
    with pytest.raises((MergeError, UsageError)):
        merge(store, tmp_path / "out", save=step, target=Target("hf"))


def test_a_step_of_the_journal_is_not_linked(store: Path) -> None:
    with pytest.raises(UsageError, match="is no commit"):
        plan_import(store, "7", link=True)


def test_the_count_of_steps_does_not_depend_on_torchs_default_dtype(tmp_path: Path) -> None:
    """bfloat16 cannot count past 256."""
    job, store = Job(), tmp_path / "store"
    job.train_one_step()
    for state in job.optimizer.state.values():
        state["step"].fill_(300)
    kept = trained(store, job=job)
    try:
        torch.set_default_dtype(torch.bfloat16)
        merge(store, tmp_path / "out", save=7, target=Target("hf"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert_weights(tmp_path / "out", kept[7])
