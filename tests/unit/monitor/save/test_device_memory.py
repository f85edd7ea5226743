"""Views of memory that own nothing: made once, kept from save to save, and never read once the memory is another's."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from monitor.observe.units import LocalUnit
from monitor.save import async_copy, device_memory, write_tracker
from monitor.save.device_memory import LastViews, MemoryViews, hold, view_of
from store.catalog import open_catalog
from store.storage.local import LocalFiles
from tests.support.internals import hold_writer, job_of
from tests.support.late_streams import LateStreams

CPU = torch.device("cpu")


class Run:
    """A job whose state is copied through views, in streams that are late."""

    def __init__(self, store: Path, patch: pytest.MonkeyPatch) -> None:
        self.made: list[MemoryViews] = []
        patch.setattr(async_copy, "_has_views", lambda _: True)
        patch.setattr(device_memory, "MemoryViews", self._make)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(40, 8), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        values = {"store": str(store), "every": 1, "staging": "lazy", "metrics": {"enabled": False}}
        self.ckpt = monitor.attach((self.model, self.optimizer), values)
        self.ckpt.resume()

    def _make(self, *parts: Any) -> MemoryViews:
        self.made.append(MemoryViews(*parts))
        return self.made[-1]

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 40)).square().mean().backward()
        self.optimizer.step()

    def save(self) -> Any:
        """One decision, whose save is over when this returns."""
        with pytest.MonkeyPatch.context() as patch:
            LateStreams(patch)
            report = self.ckpt.step()
            self.ckpt.flush()
        return report


def steps_of(store: Path) -> list[int]:
    return sorted(save.step for save in open_catalog(LocalFiles(store)).saves())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_view_shows_the_memory_and_does_not_keep_it(dtype: torch.dtype) -> None:
    owner = torch.arange(6).to(dtype)
    view = view_of(owner.data_ptr(), owner.nbytes, dtype, CPU)
    assert torch.equal(view, owner)
    owner.mul_(3)
    assert torch.equal(view, owner)
    storage = weakref.ref(owner.untyped_storage())
    del owner
    gc.collect()
    assert storage() is None


def test_a_save_uses_the_views_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Run(tmp_path / "s", monkeypatch)
    for _ in range(4):
        one.update()
        assert one.save().skipped is None
    assert len(one.made) == 1
    one.ckpt.close(save=False)
    assert steps_of(tmp_path / "s")[-1] == 4


def test_tensors_that_were_replaced_have_views_of_their_own_and_are_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Run(tmp_path / "s", monkeypatch)
    for _ in range(2):  # the layout is kept from the second decision on
        one.update()
        assert one.save().skipped is None
    weight = one.model[0].weight
    before = weight.untyped_storage()
    place, gone = before.data_ptr(), weakref.ref(before)
    weight.data = weight.data.clone()
    del before
    gc.collect()
    assert gone() is None
    one.update()
    assert one.save().skipped is None
    assert len(one.made) == 1 and weight.data_ptr() != place  # its layout is not known yet
    one.update()
    expected = weight.detach().clone()
    assert one.save().skipped is None
    assert len(one.made) == 2
    one.ckpt.close(save=False)
    two = Run(tmp_path / "s", monkeypatch)
    assert torch.equal(two.model[0].weight, expected)
    two.ckpt.close(save=False)


def test_memory_that_is_replaced_before_it_is_copied_is_kept_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, release = Run(tmp_path / "s", monkeypatch), threading.Event()
    one.update()
    assert one.save().skipped is None
    one.update()
    made = len(one.made)
    weight = one.model[0].weight
    expected = weight.detach().clone()
    hold_writer(one.ckpt, release)
    with monkeypatch.context() as patch:
        LateStreams(patch)
        one.ckpt.step()
        assert len(one.made) > made
        gone = weakref.ref(weight.untyped_storage())
        weight.data = torch.zeros_like(weight)
        assert gone() is not None
        release.set()
        one.ckpt.flush()
    gc.collect()
    assert gone() is None
    one.ckpt.close(save=False)
    two = Run(tmp_path / "s", monkeypatch)
    assert torch.equal(two.model[0].weight, expected)
    two.ckpt.close(save=False)


@pytest.mark.parametrize("written", [False, True])
def test_tensors_that_are_swapped_leave_the_memory_and_its_changes(
    written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``module.to()`` and ``load_state_dict`` do on request. ``written``: an element that no sample has."""
    one, release = Run(tmp_path / "s", monkeypatch), threading.Event()
    for _ in range(2):
        one.update()
        assert one.save().skipped is None
    one.update()
    weight = one.model[0].weight
    other, expected = nn.Parameter(weight.detach().clone()), weight.detach().clone()
    with torch.no_grad():
        while other._version < weight._version:
            other.add_(0)
    one.optimizer.zero_grad(set_to_none=True)
    hold_writer(one.ckpt, release)
    with monkeypatch.context() as patch:
        LateStreams(patch)
        one.ckpt.step()
        torch.utils.swap_tensors(weight, other)
        if written:
            with torch.no_grad():
                other.view(-1)[8] += 1  # the memory that is being copied
        release.set()
        one.ckpt.flush()
    one.ckpt.close(save=False)
    assert steps_of(tmp_path / "s")[-1] == (2 if written else 3)
    if not written:
        two = Run(tmp_path / "s", monkeypatch)
        assert torch.equal(two.model[0].weight, expected)
        two.ckpt.close(save=False)


@pytest.mark.parametrize("way", ["version", "memory"])
def test_a_save_whose_memory_changed_meanwhile_is_given_up(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, release = Run(tmp_path / "s", monkeypatch), threading.Event()
    one.update()
    assert one.save().skipped is None
    one.update()
    hold_writer(one.ckpt, release)
    with monkeypatch.context() as patch:
        LateStreams(patch)
        one.ckpt.step()
        if way == "version":
            with torch.no_grad():
                one.model[0].weight[3, 3] += 1
        else:
            one.model[0].weight.share_memory_()
            monkeypatch.setattr(write_tracker.SourceSample, "read_again", lambda _: pytest.fail("the memory is gone"))
        release.set()
        one.ckpt.flush()
    assert steps_of(tmp_path / "s") == [1]
    one.ckpt.close(save=False)


def test_memory_of_which_torch_makes_copies_is_copied_without_views(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch does with managed memory, and with host memory that a device can reach."""
    one = Run(tmp_path / "s", monkeypatch)
    monkeypatch.setattr(device_memory, "view_of", lambda *place: view_of(*place).clone())
    for _ in range(3):
        one.update()
        expected = one.model[0].weight.detach().clone()
        assert one.save().skipped is None
    one.ckpt.close(save=False)
    assert one.made and steps_of(tmp_path / "s")[-1] == 3
    two = Run(tmp_path / "s", monkeypatch)
    assert torch.equal(two.model[0].weight, expected)
    two.ckpt.close(save=False)


def test_held_memory_tells_of_what_autograd_counts_and_of_storages_that_moved() -> None:
    one, other = torch.zeros(10), torch.zeros(10)
    held = hold([one, other])
    assert held()
    one.add_(1)
    assert not held()
    held = hold([one, other])
    other.share_memory_()
    assert not held()


def test_views_are_made_once_and_not_of_layouts_that_are_listed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, last = Run(tmp_path / "s", monkeypatch), LastViews()
    one.update()
    first, second, third = ([*job_of(one.ckpt).table.local().values()] for _ in range(3))
    assert last.of(addressed(first)) is None
    found = last.of(addressed(second))
    assert found is not None and last.of(addressed(third)) is found
    assert [view.data_ptr() for view in found._sources] == [t.data_ptr() for part in third for t in part.tensors]
    one.ckpt.close(save=False)


def addressed(parts: list[LocalUnit]) -> list[tuple[LocalUnit, Any]]:
    """Units with buffers where they lie themselves."""
    return [(part, part.layout.regions.addresses) for part in parts]
