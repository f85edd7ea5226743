"""Buffers for copies from CUDA devices are pinned once for a unit, come from the pool, and are given back whole."""

from __future__ import annotations

import mmap
import threading
from dataclasses import replace

import pytest
import torch

from monitor.adapters.base import Piece
from monitor.observe.units import UnitLayout
from monitor.save.staging import StagingPool
from store.names import Fragment, Unit
from tests.support.cuda_runtime import OUT_OF_MEMORY, CudaRuntime, install_runtime, needs_compiler

UNIT = Unit("blocks.0", "fp32")
DEVICE = torch.device("cuda", 1)

pytestmark = needs_compiler


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    return install_runtime(monkeypatch)


def layout(tensors: list[torch.Tensor], device: torch.device = DEVICE) -> UnitLayout:
    """As if the tensors lay on a device."""
    made = UnitLayout.of([Piece(Fragment(str(i), "fp32", 0, t.numel()), t) for i, t in enumerate(tensors)])
    return replace(made, regions=replace(made.regions, devices=frozenset({device})))


def tensors() -> list[torch.Tensor]:
    return [torch.randn(40_000), torch.randn(3).to(torch.bfloat16), torch.randn(0), torch.randn(5000)]


def test_a_unit_takes_one_registration_of_no_more_than_its_pages(runtime: CudaRuntime) -> None:
    pool, live = StagingPool(), layout(tensors())
    pool.reserve(UNIT, live)
    ((name, nbytes),) = runtime.log
    assert name == "register"
    assert live.nbytes <= nbytes <= live.nbytes + 64 * len(live.fragments)
    buffers = pool.take(UNIT, live)
    assert [(b.dtype, b.numel()) for b in buffers] == [(t.dtype, t.numel()) for t in tensors()]
    (start,) = runtime.registered
    assert start % mmap.PAGESIZE == 0
    for buffer in buffers:
        buffer.fill_(1)
        end = buffer.data_ptr() + buffer.nbytes
        assert not buffer.numel() or start <= buffer.data_ptr() <= end <= start + nbytes


def test_buffers_that_are_used_again_are_registered_once(runtime: CudaRuntime) -> None:
    pool, live = StagingPool(), layout(tensors())
    for _ in range(3):
        pool.give(UNIT, pool.take(UNIT, live), live)
        pool.give_bytes(UNIT, pool.take_bytes(UNIT, [100, 200], DEVICE))
    assert [name for name, _ in runtime.log] == ["register"] * 2


def test_memory_stays_registered_until_the_last_buffer_is_gone(runtime: CudaRuntime) -> None:
    pool, live = StagingPool(), layout(tensors())
    buffers = pool.take(UNIT, live)
    last = buffers[-1]
    del buffers
    assert len(runtime.registered) == 1
    last.fill_(3)
    del last
    assert not runtime.registered and runtime.log[-1] == ("unregister", runtime.log[0][1])


def test_a_thread_registers_memory_for_the_device_of_the_unit(runtime: CudaRuntime) -> None:
    """Elsewhere every rank of a node would begin to use the first device."""
    pool, live = StagingPool(), layout(tensors())
    background = threading.Thread(target=pool.prepare, args=(UNIT, live))
    background.start()
    background.join()
    assert runtime.devices == [DEVICE.index]


def test_where_the_runtime_refuses_buffers_are_not_pinned_and_no_kernel_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = install_runtime(monkeypatch, refuses=OUT_OF_MEMORY)
    pool, live = StagingPool(), layout(tensors())
    first = pool.take(UNIT, live)
    runtime.launch()
    assert "cannot be pinned (CUDA error 2)" in caplog.text
    pool.give(UNIT, first, live)
    assert [b.data_ptr() for b in pool.take(UNIT, live)] == [b.data_ptr() for b in first]
    del first
    assert not runtime.log


def test_the_runtime_keeps_an_error_until_it_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = install_runtime(monkeypatch, refuses=OUT_OF_MEMORY)
    assert runtime.cudaHostRegister(4096, 1, 0) == OUT_OF_MEMORY
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        runtime.launch()
    runtime.launch()


@pytest.mark.parametrize("device", [DEVICE, torch.device("cpu")])
def test_pages_are_touched_before_the_first_save_once(device: torch.device, runtime: CudaRuntime) -> None:
    """Pinning touches them: to do it again would keep the first save waiting."""
    pool, live = StagingPool(), layout(tensors(), device)
    pool.reserve(UNIT, live)
    buffer = pool._free[UNIT][0][1][0]
    buffer.fill_(1)
    pool.prepare(UNIT, live)
    assert bool(buffer.any()) == (device == DEVICE)
    assert len(runtime.registered) == (1 if device == DEVICE else 0)


def test_host_memory_needs_no_runtime() -> None:
    pool, live = StagingPool(), layout(tensors(), torch.device("cpu"))
    assert len(pool.take(UNIT, live)) == len(tensors())
