"""Copies in a stream of their own: after what training queued before, and complete before anything changes or is read.

That they are late is the streams' doing, not a device's: tests/gpu runs the same on one.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from monitor.save import async_copy
from monitor.save.async_copy import AsyncCopy
from store.catalog import open_catalog
from store.errors import StateChangedError, UnsupportedError
from store.storage.local import LocalFiles
from tests.support.internals import hold_writer, saver_of
from tests.support.late_streams import LateStreams, Stream


@pytest.fixture(params=["pairs", "views"], autouse=True)
def _views(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether saves copy through views that own nothing, as they do on a device."""
    monkeypatch.setattr(async_copy, "_has_views", lambda _: request.param == "views")


class Run:
    """A model with buffers, and its checkpointer."""

    def __init__(self, store: Path, staging: str = "lazy", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **options)
        values = {"store": str(store), "every": 1, "staging": staging, "metrics": {"enabled": False}}
        self.ckpt = monitor.attach((self.model, self.optimizer), values)

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 4)).square().mean().backward()
        self.optimizer.step()

    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def saved_once(store: Path) -> Run:
    """A run with one commit, and one update since."""
    one = Run(store)
    one.ckpt.resume()
    one.update()
    one.ckpt.step()
    one.ckpt.flush()
    one.update()
    return one


def steps(one: Run, _: dict[str, Any]) -> None:
    one.optimizer.step()


def loads_the_model(one: Run, before: dict[str, Any]) -> None:
    one.model.load_state_dict(before["model"])


def loads_the_optimizer(one: Run, before: dict[str, Any]) -> None:
    one.optimizer.load_state_dict(before["optimizer"])


def committed(store: Path) -> dict[str, torch.Tensor]:
    """What a resume gives."""
    two = Run(store)
    assert two.ckpt.resume() == 2
    two.ckpt.close(save=False)
    return two.values()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("change", [steps, loads_the_model, loads_the_optimizer])
def test_what_changes_the_state_waits_for_copies_that_were_not_made_yet(
    change: Callable[[Run, dict[str, Any]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, release = Run(tmp_path / "s"), threading.Event()
    one.ckpt.resume()
    one.update()
    one.ckpt.step()
    one.ckpt.flush()
    before = copy.deepcopy({"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict()})
    one.update()
    decided = one.values()
    hold_writer(one.ckpt, release)
    with monkeypatch.context() as patch:
        streams = LateStreams(patch)
        one.ckpt.step()
        assert len(streams.side.queue) == 18  # six parameters and their moments
        change(one, before)
        assert not streams.side.queue and streams.side.copied == 18
        release.set()
        one.ckpt.flush()
    one.ckpt.close(save=False)
    assert equal(committed(tmp_path / "s"), decided)


def test_copies_come_after_what_training_has_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = saved_once(tmp_path / "s")
    with monkeypatch.context() as patch:
        streams, weight = LateStreams(patch), one.model[0].weight
        streams.main.queue.append(lambda: weight.data.add_(1.0))  # of the optimizer's last kernel
        one.ckpt.step()
        one.ckpt.flush()
        streams.main.synchronize()
    decided = one.values()
    one.ckpt.close(save=False)
    assert equal(committed(tmp_path / "s"), decided)


def test_buffers_are_copied_in_training_s_stream_and_read_once_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = saved_once(tmp_path / "s")
    decided, release = one.values(), threading.Event()
    hold_writer(one.ckpt, release)
    with monkeypatch.context() as patch:
        streams = LateStreams(patch)
        one.ckpt.step()
        assert streams.main.queue or streams.main.copied == 3  # the side stream waits for them
        release.set()
        one.ckpt.flush()
        assert streams.main.copied == 3
    one.ckpt.close(save=False)
    assert equal(committed(tmp_path / "s"), decided)


def test_buffers_alone_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside an offloaded optimizer, whose state needs no stream."""
    streams, copying = LateStreams(monkeypatch), AsyncCopy()
    live, copies = [torch.randn(5), torch.randn(3)], [torch.zeros(5), torch.zeros(3)]
    copying.copy_now(live, copies)
    copying.start()
    assert len(streams.main.queue) == 2 and not copies[0].any()
    copying.finish()
    assert all(map(torch.equal, live, copies))


@pytest.mark.parametrize("early", [False, True])
def test_what_changes_the_state_waits_on_the_device_and_not_here(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``early``: whether the change comes before the copies, which is found."""
    streams, copying, release = LateStreams(monkeypatch), AsyncCopy(), threading.Event()
    live, copies = [torch.randn(5), torch.randn(3)], [torch.zeros(5), torch.zeros(3)]
    decided = [tensor.clone() for tensor in live]
    copying.add(live, copies)
    copying.start()
    synchronize = Stream.synchronize
    monkeypatch.setattr(streams.side, "synchronize", lambda: (release.wait(30), synchronize(streams.side)))
    background = threading.Thread(target=copying.finish)
    background.start()
    if early:
        live[0].add_(1.0)
    monkeypatch.setattr(streams.main, "wait_stream", synchronize)
    copying.let_change()  # while the background thread waits
    assert not streams.side.queue and background.is_alive()
    live[1].add_(1.0)
    release.set()
    background.join()
    if early:
        with pytest.raises(StateChangedError):
            copying.require_whole()
    else:
        copying.require_whole()
        assert all(map(torch.equal, copies, decided))


def test_copies_that_are_complete_are_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step may be captured into a graph, where waiting is an error."""
    streams, copying = LateStreams(monkeypatch), AsyncCopy()
    copying.add([torch.randn(5)], [torch.zeros(5)])
    copying.start()
    copying.finish()
    for stream in (streams.side, streams.main):
        monkeypatch.setattr(stream, "synchronize", pytest.fail)
        monkeypatch.setattr(stream, "wait_stream", pytest.fail)
    copying.let_change()
    copying.finish()


def test_lazy_copies_are_refused_where_a_graph_may_take_the_steps(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="a CUDA graph may replay its steps"):
        Run(tmp_path / "s", capturable=True)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("private", [True, False])
def test_copies_are_made_at_once_where_a_graph_may_take_the_steps(
    private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monitor.adapters.pytorch.PyTorchAdapter.state_is_private", private)
    one, two = Run(tmp_path / "s", "auto", capturable=True), Run(tmp_path / "t", "auto")
    for run, at_once in ((one, True), (two, not private)):
        timing = saver_of(run.ckpt).copy_timing
        assert timing._lazy is not at_once
        assert (timing._tracker is None) or run is two
        run.ckpt.close(save=False)
    assert open_catalog(LocalFiles(tmp_path / "s")).saves() == []
