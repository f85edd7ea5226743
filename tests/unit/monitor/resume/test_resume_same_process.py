"""Training goes on: back in the same process, past odd buffers, failing saves and disks, and never by a mistake."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from monitor.observe.units import is_moving
from store.catalog import open_catalog
from store.errors import ConfigError, ModelMismatchError, StorageError
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.hooked import HookedFiles
from tests.support.internals import has_reference, job_of, session_of
from tests.support.jobs import Job, committed_steps, job, same

PARITY = {"name": "parity", "k": 2}


def require_whole(store: Path, newest_step: int) -> None:
    """Every commit is as committed, and the newest is of this step."""
    report = verify(open_catalog(LocalFiles(store)))
    assert report.ok, report
    assert report.commits[0].save.step == newest_step


def files_of(store: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for part in ("manifests", "segments") for path in (store / part).rglob("*.*")}


def failures(one: Job) -> float:
    found = [sample for family in one.registry.collect() for sample in family.samples]
    return sum(sample.value for sample in found if sample.name == "driftpoint_failures_total")


# ---- going back in the same process


class Counted:
    """A job whose framework counts the steps, as an engine does, and can be set back with the state."""

    def __init__(self, one: Job) -> None:
        self.one, self.step = one, 0
        job_of(one.ckpt).adapter.completed_steps = lambda: self.step  # type: ignore[method-assign]

    def advance(self) -> monitor.StepReport:
        self.one.update()
        self.step += 1
        report = self.one.ckpt.step()
        self.one.ckpt.flush()
        assert report is not None
        return report

    def remember(self) -> Callable[[], None]:
        step, weights = self.step, {k: v.clone() for k, v in self.one.model.state_dict().items()}

        def back() -> None:
            self.one.model.load_state_dict(weights)
            self.step = step

        return back


@pytest.mark.parametrize("policy", ["full", PARITY])
@pytest.mark.parametrize("keep_last", [1, 20])
def test_a_job_that_goes_back_leaves_its_commits_whole(store: Path, policy: Any, keep_last: int) -> None:
    with job(store, policy=policy, retention={"keep_last": keep_last, "log_spaced": False}) as one:
        counted = Counted(one)
        one.ckpt.resume()
        for _ in range(2):
            counted.advance()
        back = counted.remember()
        for _ in range(3):
            counted.advance()
        before = files_of(store)
        back()
        for step in (3, 4, 5, 6):
            assert counted.advance().skipped is None
            require_whole(store, step)
        now = files_of(store)
        assert keep_last == 1 or before.keys() < now.keys()
        assert all(now[path] == before[path] for path in before.keys() & now.keys())
        assert one.ckpt.save(wait=True).skipped is None
        assert one.metric("driftpoint_saves_total") == 10
        saved = one.weights()
    with job(store, policy=policy) as other:
        assert other.ckpt.resume() == 6
        assert same(other.weights(), saved)


def test_going_back_again_and_again(store: Path) -> None:
    with job(store, policy=PARITY, retention={"keep_last": 30}) as one:
        counted = Counted(one)
        counted.advance()
        back = counted.remember()
        for turns in (4, 2, 5):
            assert [counted.advance().skipped for _ in range(turns)] == [None] * turns
            require_whole(store, 1 + turns)
            back()
        saves = open_catalog(LocalFiles(store)).saves()
        assert [save.step for save in saves] == [6, 5, 4, 3, 2, 3, 2, 5, 4, 3, 2, 1]


def test_a_resume_in_mid_run_that_goes_back_leaves_commits_whole(store: Path) -> None:
    """The newest commits cannot be read for a moment; the job resumes an older one and goes on."""
    with job(store, policy=PARITY, retention={"keep_last": 20}, resume={"at": "newest"}) as one:
        one.ckpt.resume()
        for _ in range(6):
            one.step()
        hidden = [store / "segments" / f"0000000{step}-000001" for step in (5, 6)]
        for path in hidden:
            path.rename(path.with_name(path.name + ".away"))
        assert one.ckpt.resume() == 4
        for path in hidden:
            path.with_name(path.name + ".away").rename(path)
        before = files_of(store)
        for step in (5, 6, 7):
            report = one.step()
            assert report is not None and report.skipped is None
            require_whole(store, step)
        assert before.items() <= files_of(store).items()


def test_a_resume_beside_a_save_leaves_commits_whole(store: Path) -> None:
    with job(store, policy=PARITY, retention={"keep_last": 20}) as one:
        one.step()
        one.step()
        free = threading.Event()
        one.hook().before = lambda operation, path: "manifests" in path and free.wait(5)  # type: ignore
        one.step(flush=False)
        threading.Timer(0.3, free.set).start()
        assert one.ckpt.resume() == 3  # it waits for the save that is on its way
        for step in (4, 5, 6):
            one.step()
            require_whole(store, step)


# ---- buffers


class Masked(nn.Module):
    def __init__(self, forbidden: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.full((128, 128), forbidden, dtype=dtype).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize("forbidden", ["lowest", "-inf", "inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_masks_of_extreme_values_are_saved(store: Path, forbidden: str, dtype: torch.dtype) -> None:
    value = torch.finfo(dtype).min if forbidden == "lowest" else float(forbidden)
    settings = {"store": str(store), "every": 1, "metrics": {"enabled": False}}
    for start, end in ((0, 3), (3, 5)):
        model = Masked(value, dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        with monitor.attach((model, optimizer), settings) as ckpt:
            assert ckpt.resume() == start
            assert ckpt.certificate is None or ckpt.certificate.exact
            for _ in range(start, end):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                report = ckpt.step()
                assert report is not None and report.skipped is None
                ckpt.flush()
            assert torch.equal(model.mask, Masked(value, dtype).mask)


# ---- saves that fail


class Failing:
    """State that cannot be had while ``broken``."""

    broken = False

    def state_dict(self) -> dict[str, int]:
        if self.broken:
            raise KeyError("a worker died")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"n": 1}


def test_state_that_raises_fails_the_save_not_the_training(store: Path) -> None:
    state = Failing()
    with job(store, state=[state]) as one:
        one.ckpt.resume()
        one.step()
        state.broken = True
        one.step()
        report = one.ckpt.save(wait=True, strict=False)
        assert (report.skipped, report.saved) == ("failed", {})
        assert failures(one) == 2
        state.broken = False
        one.step()
        one.step()
        saved = one.weights()
    assert committed_steps(store) == [1, 3, 4]
    with job(store, state=[state]) as other:
        assert other.ckpt.resume() == 4
        assert same(other.weights(), saved)


@pytest.mark.parametrize("operation", ["create", "write", "sync", "link", "sync_dir"])
def test_save_and_wait_tells_of_a_failing_disk(store: Path, operation: str) -> None:
    def refuse(what: str, path: str) -> None:
        if what == operation:
            raise StorageError(f"cannot {what} {path}: the device reported an I/O error")

    with job(store, every=100) as one:
        one.ckpt.resume()
        one.step()
        files = one.hook()
        files.before = refuse
        assert one.ckpt.save(wait=True, strict=False).skipped == "failed"
        files.before = lambda what, path: None
        one.step()
        assert one.ckpt.save(wait=True).saved
        require_whole(store, 2)


# ---- resuming on a bad day

PAYLOAD = "rank-00000.safetensors"


@pytest.mark.parametrize(("where", "which"), [("manifests/", 0), ("rank-00000.json", 0), (PAYLOAD, 0), (PAYLOAD, 1)])
def test_a_read_refused_once_costs_no_fallback(store: Path, where: str, which: int) -> None:
    with job(store, policy=PARITY) as one:
        for _ in range(4):
            one.step()
        one.ckpt.save(wait=True)
        saved = one.weights()
    seen: list[str] = []

    def refuse(operation: str, path: str) -> None:
        if operation == "read" and where in path:
            seen.append(path)
            if len(seen) == which + 1:
                raise StorageError(f"cannot read {path}: too many open files")

    with job(store) as other:
        catalog = session_of(other.ckpt).catalog
        catalog.files = HookedFiles(catalog.files, refuse)
        assert other.ckpt.resume() == 4
        assert len(seen) > which
        assert same(other.weights(), saved)
        assert other.ckpt.certificate is not None and other.ckpt.certificate.exact
        assert not any(unit.fallback for unit in other.ckpt.certificate.units)


def test_a_resume_that_raised_counts_as_none(store: Path) -> None:
    with job(store) as one:
        one.step()
    before = files_of(store)
    with job(store, width=9) as other:
        with pytest.raises(ModelMismatchError):
            other.ckpt.resume()
        other.update()
        with pytest.raises(ConfigError, match="resume"):
            other.ckpt.step()
        with pytest.raises(ConfigError, match="resume"):
            other.ckpt.save(wait=True)
    assert files_of(store) == before


# ---- the order of calls


def test_save_between_the_update_and_step_is_refused(store: Path) -> None:
    with job(store, every=100) as one:
        one.ckpt.resume()
        assert one.ckpt.save(wait=True).skipped is None
        one.update()
        with pytest.raises(ConfigError, match=r"call ckpt\.step\(\) first"):
            one.ckpt.save(wait=True)
        one.ckpt.step()
        assert one.ckpt.save(wait=True).skipped is None
        require_whole(store, 1)
        one.update()
        assert one.ckpt.resume() == 1  # the update is undone: nothing is to be told of it any more
        assert one.ckpt.save(wait=True).skipped is None
        require_whole(store, 1)


# ---- the drift from the resumed state


@pytest.mark.parametrize("policy", ["full", PARITY])
def test_the_resumed_state_is_measured_before_it_changes(store: Path, policy: Any) -> None:
    with job(store, policy=policy) as one:
        one.step()
    with job(store, policy=policy, every=1000) as other:
        saver, context, free = other.ckpt._saver, job_of(other.ckpt), threading.Event()
        saver.upkeep(lambda: (free.wait(60), None)[1], "a background thread that hangs")
        other.ckpt.resume()
        moving = [unit for unit in context.table.local() if is_moving(unit)]
        assert moving and not any(map(partial(has_reference, context.meter), moving))
        other.step(flush=False)
        free.set()
        other.ckpt.flush()
        for unit in moving:
            measured = context.meter.measure(unit, context.table.local()[unit].tensors)
            assert measured.moved_sq > 0 and measured.reference_sq > 0


def test_a_policy_that_needs_drift_knows_it_at_once(store: Path) -> None:
    with job(store) as one:
        one.step()
    with job(store, every=1000, policy={"name": "threshold", "threshold": 0.01}) as other:
        other.ckpt.resume()
        context = job_of(other.ckpt)
        assert all(map(partial(has_reference, context.meter), context.table.local()))
