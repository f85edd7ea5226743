"""The first save of a job is compared with the live state: what does not come back is said at once, and never exact."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monitor import run_state
from monitor.save import async_copy
from monitor.save.self_check import SelfChecker
from store import catalog, schema
from store.catalog import open_catalog
from store.errors import NewerFormatError, StorageError
from store.memory import layout
from store.memory.index import scan_node
from store.names import STORE, SaveId
from store.state_tree import Leaf
from store.storage.local import LocalFiles
from tests.support.checked import Job, checks, errors, exact, require_found
from tests.support.hooked import HookedFiles
from tests.support.kept import abandoned, memory, settled, tier_of


class Counting(torch.optim.SGD):
    """Keeps something beside the state of its parameters, as averaging optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.average = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": {"values": self.average, "count": 7}}


class Scaled(nn.Linear):
    """Adds a tensor to its state dict that is neither a parameter nor a buffer, as quantizing layers do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.ones(2, dtype=torch.float64)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "driftpoint"):
        yield caplog


def test_a_state_that_comes_back_is_exact(store: Path, logged: pytest.LogCaptureFixture) -> None:
    job = Job(store, state=[torch.Generator(), torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)]))])
    job.step()
    job.step()
    assert errors(logged) == [] and exact(store) and job.failures == 0
    (said,) = checks(logged)
    assert "6 fragments" in said and "s of training" in said
    job.ckpt.close()


def test_state_of_an_optimizer_beside_its_parameters(store: Path, logged: pytest.LogCaptureFixture) -> None:
    require_found(
        Job(store, kind=Counting),
        store,
        logged,
        "optimizer.state_dict()['average']['values'] is torch.Tensor of torch.float32 (3,) and is in no part of a save",
        "['count'] is int",
    )
    other = Job(store, kind=Counting)
    assert other.ckpt.certificate is not None and not other.ckpt.certificate.exact
    assert any("average" in problem for problem in other.ckpt.certificate.problems)
    other.ckpt.close()


def test_what_was_found_is_recorded_where_there_is_no_memory_for_the_check(
    store: Path, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    job, begin = Job(store, kind=Counting), SelfChecker.begin

    def without_memory(checker: SelfChecker, save: SaveId, _: Any) -> Any:
        return begin(checker, save, (part for part in [None] if torch.empty(1 << 60)))  # type: ignore[misc]

    with monkeypatch.context() as patched:
        patched.setattr(SelfChecker, "begin", without_memory)
        job.step()
    job.step()
    job.ckpt.close(save=False)
    found = open_catalog(LocalFiles(store))
    assert "the live state cannot be sampled" in logged.text
    for save in found.saves():
        assert any("average" in text for text in found.manifest(save).differs), save


def test_older_releases_that_ignore_the_difference_refuse_the_store_and_its_memory(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = Job(store.parent / "same")
    same.step()
    assert open_catalog(LocalFiles(store.parent / "same")).record.reader == 1
    same.ckpt.close()
    job = Job(store, kind=Counting, memory=memory(store), every=2)
    for _ in range(3):
        job.step()
    settled(job)
    abandoned(job)
    assert open_catalog(LocalFiles(store)).record.reader == 2
    assert scan_node(tier_of(store)).newest is not None
    monkeypatch.setattr(schema, "READER", 1)
    monkeypatch.setattr(layout, "READER", 1)
    with pytest.raises(NewerFormatError):
        open_catalog(LocalFiles(store))
    monkeypatch.undo()
    tier = tier_of(store)
    monkeypatch.setattr(layout, "READER", 1)
    found = scan_node(tier)
    assert found.newest is None and "newer release" in found.problems[0]


def test_a_lost_store_record_is_restored_with_the_reader_that_its_commits_need(store: Path) -> None:
    job = Job(store, kind=Counting)
    job.step()
    job.ckpt.close()
    (store / STORE).unlink()
    assert catalog.restore_store_record(LocalFiles(store)).record.reader == 2


def test_a_state_dict_with_more_than_parameters_and_buffers(store: Path, logged: pytest.LogCaptureFixture) -> None:
    require_found(
        Job(store, nn.Sequential(Scaled(4, 4))),
        store,
        logged,
        "model.state_dict()['0.scale'] is torch.Tensor of torch.float64 (2,) and is in no part of a save",
    )


def test_a_state_dict_of_copies_is_no_difference(store: Path, logged: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    model._register_state_dict_hook(lambda _, state, *__: state.update({k: v.half() for k, v in state.items()}))
    job = Job(store, model)
    job.step()
    assert errors(logged) == [] and exact(store)
    job.ckpt.close()


def hooked(change: Callable[[dict[str, Any]], dict[str, Any]], *layers: nn.Module) -> nn.Module:
    """A model whose state dict is changed on its way out."""
    model = nn.Sequential(*(layers or (nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))))

    def hook(_: Any, state: dict[str, Any], *__: Any) -> None:
        changed = change(dict(state))
        state.clear()
        state.update(changed)

    model._register_state_dict_hook(hook)
    return model


def renamed(state: dict[str, Any]) -> dict[str, Any]:
    return {f"net.{name}": value.clone() for name, value in state.items()}


def test_a_state_dict_of_renamed_copies_is_no_difference(store: Path, logged: pytest.LogCaptureFixture) -> None:
    job = Job(store, hooked(renamed))
    job.step()
    assert errors(logged) == [] and exact(store)
    job.ckpt.close()


def test_an_optimizer_whose_state_dict_copies_is_no_difference(store: Path, logged: pytest.LogCaptureFixture) -> None:
    class Copying(torch.optim.AdamW):
        def state_dict(self) -> dict[str, Any]:
            return copy.deepcopy(super().state_dict())

    job = Job(store, hooked(lambda state: state, nn.Linear(4, 400), nn.Linear(400, 4)), kind=Copying)
    job.step()
    assert errors(logged) == [] and exact(store)
    job.ckpt.close()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda state: {**state, "0.weight": torch.randn(5, 4)}, "0.weight"),
        (lambda state: {**state, "0.weight": state["0.weight"].double() + 1e-9}, "0.weight"),
        (lambda state: {**state, "0.weight": state["0.weight"].t().contiguous()}, "0.weight"),
        (lambda state: {**renamed(state), "net.0.weight": state["0.weight"].half()}, "net.0.weight"),
        (lambda state: {**state, "0.kept": state["0.weight"].clone()}, "0.kept"),  # of today; who knows of tomorrow
        (lambda state: {**renamed(state), "net.kept": torch.ones((), dtype=torch.int64)}, "net.kept"),
    ],
    ids=[
        "other values",
        "more precise",
        "transposed",
        "rounded under another name",
        "a copy beside it",
        "equal by chance",
    ],
)
def test_a_state_dict_with_other_values_than_the_saved_memory(
    store: Path, logged: pytest.LogCaptureFixture, change: Any, name: str
) -> None:
    require_found(
        Job(store, hooked(change)), store, logged, f"model.state_dict()['{name}'] is ", "in no part of a save"
    )


class Holder:
    """A user's object with one tensor and one number."""

    def state_dict(self) -> dict[str, Any]:
        return {"values": torch.ones(3, dtype=torch.float64) / 3, "count": 3}

    def load_state_dict(self, state: Any) -> None: ...


def test_a_dtype_that_is_lost(store: Path, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = run_state.tensor_leaf
    monkeypatch.setattr(run_state, "tensor_leaf", lambda value: kept(value.float()))
    words = (
        "state['user'][0]['values'] is torch.Tensor of torch.float64 (3,)",
        "comes back as torch.Tensor of torch.float32",
    )
    require_found(Job(store, state=[Holder()]), store, logged, *words)


def test_a_parameter_that_is_lost(
    store: Path, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Learned(Holder):
        def state_dict(self) -> dict[str, Any]:
            return {"scale": nn.Parameter(torch.ones(3)), "loss": torch.ones(2, requires_grad=True)}

    job = Job(store, state=[Learned()])
    job.step()
    assert errors(logged) == [] and exact(store)
    job.ckpt.close()
    kept = run_state.tensor_leaf
    monkeypatch.setattr(run_state, "tensor_leaf", lambda value: kept(value.detach()))
    words = (
        "['scale'] is torch.nn.Parameter",
        "['loss'] is torch.Tensor that requires grad of",
        "comes back as torch.Te",
    )
    require_found(Job(store.parent / "lost", state=[Learned()]), store.parent / "lost", logged, *words)


def test_a_learned_rate_is_filled_in_place(store: Path, logged: pytest.LogCaptureFixture) -> None:
    def kind(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=nn.Parameter(torch.tensor(0.1)), foreach=False)  # type: ignore[arg-type]

    job = Job(store, kind=kind)
    job.step()
    assert errors(logged) == [] and exact(store)
    job.ckpt.close()
    other = Job(store, kind=kind)
    assert type(other.optimizer.param_groups[0]["lr"]) is nn.Parameter
    other.ckpt.close()


def test_values_that_are_lost(store: Path, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = run_state.tensor_leaf

    def leaf(value: Any) -> Leaf | None:
        return kept(value.half().double() if value.dtype == torch.float64 else value)

    monkeypatch.setattr(run_state, "tensor_leaf", leaf)
    require_found(Job(store, state=[Holder()]), store, logged, "['values'], torch.Tensor of", "other values")


def test_a_copy_that_is_wrong(store: Path, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large tensor, too: the last element."""
    kept, added, copies = async_copy.AsyncCopy.finish, async_copy.AsyncCopy.add_unit, list[torch.Tensor]()

    def add_unit(self: Any, part: Any, addresses: Any, buffers: Any) -> None:
        copies.extend(buffers())
        added(self, part, addresses, buffers)

    def finish(self: Any, *beside: Any) -> None:
        kept(self, *beside)
        for buffer in copies:
            if buffer.numel() > 100_000:
                buffer[-1] = 123.0

    monkeypatch.setattr(async_copy.AsyncCopy, "add_unit", add_unit)
    monkeypatch.setattr(async_copy.AsyncCopy, "finish", finish)
    job = Job(store, nn.Linear(4, 30_000))
    job.step()
    assert "weight/fp32, F32, comes back with other values" in errors(logged)[0]
    job.step()
    assert not exact(store)
    job.ckpt.close()


def test_bytes_that_do_not_read_back(store: Path, logged: pytest.LogCaptureFixture) -> None:
    job = Job(store)
    opened = job.ckpt._opened
    assert opened is not None

    class Flipped:
        """Storage that reads other bytes than were written."""

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def read_into(self, path: str, offset: int, target: memoryview) -> None:
            inner.read_into(path, offset, target)
            if len(target):
                target.cast("B")[0] ^= 1

    inner, opened.files = opened.files, Flipped()  # type: ignore[assignment]
    job.step()
    opened.files = inner
    assert "do not match" in errors(logged)[0]
    job.step()
    assert not exact(store)
    job.ckpt.close()


def test_checked_again_when_the_shape_changes(store: Path, logged: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    job = Job(store, model)
    job.step()
    job.step()
    assert len(checks(logged)) == 1
    model[0].requires_grad_(True)
    job.step()
    assert len(checks(logged)) == 2
    job.step()
    assert len(checks(logged)) == 2 and errors(logged) == []
    job.ckpt.close()


def test_checked_again_when_an_object_has_other_state(
    store: Path, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Growing(Holder):
        def __init__(self) -> None:
            self.state: dict[str, Any] = {"count": 1}

        def state_dict(self) -> dict[str, Any]:
            return dict(self.state)

    holder = Growing()
    kept = run_state.tensor_leaf
    narrow = lambda value: kept(value.float() if value.dtype == torch.float64 else value)  # noqa: E731
    monkeypatch.setattr(run_state, "tensor_leaf", narrow)
    job = Job(store, state=[holder])
    job.step()
    holder.state["count"] = 2
    job.step()
    assert len(checks(logged)) == 1 and exact(store)
    holder.state["values"] = torch.ones(3, dtype=torch.float64)
    job.step()
    assert len(checks(logged)) == 2 and not exact(store)
    job.ckpt.close()


def test_a_save_that_failed_is_checked_when_it_succeeds(store: Path, logged: pytest.LogCaptureFixture) -> None:
    job = Job(store)
    opened = job.ckpt._opened
    assert opened is not None
    files = opened.files = HookedFiles(opened.files, before=full)
    job.step()
    assert checks(logged) == []
    files.before = lambda operation, path: None
    job.step()
    assert len(checks(logged)) == 1 and exact(store)
    job.ckpt.close()


def full(operation: str, path: str) -> None:
    if operation == "write":
        raise StorageError(f"cannot write {path}: the filesystem is full")


def test_a_difference_that_is_gone_is_exact_again(store: Path, logged: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Scaled(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    job = Job(store, model)
    job.step()
    assert not exact(store)
    model[0].__class__ = nn.Linear
    model[1].requires_grad_(True)
    job.step()
    assert exact(store)
    job.ckpt.close()


def test_switched_off(store: Path, logged: pytest.LogCaptureFixture) -> None:
    job = Job(store, kind=Counting, self_check=False)
    job.step()
    assert errors(logged) == [] and checks(logged) == [] and exact(store)
    job.ckpt.close()


@pytest.mark.parametrize("settings", [{"packing": 1, "differences": True}, {"encoding": "compact"}, {"frozen": "skip"}])
def test_other_ways_to_store(store: Path, logged: pytest.LogCaptureFixture, settings: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 300), nn.BatchNorm1d(300))
    model[0].requires_grad_(False)
    job = Job(store, model, **settings)
    for _ in range(3):
        job.step()
    if settings != {"frozen": "skip"}:
        model[0].requires_grad_(True)  # checked again: with differences, on top of earlier saves
        job.step()
    assert errors(logged) == [] and len(checks(logged)) == (1 if settings == {"frozen": "skip"} else 2)
    job.ckpt.close()


@pytest.mark.parametrize("raising", ["model", "optimizer"])
def test_state_dicts_that_raise_do_not_stop_saves_and_are_not_exact(
    store: Path, logged: pytest.LogCaptureFixture, raising: str
) -> None:
    class Raising(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not now")

    class RaisingModel(nn.Linear):
        def state_dict(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("not now")

    parts = (RaisingModel(4, 4), None) if raising == "model" else (None, lambda found: Raising(found, lr=0.1))
    require_found(Job(store, *parts), store, logged, "cannot be compared", "RuntimeError('not now')")
    assert len(checks(logged)) == 1
