"""Payloads in shared memory are pinned where copies come from a device, each once, and never unpinned under a copy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from monitor.adapters.identity import MemoryRegions
from monitor.memory.buffers import SharedMemoryBuffers
from monitor.memory.tier import MemoryTier
from monitor.save.torch_codecs import EncodedCopy
from tests.support.cuda_runtime import OUT_OF_MEMORY, CudaRuntime, install_runtime, needs_compiler
from tests.support.internals import memory_of, wait_for_snapshot
from tests.support.jobs import Job
from tests.support.kept import memory
from tests.support.memory_jobs import kept_steps, run

pytestmark = needs_compiler


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    return install_runtime(monkeypatch)


@pytest.fixture
def state_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory tier takes all state for that of a device; staging does not, and copies it as it is."""
    reserve = MemoryTier._reserve

    def reserved(self: MemoryTier, *given: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryRegions, "cuda", torch.device("cuda", 0))
            reserve(self, *given)

    monkeypatch.setattr(MemoryTier, "_reserve", reserved)


def begun(store: Path, **settings: Any) -> tuple[Job, MemoryTier]:
    one = Job(store, **{"every": 100, "memory": memory(store), **settings})
    one.ckpt.resume()
    tier = memory_of(one.ckpt)
    assert tier is not None
    return one, tier


def mapped(tier: MemoryTier) -> dict[int, int]:
    """Addresses and sizes of the payloads."""
    arena = tier._buffers.arena
    assert arena is not None
    views = [torch.frombuffer(memory, dtype=torch.uint8) for memory in arena._maps.values()]
    return {view.data_ptr(): view.numel() for view in views}


def test_each_payload_is_registered_once_and_no_more_after_the_end(
    store: Path, runtime: CudaRuntime, state_on_device: None
) -> None:
    one, tier = begun(store)
    run(one, 3)  # the moments appear, so the payloads grow
    calls = list(runtime.log)
    run(one, 3)
    assert kept_steps(store)
    assert runtime.registered == mapped(tier) and len(runtime.registered) == 2
    assert runtime.log == calls
    one.ckpt.close()
    assert not runtime.registered and [name for name, _ in runtime.log[len(calls) :]] == ["unregister"] * 2


def test_payloads_have_room_for_the_run_state_before_its_size_is_known(
    store: Path, runtime: CudaRuntime, state_on_device: None
) -> None:
    one, _ = begun(store, width=512)  # more than the pages that a mapping is rounded up to
    run(one, 1)
    one.ckpt.close()  # with a commit that has the moments
    two, tier = begun(store, width=512)
    reserved, calls = mapped(tier), list(runtime.log)
    run(two, 3)  # to map a payload again, and to pin it, takes training as long as a hundred snapshots
    assert kept_steps(store)
    assert mapped(tier) == reserved and len(reserved) == 2
    assert runtime.log == calls
    two.ckpt.close()


def test_payloads_grow_once_in_a_fresh_job_that_saves_at_once(
    store: Path, runtime: CudaRuntime, state_on_device: None
) -> None:
    one, tier = begun(store, width=512, every=1)
    run(one, 2)  # the moments appear, and the size of the run state is known from the second on
    grown, calls = mapped(tier), list(runtime.log)
    run(one, 3)
    assert mapped(tier) == grown and len(grown) == 2
    assert runtime.log == calls
    one.ckpt.close()


def test_a_payload_that_grew_is_registered_in_its_new_place_only(store: Path, runtime: CudaRuntime) -> None:
    one, tier = begun(store)
    buffers = tier._buffers
    buffers.pinned = True
    for slot in buffers.slots:
        buffers.at(slot, 1 << 20)
    small = dict(runtime.registered)
    assert small == mapped(tier)
    for slot in buffers.slots:
        buffers.at(slot, 16 << 20)
    assert runtime.registered == mapped(tier)
    assert not small.keys() & runtime.registered.keys()
    one.ckpt.close()


def test_nothing_is_registered_where_the_state_lies_on_the_host(
    store: Path, runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an offloaded optimizer, whose parameters alone are on a device."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Parameter, "is_cuda", True)
        one, _ = begun(store)
    run(one, 3)
    assert kept_steps(store)
    assert not runtime.log
    one.ckpt.close()


def test_refused_once_versions_are_kept_in_memory_that_is_not_pinned(
    store: Path, monkeypatch: pytest.MonkeyPatch, state_on_device: None, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = install_runtime(monkeypatch, refuses=OUT_OF_MEMORY)
    one, _ = begun(store)
    runtime.launch()
    run(one, 3)
    assert kept_steps(store) == [2, 3]
    assert caplog.text.count("cannot be pinned") == 1
    one.ckpt.close()
    assert not runtime.log


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_pages_stay_registered_and_mapped_while_a_copy_into_them_may_be_under_way(
    store: Path, runtime: CudaRuntime, state_on_device: None, release: threading.Event
) -> None:
    one, tier = begun(store, timeouts={"close": 0.2})
    run(one, 2)
    there = dict(runtime.registered)

    def hang() -> float:
        assert release.wait(180)
        return 0.0

    tier._writer.submit(hang)
    one.ckpt.close(save=False)
    assert runtime.registered == there and len(there) == 2
    maps = Path("/proc/self/maps").read_text()
    assert all(f"{address:x}-" in maps for address in there)


def test_without_memory_to_encode_in_no_value_is_called_nan(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, _ = begun(store, width=64, memory=memory(store, encoding="compact"))
    run(one, 2)

    def refused(_: EncodedCopy) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(EncodedCopy, "_encode", refused)
        run(one, 1)
    run(one, 1)
    text = " ".join(record.getMessage() for record in caplog.records if "step 3" in record.getMessage())
    assert "no memory is left to encode" in text and "NaN" not in text
    assert kept_steps(store) == [2, 4]
    one.ckpt.close()


def test_memory_is_unpinned_before_it_is_unmapped(store: Path, runtime: CudaRuntime, state_on_device: None) -> None:
    one, tier = begun(store)
    run(one, 1)
    real, seen = runtime.cudaHostUnregister, list[bool]()

    def unregister(address: int) -> int:
        seen.append(f"{address:x}-" in Path("/proc/self/maps").read_text())
        return real(address)

    runtime.cudaHostUnregister = unregister  # type: ignore[method-assign]
    one.ckpt.close()
    assert seen == [True, True]
    assert isinstance(tier._buffers, SharedMemoryBuffers) and tier._buffers.arena is None
    wait_for_snapshot(one.ckpt)
