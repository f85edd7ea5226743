"""What only a device can show. ``make gpu`` runs these, with all tests marked ``cuda``; elsewhere they skip."""

from __future__ import annotations

import copy
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monitor
from monitor.adapters.base import Piece
from monitor.observe.drift_meter import drift_ratio
from monitor.observe.sketch_meter import SketchMeter
from monitor.observe.units import UnitLayout
from monitor.save import device_memory
from monitor.save.staging import StagingPool
from monitor.save.torch_codecs import EncodedCopy
from store.encoding import CHUNK, ENCODINGS, WRITABLE, encoding_named
from store.names import Fragment, Unit
from tests.support.entries import iter_chunks
from tests.support.reference_encodings import encode_chunk

pytestmark = pytest.mark.cuda

UNIT = Unit("blocks.0", "fp32")
LOSSY = [name for name in WRITABLE if not ENCODINGS[name].lossless]


class Run:
    """A model on the device, and its checkpointer."""

    def __init__(self, store: Path, staging: str = "lazy", width: int = 1024, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(width, width) for _ in range(4)]
        self.width = width
        self.model = nn.Sequential(*layers, nn.BatchNorm1d(width), nn.Dropout(0.1)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        values = {"store": str(store), "every": 1, "staging": staging, "metrics": {"enabled": False}}
        self.ckpt = monitor.attach((self.model, self.optimizer), values)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        batch = torch.randn(64, self.width, device="cuda")
        self.model(batch).square().mean().backward()

    def update(self) -> None:
        self.backward()
        self.optimizer.step()

    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def committed(store: Path, step: int) -> dict[str, torch.Tensor]:
    two = Run(store, "eager")
    assert two.ckpt.resume() == step
    assert two.ckpt.certificate is not None and two.ckpt.certificate.exact
    two.ckpt.close(save=False)
    return two.values()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_refused_registration_fails_no_later_kernel() -> None:
    block = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    address = block.ctypes.data
    assert device_memory.pin(address, block.nbytes)
    try:
        assert int(torch.cuda.cudart().cudaHostRegister(address, block.nbytes, 0))  # registered already: it sticks
        with pytest.raises(RuntimeError):
            torch.zeros(8, device="cuda").add_(1)
        assert not device_memory.pin(address, block.nbytes)
        assert float(torch.zeros(8, device="cuda").add_(1).sum()) == 8
    finally:
        device_memory.unpin(address)


def test_buffers_are_pinned_once_for_a_unit_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    unpinned, unpin = list[int](), device_memory.unpin
    monkeypatch.setattr(device_memory, "unpin", lambda address: (unpinned.append(address), unpin(address)))
    live = [torch.randn(100_000, device="cuda"), torch.randn(7, device="cuda")]
    layout = UnitLayout.of([Piece(Fragment(str(i), "fp32", 0, t.numel()), t) for i, t in enumerate(live)])
    buffers = StagingPool().take(UNIT, layout)
    assert all(buffer.is_pinned() for buffer in buffers)
    for buffer, tensor in zip(buffers, live, strict=True):
        buffer.copy_(tensor, non_blocking=True)
    torch.cuda.synchronize()
    assert all(torch.equal(buffer, tensor.cpu()) for buffer, tensor in zip(buffers, live, strict=True))
    address = buffers[0].data_ptr()
    del buffer, buffers
    assert unpinned == [address]


@pytest.mark.parametrize("staging", ["eager", "lazy"])
@pytest.mark.parametrize("change", ["step", "model", "optimizer"])
def test_a_change_right_after_a_decision_is_not_in_its_commit(staging: str, change: str, tmp_path: Path) -> None:
    one = Run(tmp_path / "s", staging)
    one.ckpt.resume()
    one.update()
    before = copy.deepcopy((one.model.state_dict(), one.optimizer.state_dict()))
    one.update()
    one.backward()
    torch.cuda._sleep(200_000_000)  # the copies begin after this, and what follows was queued by then
    decided = one.values()
    one.ckpt.step()
    if change == "step":
        one.optimizer.step()
    elif change == "model":
        one.model.load_state_dict(before[0])
    else:
        one.optimizer.load_state_dict(before[1])
    one.ckpt.flush()
    one.ckpt.close(save=False)
    assert equal(committed(tmp_path / "s", 1), decided)


@pytest.mark.parametrize("refused", [False, True])
def test_all_copies_are_queued_by_one_call(refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (call := device_memory._copy_batch()) is None:
        pytest.skip("this CUDA runtime has no such call")
    codes: list[int] = []

    def queue(*arguments: object) -> int:
        codes.append(1 if refused else call(*arguments))
        return codes[-1]

    monkeypatch.setattr(device_memory, "_refused", [])
    monkeypatch.setattr(device_memory, "_copy_batch", lambda: None if device_memory._refused else queue)
    one = Run(tmp_path / "s", "lazy")
    one.ckpt.resume()
    for _ in range(3):
        one.update()
        decided = one.values()
        one.ckpt.step()
        one.ckpt.flush()
    one.ckpt.close(save=False)
    assert codes == ([1] if refused else [0, 0])  # the layout is known from the second save on
    assert equal(committed(tmp_path / "s", 3), decided)


def test_steps_of_a_graph_are_committed_as_they_are(tmp_path: Path) -> None:
    one = Run(tmp_path / "s", "auto", capturable=True)
    one.ckpt.resume()
    one.update()
    one.ckpt.step()
    one.backward()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        one.optimizer.step()
    for _ in range(2):
        graph.replay()
    decided = one.values()
    one.ckpt.flush()  # of the first save: while that is written, there is no other
    one.ckpt.step()
    graph.replay()
    one.ckpt.flush()
    one.ckpt.close(save=False)
    assert equal(committed(tmp_path / "s", 2), decided)


@pytest.mark.parametrize("name", LOSSY)
def test_chunks_encoded_at_once_have_the_bytes_of_each(name: str) -> None:
    values = torch.rand(5 * CHUNK + 77, generator=torch.Generator().manual_seed(0)).square()
    encoded = torch.zeros(encoding_named(name).stored_bytes(values.numel(), "F32"), dtype=torch.uint8).pin_memory()
    made = EncodedCopy(values.cuda(), name, encoded, torch.empty(0))
    made.begin()
    torch.cuda.synchronize()
    made.finish()
    assert made.held and not made.no_memory
    expected = b"".join(encode_chunk(encoding_named(name), chunk).tobytes() for chunk in iter_chunks(values.numpy()))
    assert made.encoded.numpy().tobytes() == expected


def test_without_memory_to_encode_the_values_are_copied() -> None:
    values = torch.randn(8 * CHUNK, device="cuda")
    target = torch.zeros(8 * CHUNK).pin_memory()
    encoded = torch.zeros(encoding_named("bf16").stored_bytes(values.numel(), "F32"), dtype=torch.uint8).pin_memory()
    made = EncodedCopy(values, "bf16", encoded, target)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-4)
    try:
        made.begin()
        torch.cuda.synchronize()
        made.finish()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert made.no_memory and not made.held
    assert torch.equal(target, values.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_units_measured_at_once_are_measured_as_one_by_one(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    sizes = [(5000,), (1 << 20, 7, 3000), (4_300_001,), (4100, 1), (100,), (300_000, 64), (300_000,)]
    units = {
        Unit(f"blocks.{i}", "fp32"): [torch.randn(n, device="cuda").to(dtype) for n in unit]
        for i, unit in enumerate(sizes)
    }
    one, many = SketchMeter(), SketchMeter()
    for unit, pieces in units.items():
        one.reset(unit, pieces)
        many.reset(unit, pieces)
    at_rest = many.measure_many(units)
    assert len(at_rest) == len(units) - 1  # one has too few values
    assert max(drift_ratio(found.moved_sq, found.reference_sq) for found in at_rest.values()) < 1e-6
    for pieces in units.values():
        for piece in pieces:
            piece.mul_(1.5)
    for unit, found in many.measure_many(units).items():
        alone = one.measure(unit, units[unit])
        assert found.moved_sq == pytest.approx(alone.moved_sq, rel=1e-5)
        assert found.reference_sq == pytest.approx(alone.reference_sq, rel=1e-5)
        assert found.signature is not None and found.finite
        copies = [piece.cpu() for piece in units[unit]]
        many.stage(unit, copies)
        many.settle({unit: True})
    assert all(found.moved_sq == 0.0 for found in many.measure_many(units).values())
    units[Unit("blocks.2", "fp32")][0][4_000_000] = torch.nan
    found = many.measure_many(units)
    assert [unit.layer for unit, measure in found.items() if not measure.finite] == ["blocks.2"]


def test_the_device_s_generator_goes_on(tmp_path: Path) -> None:
    one = Run(tmp_path / "s")
    one.ckpt.resume()
    one.update()
    one.ckpt.step()
    expected = torch.rand(5, device="cuda")
    one.ckpt.flush()
    one.ckpt.close(save=False)
    torch.manual_seed(99)
    committed(tmp_path / "s", 1)
    assert torch.equal(torch.rand(5, device="cuda"), expected)
