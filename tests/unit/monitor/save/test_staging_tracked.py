"""``staging: auto`` under plain PyTorch copies beside training: a change in between waits for the copies or is found.

What is committed is the state of the decision, or nothing; after a change was found, copies are made at once.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from monitor.adapters.base import Piece
from monitor.adapters.identity import addresses_of
from monitor.adapters.pytorch import PyTorchAdapter
from monitor.context import JobContext
from monitor.observe.units import LocalUnit, UnitLayout
from monitor.save import async_copy
from monitor.save.write_tracker import CopyPlan, LastPlans, WriteTracker, write_tracker
from store.errors import SaveError
from store.names import Fragment, Unit
from tests.support.internals import hold_writer, saver_of
from tests.support.jobs import committed_steps, same
from tests.support.kept import memory
from tests.support.memory_jobs import kept_steps, state_in

WIDTH = 600  # a weight of 1.4 MB, most of whose pages are its own

tracked_only = pytest.mark.skipif(write_tracker() is None, reason="this kernel does not track writes")


def add(copying: async_copy.AsyncCopy, live: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
    pieces = [Piece(Fragment(str(i), "fp32", 0, one.numel()), one) for i, one in enumerate(live)]
    part = LocalUnit(Unit("layer", "fp32"), UnitLayout.of(pieces), live, tuple(pieces))
    copying.add_unit(part, addresses_of(buffers), lambda: buffers)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(x))
        return out


class Job:
    def __init__(self, store: Path, optimizer: dict[str, Any] | None = None, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **(optimizer or {}))
        values = {"store": str(store), "every": 1, "metrics": {"enabled": False}, "self_check": False, **settings}
        self.ckpt = monitor.attach((self.model, self.optimizer), values)
        self.ckpt.resume()
        self.scaler = torch.amp.GradScaler("cpu")
        self.average = copy.deepcopy(self.model)
        self.compiled = torch.compile(self.optimizer.step, backend="eager")

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randint(0, WIDTH, (3, 5))).square().mean().backward()

    def step(self) -> None:
        """One optimizer step, and a save that is done when it returns."""
        self.backward()
        self.optimizer.step()
        self.ckpt.step()
        self.ckpt.flush()

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"{name}/fp32": p.detach().clone() for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            found |= {
                f"{name}/{slot}": self.optimizer.state[parameter][slot].clone() for slot in ("exp_avg", "exp_avg_sq")
            }
        return found

    def tracks(self) -> bool:
        return saver_of(self.ckpt).copy_timing._tracker is not None


def one_element_by_data(one: Job) -> None:
    one.model.embed.weight.data[WIDTH // 2, 7] += 1.0


def one_element_of_a_moment(one: Job) -> None:
    one.optimizer.state[one.model.head.weight]["exp_avg"].data[WIDTH // 3, 11] = 0.5


def a_row_by_numpy(one: Job) -> None:
    one.model.head.weight.detach().numpy()[WIDTH // 2] = 0.0


def averaged_weights(one: Job) -> None:
    for average, live in zip(one.average.parameters(), one.model.parameters(), strict=True):
        live.data.copy_(average.data)


def clamps(one: Job) -> None:
    with torch.no_grad():
        for parameter in one.model.parameters():
            parameter.clamp_(-0.01, 0.01)


def renormalizes_in_a_forward(one: Job) -> None:
    one.model.embed.max_norm = 0.1
    one.model(torch.randint(0, WIDTH, (30, 5)))


def shares_its_weights(one: Job) -> None:
    """As a queue of torch.multiprocessing does."""
    one.model.head.weight.share_memory_()
    one.model.head.weight.data.add_(0.1)


FOUND = [
    one_element_by_data,
    shares_its_weights,
    one_element_of_a_moment,
    a_row_by_numpy,
    averaged_weights,
    clamps,
    renormalizes_in_a_forward,
]


@tracked_only
@pytest.mark.parametrize("change", FOUND)
def test_a_change_by_other_means_is_found_and_later_copies_are_made_at_once(
    tmp_path: Path, change: Callable[[Job], None], caplog: pytest.LogCaptureFixture
) -> None:
    one, store, release = Job(tmp_path / "s"), tmp_path / "s", threading.Event()
    one.step()
    assert one.tracks()
    hold_writer(one.ckpt, release)
    one.backward()
    one.optimizer.step()
    one.ckpt.step()
    change(one)
    release.set()
    one.ckpt.flush()
    assert committed_steps(store) == [1]
    one.model.embed.max_norm = None
    release = threading.Event()
    one.backward()
    one.optimizer.step()
    one.ckpt.step()
    decided = one.state()
    assert not one.tracks()
    change(one)
    one.ckpt.close(save=False)
    assert committed_steps(store) == [1, 3]
    assert same(committed(store), decided)
    assert sum("before ckpt.step() returns" in record.message for record in caplog.records) == 1


@tracked_only
def test_what_is_live_after_a_change_does_not_become_the_last_step(tmp_path: Path) -> None:
    """As where averaged weights are copied into the model for an export before the job ends."""
    one, release = Job(tmp_path / "s"), threading.Event()
    one.step()
    hold_writer(one.ckpt, release)
    one.backward()
    one.optimizer.step()
    one.ckpt.step()
    averaged_weights(one)
    release.set()
    with pytest.raises(SaveError, match="not the state of that step; the newest commit is that of step 1"):
        one.ckpt.close()
    assert committed_steps(tmp_path / "s") == [1]


def committed(store: Path) -> dict[str, torch.Tensor]:
    two = Job(store, every=100)
    two.ckpt.close(save=False)
    return two.state()


def steps(one: Job) -> None:
    one.backward()
    one.optimizer.step()


def steps_compiled(one: Job) -> None:
    one.backward()
    one.compiled()


def skips_by_the_scaler(one: Job) -> None:
    one.optimizer.zero_grad()
    one.scaler.scale(one.model(torch.tensor([1])).sum() * math.inf).backward()
    one.scaler.step(one.optimizer)
    one.scaler.update()


def steps_by_the_scaler(one: Job) -> None:
    one.optimizer.zero_grad()
    one.scaler.scale(one.model(torch.tensor([1])).sum()).backward()
    one.scaler.step(one.optimizer)


def loads_the_model(one: Job) -> None:
    one.model.load_state_dict(one.average.state_dict())


def loads_the_optimizer(one: Job) -> None:
    state = copy.deepcopy(one.optimizer.state_dict())
    for values in state["state"].values():
        values["exp_avg"] += 1.0
    one.optimizer.load_state_dict(state)


def swaps_the_data(one: Job) -> None:
    for average, live in zip(one.average.parameters(), one.model.parameters(), strict=True):
        live.data, average.data = average.data, live.data


def swaps_the_parameter(one: Job) -> None:
    one.model.head.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


def says_so_before(one: Job) -> None:
    one.ckpt.copied()
    averaged_weights(one)


WAITED_FOR = [
    steps,
    steps_compiled,
    skips_by_the_scaler,
    steps_by_the_scaler,
    loads_the_model,
    loads_the_optimizer,
    swaps_the_data,
    swaps_the_parameter,
    says_so_before,
]


CASES: list[tuple[Callable[[Job], None], str | None]] = [(change, None) for change in WAITED_FOR]
CASES += [(change, kind) for change in (steps, steps_compiled, steps_by_the_scaler) for kind in ("foreach", "fused")]


@pytest.mark.parametrize(("change", "kind"), CASES)
def test_what_frameworks_offer_waits_or_leaves_the_old_memory_alone(
    tmp_path: Path, change: Callable[[Job], None], kind: str | None
) -> None:
    one, release = Job(tmp_path / "s", {kind: True} if kind else {}), threading.Event()
    one.step()
    hold_writer(one.ckpt, release)
    one.backward()
    one.optimizer.step()
    one.ckpt.step()
    decided = one.state()
    change(one)
    release.set()
    one.ckpt.close(save=False)
    assert committed_steps(tmp_path / "s") == [1, 2]
    assert same(committed(tmp_path / "s"), decided)


@tracked_only
@pytest.mark.parametrize("change", [*FOUND, None])
def test_a_version_in_memory_is_given_up_as_well(tmp_path: Path, change: Callable[[Job], None] | None) -> None:
    store = tmp_path / "s"
    one, release = Job(store, every=100, memory=memory(store)), threading.Event()
    for _ in range(2):
        one.step()
        settle(one)
    one.ckpt._memory._writer.submit(lambda: float(release.wait(180)))  # type: ignore[union-attr]
    one.backward()
    one.optimizer.step()
    one.ckpt.step()
    decided = one.state()
    if change is not None:
        change(one)
    release.set()
    settle(one)
    if change is None:
        assert same(state_in(store), decided)
    assert (3 in kept_steps(store)) == (change is None)
    one.ckpt.close(save=False)


def settle(one: Job) -> None:
    assert one.ckpt._memory is not None and one.ckpt._memory.wait(60)


def without_a_tracker(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(async_copy, "write_tracker", lambda: None)
    return {}


def eager(_: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"staging": "eager"}


@pytest.mark.parametrize("settings", [without_a_tracker, eager])
def test_copies_are_made_at_once_where_nothing_vouches(
    tmp_path: Path, settings: Callable[[pytest.MonkeyPatch], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, release = Job(tmp_path / "s", **settings(monkeypatch)), threading.Event()
    one.step()
    assert not one.tracks()
    hold_writer(one.ckpt, release)
    one.backward()
    one.optimizer.step()
    one.ckpt.step()
    decided = one.state()
    averaged_weights(one)
    release.set()
    one.ckpt.close(save=False)
    assert same(committed(tmp_path / "s"), decided)


@tracked_only
def test_a_copy_under_way_is_no_change_and_another_one_beside_it_is_made_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timing, live = async_copy.CopyTiming("auto", private=False), torch.randn(WIDTH, WIDTH).flatten()
    first, second, buffers = async_copy.AsyncCopy(), async_copy.AsyncCopy(), [torch.empty_like(live) for _ in range(2)]
    real, began, release = WriteTracker.written, threading.Event(), threading.Event()

    def written(*given: Any) -> bool:
        began.set()
        assert release.wait(60)
        return real(*given)

    monkeypatch.setattr(WriteTracker, "written", written)
    add(first, [live], buffers[:1])
    timing.start(first)
    background = threading.Thread(target=first.finish)
    background.start()
    assert began.wait(60)
    add(second, [live], buffers[1:])
    timing.start(second)
    assert timing._tracker is not None
    assert torch.equal(buffers[1], live)
    release.set()
    background.join()
    first.require_whole()
    assert torch.equal(buffers[0], live)


@tracked_only
def test_without_the_tracker_s_answer_a_torn_state_would_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WriteTracker, "written", lambda *_: False)
    one, release = Job(tmp_path / "s"), threading.Event()
    one.step()
    hold_writer(one.ckpt, release)
    one.backward()
    one.optimizer.step()
    one.ckpt.step()
    decided = one.state()
    one_element_by_data(one)
    release.set()
    one.ckpt.close(save=False)
    assert committed_steps(tmp_path / "s") == [1, 2]
    assert not same(committed(tmp_path / "s"), decided)


@tracked_only
def test_private_state_that_was_changed_is_copied_at_once_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under ZeRO: a sample of the elements would not find the next change."""
    monkeypatch.setattr(PyTorchAdapter, "state_is_private", True)
    one, release = Job(tmp_path / "s"), threading.Event()
    one.step()
    for _ in range(2):
        hold_writer(one.ckpt, release)
        one.backward()
        one.optimizer.step()
        one.ckpt.step()
        weight = one.model.head.weight.data.view(-1)
        before = weight[100_001].clone()
        weight[100_001] = 7.0
        release.set()
        one.ckpt.flush()
        weight[100_001] = before
    one.ckpt.close(save=False)
    assert committed_steps(tmp_path / "s") == [1, 3]
    again = Job(tmp_path / "s")
    assert same(again.state(), one.state())
    again.ckpt.close(save=False)


@tracked_only
def test_copies_are_planned_once_for_each_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of two snapshots that take turns, and of saves in between."""
    planned, plan = list[int](), CopyPlan.__init__

    def note(self: CopyPlan, *given: Any) -> None:
        planned.append(one.ckpt._step)
        plan(self, *given)

    monkeypatch.setattr(CopyPlan, "__init__", note)
    one = Job(tmp_path / "s", every=5, memory=memory(tmp_path / "s"))
    for _ in range(30):
        one.step()
        settle(one)
    kept = kept_steps(tmp_path / "s")
    one.ckpt.close(save=False)
    assert kept[-1] == 30 and committed_steps(tmp_path / "s")[-1] == 30
    assert len(planned) <= 4 and max(planned) <= 10


@tracked_only
def test_state_that_is_mostly_pinned_is_not_copied_at_once_for_being_so(monkeypatch: pytest.MonkeyPatch) -> None:
    live = [torch.randn(1 << 20), torch.randn(10)]
    pinned, buffers = live[0], [torch.empty_like(one) for one in live]
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self is pinned)
    copying = async_copy.AsyncCopy()
    add(copying, live, buffers)
    tracker = write_tracker()
    assert tracker is not None and not copying.start_tracked(tracker, LastPlans())
    assert tracker.in_use.acquire(blocking=False)
    tracker.in_use.release()


@tracked_only
def test_moving_memory_to_huge_pages_keeps_no_save_and_no_end_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = list[bool]()
    kept = WriteTracker.consolidate

    def consolidate(self: WriteTracker, pages: range, stop: Callable[[], bool]) -> None:
        while not stop():
            time.sleep(0.01)
        stopped.append(True)
        kept(self, pages, stop)

    monkeypatch.setattr(WriteTracker, "consolidate", consolidate)
    one = Job(tmp_path / "s")
    for _ in range(3):
        one.step()
        one.ckpt.flush()
    one.ckpt.close(save=False)
    assert stopped and committed_steps(tmp_path / "s") == [1, 2, 3]


@tracked_only
def test_a_save_that_could_not_begin_keeps_the_next_copy_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Job(tmp_path / "s")
    one.step()
    with monkeypatch.context() as patch:
        patch.setattr(JobContext, "facts", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            one.step()
    steps(one)
    tracker = write_tracker()
    assert tracker is not None and tracker.in_use.acquire(blocking=False)
    tracker.in_use.release()
    one.ckpt.close(save=False)


@tracked_only
@pytest.mark.parametrize("waits", [True, False])
def test_two_threads_copy_where_training_waits_for_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Elsewhere the second one would take a core from training."""
    one, threads, real = Job(tmp_path / "s"), set[str](), WriteTracker.copy_all
    one.step()

    def copy_all(*given: Any) -> None:
        threads.add(threading.current_thread().name)
        time.sleep(0.05)
        real(*given)

    monkeypatch.setattr(WriteTracker, "copy_all", copy_all)
    one.backward()
    one.optimizer.step()
    one.ckpt.step()
    decided = one.state()
    while not (waits or saver_of(one.ckpt).wait(0.0)):
        time.sleep(0.01)
    one.ckpt.flush()
    assert threads == {"driftpoint-writer-0", *(["driftpoint-pages-0"] if waits else [])}
    one.ckpt.close(save=False)
    assert committed_steps(tmp_path / "s") == [1, 2]
    assert same(committed(tmp_path / "s"), decided)
