"""Copies in waves: the same bytes as of whole copies, under a cap; and storage that fails or hangs in the middle.

Where a state is small, so is the cap, below what the settings allow."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

import monitor
from monitor.config.schema import StagingSettings
from monitor.save.async_copy import WaveCopy
from monitor.save.staging import StagingPool
from store.catalog import open_catalog
from store.errors import NoSpaceError, SaveError
from store.schema import PartRecord
from store.storage.local import LocalFiles
from tests.support.hooked import HookedFiles, nothing
from tests.support.internals import decide_without_update, hold_writer, staging_buffers, wave_bytes
from tests.support.jobs import Job, Model, committed_steps, job
from tests.support.late_streams import LateStreams

NORMS = ("finite", "moved_sq", "reference_sq", "error_sq", "decoded_sq")
WIDTH, CAP = 64, 40_000  # the state has 160 kB, its largest units 17 kB


def staging(mode: str = "lazy", cap: int = CAP) -> StagingSettings:
    return StagingSettings.model_construct(mode=mode, max_bytes=cap)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trained(store: Path, steps: int = 4, **settings: Any) -> tuple[Any, list[Any], dict[str, float]]:
    """Entries of all parts, drift of all units at each decision, and all norms."""
    torch.manual_seed(0)
    drift = []
    with job(store, width=WIDTH, **settings) as one:
        for _ in range(steps):
            report = one.step()
            assert report is not None and report.skipped is None
            drift.append({str(unit.unit): unit.drift for unit in report.stats})
        assert "max_bytes" not in str(settings) or not staging_buffers(one.ckpt)
    return entries_of(store), drift, norms_of(store)


def entries_of(store: Path) -> list[dict[tuple[str, str], tuple[Any, ...]]]:
    """Encoding, base and hash of all fragments of each save."""
    return [
        {(e.fqn, e.slot): (e.encoding, e.base, e.encoded_xxh3_128 or e.xxh3_128) for e in part.entries}
        for part in parts_of(store)
    ]


def norms_of(store: Path) -> dict[str, float]:
    """All that was measured of each save, and the errors in its manifest."""
    found: dict[str, float] = {}
    for part in parts_of(store):
        for one in part.measures:
            found |= {f"{part.save} {one.unit} {name}": getattr(one, name) for name in NORMS}
    catalog = open_catalog(LocalFiles(store))
    for save in catalog.saves():
        found |= {f"{save} {record.unit} error": record.error for record in catalog.manifest(save).units}
    return found


def parts_of(store: Path) -> list[PartRecord]:
    """Of all saves, the newest first."""
    catalog = open_catalog(LocalFiles(store))
    return [catalog.group(save, catalog.manifest(save).groups[save.name]).parts[0] for save in catalog.saves()]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"policy": {"name": "threshold", "threshold": 1e-9}},
        {"packing": 1, "differences": True},
        {"encoding": "compact", "encode": "staging", "policy": {"name": "threshold", "threshold": 1e-9}},
        {"encoding": {"exp_avg": "int8-block"}, "packing": 1},
    ],
    ids=["raw", "measured", "differences", "compact", "packed int8"],
)
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_waves_store_what_whole_copies_do(tmp_path: Path, settings: dict[str, Any], mode: str) -> None:
    """And drift is measured from the same versions."""
    (*whole, norms), (*waves, others) = (
        trained(tmp_path / name, **settings, staging=chosen)
        for name, chosen in {"whole": mode, "waves": staging(mode)}.items()
    )
    assert whole == waves and others == pytest.approx(norms, rel=1e-5, abs=0.0)  # some are float32 sums


class Mixed(torch.nn.Module):
    """A parameter that encodings apply to, beside one of another dtype that holds most of the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64))
        self.scale = torch.nn.Parameter(torch.full((64,), 1e3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight * self.scale.float()


@pytest.mark.parametrize("settings", [{}, {"packing": 1}], ids=["plain", "packed"])
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_the_error_of_a_unit_is_over_its_raw_fragments_too(tmp_path: Path, settings: dict[str, Any], mode: str) -> None:
    for name, chosen in {"whole": mode, "waves": staging(mode, 50_000)}.items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(Mixed(), Mixed())
        optimizer = torch.optim.AdamW(model.parameters())
        fixed = {"every": 1, "encoding": "compact", "metrics": {"enabled": False}, **settings}
        with monitor.attach((model, optimizer), {"store": str(tmp_path / name), "staging": chosen, **fixed}) as ckpt:
            for _ in range(3):
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
                report = ckpt.step()
                assert report is not None and report.skipped is None
                ckpt.flush()
    assert entries_of(tmp_path / "whole") == entries_of(tmp_path / "waves")
    whole = norms_of(tmp_path / "whole")
    errors = [value for name, value in whole.items() if name.endswith("fp32 error")]
    assert len(errors) == 6 and all(0.0 < error < 2e-5 for error in errors), "what is rounded has little of the norm"
    assert norms_of(tmp_path / "waves") == pytest.approx(whole, rel=1e-6, abs=0.0)


def test_a_unit_larger_than_the_cap_is_copied_in_pieces(tmp_path: Path) -> None:
    """With a cap that the settings allow. What no wave holds is stored raw."""
    settings: dict[str, Any] = {"encoding": {"exp_avg": "int8-block"}, "staging": {"mode": "lazy", "max_bytes": 2.0e7}}
    with job(tmp_path, width=2300, **settings) as one:  # three layers have 21 MB in each slot
        one.step(flush=False)
        state = one.weights()
        one.update()
        one.ckpt.flush()
        assert wave_bytes(one.ckpt) == 20_000_000 and not staging_buffers(one.ckpt)
    encodings = {(entry.layer, entry.slot): entry.encoding for entry in parts_of(tmp_path)[0].entries}
    assert encodings["embed", "exp_avg"] == "int8-block" and encodings["blocks.0", "exp_avg"] == "raw"
    with job(tmp_path, width=2300, **settings) as other:
        assert other.ckpt.resume() == 1
        found = other.weights()
    rounded = [name for name in state if "blocks" not in name and name.endswith("exp_avg")]
    assert all(torch.equal(found[name], state[name]) == (name not in rounded) for name in state)


def test_copies_from_a_device_are_complete_before_a_wave_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four tensors, two in a wave, on a device whose copies are made when somebody waits for them."""
    sources, pool = [torch.randn(100) for _ in range(4)], StagingPool()
    pool._block = torch.zeros(1000, dtype=torch.uint8)
    pieces = pool.take_waves([[source] for source in sources], 1000)
    assert [left for left, _, _ in pieces] == [1, 1, 0, 0]
    LateStreams(monkeypatch)
    copying = WaveCopy(pieces, 180.0, lazy=True)
    copying.start()
    for source, found in zip(sources, copying.take(pieces), strict=True):
        assert source.tolist() == found.tolist()
    copying.let_change()
    with pytest.raises(SaveError, match="written again"):
        next(copying.take(pieces))


@pytest.mark.parametrize("mode", ["auto", "lazy"])
def test_a_job_resumes_bitwise_from_a_state_that_was_copied_in_waves(tmp_path: Path, mode: str) -> None:
    torch.manual_seed(0)
    with job(tmp_path, width=WIDTH, staging=staging(mode)) as one:
        one.step()
        one.step(flush=False)
        state = one.weights()
        one.update()  # waits for the copies
        assert not equal(one.weights(), state)
        one.ckpt.flush()
    with job(tmp_path, width=WIDTH, staging=staging(mode)) as other:
        assert other.ckpt.resume() == 2 and other.ckpt.certificate is not None and other.ckpt.certificate.exact
        assert equal(other.weights(), state)


def held(one: Job, count: int, action: Callable[[], object]) -> HookedFiles:
    """From now on, call ``action`` before the write that follows ``count`` writes into a payload."""
    left = [count]

    def before(operation: str, path: str) -> None:
        if operation == "write" and path.endswith(".safetensors"):
            left[0] -= 1
            if left[0] < 0:
                action()

    files = one.hook()
    files.before = before
    return files


def test_training_waits_until_all_but_the_last_wave_is_written(tmp_path: Path) -> None:
    with job(tmp_path, width=WIDTH, staging=staging("lazy")) as one:
        one.step()
        release = threading.Event()
        held(one, 8, lambda: release.wait(180))
        report = one.step(flush=False)
        assert report is not None and report.skipped is None
        waits = one.metric("driftpoint_copy_wait_seconds_sum")
        threading.Timer(0.3, release.set).start()
        one.update()
        assert release.is_set()
        assert one.metric("driftpoint_copy_wait_seconds_sum") - waits > 0.1
        one.ckpt.flush()
    assert committed_steps(tmp_path) == [1, 2]


def test_at_once_the_wait_is_part_of_the_stall(tmp_path: Path) -> None:
    with job(tmp_path, width=WIDTH, staging=staging("auto")) as one:
        one.step()
        release = threading.Event()
        held(one, 8, lambda: release.wait(180))
        threading.Timer(0.3, release.set).start()
        report = one.step(flush=False)
        assert report is not None and report.stall_seconds > 0.1 and release.is_set()


def test_a_save_that_is_waited_for_is_not_given_up_for_the_training_that_waits(tmp_path: Path) -> None:
    with job(tmp_path, width=WIDTH, every=1000, staging=staging("eager"), timeouts={"staging": 0.05}) as one:
        one.update()
        one.ckpt.step()
        release = threading.Event()
        held(one, 8, lambda: release.wait(180))
        threading.Timer(0.5, release.set).start()
        one.ckpt.save(wait=True)
    assert committed_steps(tmp_path) == [1]


def test_if_the_cap_holds_all_of_it_training_does_not_depend_on_the_writer(tmp_path: Path) -> None:
    release = threading.Event()
    with job(tmp_path, width=WIDTH, staging=staging("auto", 1 << 20)) as one:
        hold_writer(one.ckpt, release)
        assert one.step(flush=False) is not None
        state = one.weights()
        one.update()
        release.set()
        one.ckpt.flush()
    with job(tmp_path, width=WIDTH) as other:
        assert other.ckpt.resume() == 1 and equal(other.weights(), state)


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_storage_that_hangs_costs_the_save_and_not_the_job(tmp_path: Path, mode: str) -> None:
    with job(tmp_path, width=WIDTH, staging=staging(mode), timeouts={"staging": 0.3}) as one:
        one.step()
        release = threading.Event()
        held(one, 8, lambda: release.wait(180))
        began = time.monotonic()
        one.step(flush=False)
        one.update()
        assert 0.2 < time.monotonic() - began < 60 and not release.is_set()
        report = one.step(flush=False)
        assert report is not None and report.skipped == "busy"
        release.set()
        one.ckpt.flush()
        assert committed_steps(tmp_path) == [1]
        one.step()
        assert one.metric("driftpoint_failures_total", reason="SaveError") == 1
    assert committed_steps(tmp_path)[-1] > 2
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_a_full_disk_in_the_middle_of_a_wave_lets_training_go_on_at_once(tmp_path: Path, mode: str) -> None:
    def fail() -> None:
        raise NoSpaceError("no space")

    with job(tmp_path, width=WIDTH, staging=staging(mode)) as one:
        one.step()
        files = held(one, 8, fail)
        began = time.monotonic()
        one.step(flush=False)
        one.update()
        assert time.monotonic() - began < 100  # of 300
        one.ckpt.flush()
        files.before = nothing
        report = one.step()
        assert report is not None and report.skipped is None
        assert one.metric("driftpoint_failures_total", reason="NoSpaceError") == 1
    assert committed_steps(tmp_path)[-1] > 2 and 2 not in committed_steps(tmp_path)


def test_a_change_before_the_last_wave_is_copied_gives_the_save_up(tmp_path: Path) -> None:
    with job(tmp_path, width=WIDTH, staging=staging("lazy")) as one:
        one.step()
        release = threading.Event()
        held(one, 8, lambda: release.wait(180))
        one.step(flush=False)
        with torch.no_grad():
            one.model.head.weight.data.add_(1)
        release.set()
        one.update()
        one.ckpt.flush()
        one.step()
        assert one.metric("driftpoint_failures_total", reason="StateChangedError") == 1
    assert 2 not in committed_steps(tmp_path)


def test_copied_waits_for_all_waves(tmp_path: Path) -> None:
    with job(tmp_path, width=WIDTH, staging=staging("lazy")) as one:
        one.step()
        release = threading.Event()
        held(one, 8, lambda: release.wait(180))
        one.step(flush=False)
        threading.Timer(0.2, release.set).start()
        one.ckpt.copied()
        with torch.no_grad():
            one.model.head.weight.data.add_(1)
        one.ckpt.flush()
    assert committed_steps(tmp_path) == [1, 2]


def test_a_job_that_is_killed_in_the_middle_of_a_wave_resumes_the_commit_before(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            one = Job(tmp_path, width=WIDTH, staging=staging("lazy"))
            one.step()
            held(one, 8, lambda: os.kill(os.getpid(), signal.SIGKILL))
            one.step()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    with job(tmp_path, width=WIDTH, staging=staging("lazy")) as other:
        assert other.ckpt.resume() == 1
        other.step()
    assert committed_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_the_last_save_of_a_preempted_job_is_made_in_waves(tmp_path: Path, mode: str) -> None:
    with job(tmp_path, width=WIDTH, staging=staging(mode), every=100) as one:
        one.step()
        one.ckpt.preempt()
        with pytest.raises(monitor.Preempted):
            one.step()
    assert committed_steps(tmp_path) == [2]


def with_buffers() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    """A model with buffers and a frozen layer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64))
    model[2].requires_grad_(False)
    return model, torch.optim.AdamW(model[:2].parameters(), lr=1e-2)


def test_buffers_and_frozen_weights_are_copied_before_a_forward_can_change_them(tmp_path: Path) -> None:
    """And drift of buffers is measured from what was saved, although a forward came before the save was settled."""
    model, optimizer = with_buffers()
    settings = {"store": str(tmp_path), "every": 1, "metrics": {"enabled": False}, "staging": staging("lazy", 20_000)}
    with monitor.attach((model, optimizer), settings) as ckpt:
        for _ in range(2):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            report = ckpt.step()
            assert report is not None and report.skipped is None
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            with torch.no_grad():
                model[2].weight.data.add_(1)
                model(torch.randn(8, 64))  # changes the statistics
            ckpt.flush()
        assert committed_steps(tmp_path) == [1, 2]
        other, unused = with_buffers()
        with monitor.attach((other, unused), {**settings, "trace": {"enabled": False}, "policy": "observe"}) as reader:
            assert reader.resume() == 2
            assert equal(dict(other.state_dict()), state)
        drift = {str(unit.unit): unit.drift for unit in decide_without_update(ckpt).stats}
        assert drift["1/buffer"] == 1.0 and drift["2/frozen"]
        ckpt.close(save=False)


def resident() -> int:
    """Memory of this process in bytes, without files. Pages that others share, and stop sharing, count the same."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return sum(int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssShmem:")) << 10


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the memory of a process")
def test_a_save_takes_no_more_memory_than_the_cap(tmp_path: Path) -> None:
    """Of a state of 300 MB, in a process of its own."""
    grown = {}
    for name, chosen in {"waves": {"max_bytes": 4.0e7}, "whole": "eager"}.items():
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            grown[name] = pool.submit(growth, tmp_path / name, chosen).result()
    assert grown["waves"] < 4.0e7 + 2.5e7 and grown["whole"] > 2.8e8, grown


def growth(store: Path, chosen: Any) -> int:
    """Bytes that attaching and a save take at most, in a process that did nothing before."""
    model = Model(2900)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before, most, done = resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    settings = {"store": str(store), "staging": chosen, "self_check": False, "metrics": {"enabled": False}}
    ckpt = monitor.attach((model, optimizer), settings)
    ckpt.resume()
    ckpt.save(wait=True)
    done.set()
    watcher.join()
    return most[0] - before
