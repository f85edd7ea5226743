"""Units that are measured at once, by kernels that run here as Triton's would: each program by numpy.

``tests/gpu`` runs the kernels themselves.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from monitor import observe
from monitor.observe import sketch_meter
from monitor.observe.drift_meter import drift_ratio
from monitor.observe.sketch_meter import SketchMeter
from store.names import Unit

LENGTHS = ((40_000, 1 << 13), (0, 1 << 12))  # short, so that units have many chunks
SIZES = ((5000,), (20_000, 7, 0, 3000), (90_001,), (4100, 1), (100,), (50_000, 64))


def memory(address: int, count: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def fill(grid: Any, *arguments: torch.Tensor, first: int, slots: int, **_: Any) -> None:
    pointers, numels, offsets, signs, starts, table, board = (one.numpy() for one in arguments)
    for row in range(grid[1]):
        total = np.zeros(slots)
        for chunk in range(starts[first + row], starts[first + row + 1]):
            count = numels[chunk]
            values = memory(int(pointers[chunk]), count) * table[:count] * signs[chunk]
            total[offsets[chunk] : offsets[chunk] + count] += values
        board[row * slots : (row + 1) * slots] = total


def add(grid: Any, board: Any, order: Any, out: Any, *, first: int, slots: int, width: int, **_: Any) -> None:
    for row in range(grid[1]):
        there = board.numpy()[row * slots : (row + 1) * slots].astype(np.float64)
        out[first + row] = torch.from_numpy(there[order.numpy()].reshape(-1, width).sum(0))


class Launched:
    """A kernel whose launches are calls of ``program``."""

    def __init__(self, program: Callable[..., None], names: Sequence[str]) -> None:
        self.program, self.names = program, names

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*given: Any, **named: Any) -> None:
            tensors = [one for one in given if isinstance(one, torch.Tensor)]
            numbers = [one for one in given if not isinstance(one, torch.Tensor)]
            self.program(grid, *tensors, **dict(zip(self.names, numbers, strict=True)), **named)

        return launch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.jit = lambda **_: lambda function: function  # type: ignore[attr-defined]
    triton.cdiv = lambda one, other: -(-one // other)  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    for name in ("constexpr", "float32", "bfloat16", "float16"):
        setattr(language, name, object())
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.delitem(sys.modules, "monitor.observe.triton_sketch", raising=False)
    from monitor.observe import triton_sketch

    monkeypatch.setattr(triton_sketch, "_fill", Launched(fill, ("first", "slots")))
    monkeypatch.setattr(triton_sketch, "_sum", Launched(add, ("first", "slots", "rows", "width")))
    monkeypatch.setattr(triton_sketch, "_CHUNKS", LENGTHS)
    monkeypatch.setattr(triton_sketch, "_BOARDS", 1 << 20)  # several groups
    monkeypatch.setattr(sketch_meter, "_kernels", lambda: triton_sketch)
    monkeypatch.setattr(
        sketch_meter.Projection, "chunk_length", staticmethod(lambda numel, _: triton_sketch.chunk_length(numel))
    )
    monkeypatch.setattr(SketchMeter, "_fits", lambda _, pieces: triton_sketch.fits(pieces))
    yield triton_sketch
    sys.modules.pop("monitor.observe.triton_sketch", None)
    vars(observe).pop("triton_sketch", None)


def units(seed: int = 0) -> dict[Unit, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        Unit(f"layers.{index}", "fp32"): [torch.randn(size, generator=generator) for size in sizes]
        for index, sizes in enumerate(SIZES)
    }


@pytest.mark.usefixtures("kernels")
def test_many_are_measured_as_one_by_one() -> None:
    state, one, many = units(), SketchMeter(), SketchMeter()
    for unit, pieces in state.items():
        one.reset(unit, pieces)
        many.reset(unit, pieces)
    at_rest = many.measure_many(state)
    assert [unit.layer for unit in state if unit not in at_rest] == ["layers.4"]  # too few values to project
    assert max(drift_ratio(found.moved_sq, found.reference_sq) for found in at_rest.values()) < 1e-6
    for pieces in state.values():
        for piece in pieces:
            piece.mul_(1.1)
    for unit, found in many.measure_many(state).items():
        alone = one.measure(unit, state[unit])
        assert (found.moved_sq, found.reference_sq) == pytest.approx((alone.moved_sq, alone.reference_sq), rel=1e-5)
        assert found.finite and found.moved_sq > 0
        samples = [meter._measured[threading.get_ident(), unit].sample for meter in (many, one)]
        assert samples[0] is not None and samples[1] is not None and torch.equal(*samples)


@pytest.mark.usefixtures("kernels")
def test_a_save_refers_to_what_was_measured_unless_the_copies_differ() -> None:
    state, meter = units(), SketchMeter()
    assert all(found.reference_sq == 0.0 for found in meter.measure_many(state).values())  # there is none yet
    changed = Unit("layers.2", "fp32")
    for unit, pieces in state.items():
        if unit in meter.measure_many(state):
            copies = [piece.clone() for piece in pieces]
            if unit == changed:
                copies[0].mul_(2.0)
            meter.stage(unit, copies)
            meter.settle({unit: True})
    found = {unit.layer: measure.moved_sq for unit, measure in meter.measure_many(state).items()}
    assert found.pop("layers.2") > 1.0
    assert set(found.values()) == {0.0}


@pytest.mark.usefixtures("kernels")
def test_values_that_are_not_finite_are_told_of_their_unit() -> None:
    state, meter = units(), SketchMeter()
    for unit, pieces in state.items():
        meter.reset(unit, pieces)
    state[Unit("layers.5", "fp32")][1][63] = torch.nan
    found = {unit.layer: (one.finite, one.moved_sq) for unit, one in meter.measure_many(state).items()}
    assert found.pop("layers.5") == (False, np.inf)
    assert all(finite for finite, _ in found.values())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("change", ["moved", "order", "fewer"])
def test_other_tensors_or_another_order_are_found(change: str) -> None:
    state, meter = units(), SketchMeter()
    meter.measure_many(state)
    other = units(seed=1) if change == "moved" else dict(list(state.items())[:: -1 if change == "order" else 2])
    expected = SketchMeter()
    for unit, found in meter.measure_many(other).items():
        alone = expected.measure(unit, other[unit])
        assert found.signature is not None and alone.signature is not None
        assert torch.allclose(found.signature.values, alone.signature.values, atol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_the_length_of_chunks_is_not_chosen_while_a_save_chooses_it() -> None:
    """Signatures of two lengths would be compared with each other."""
    meter = SketchMeter()
    measuring = threading.Thread(target=meter.measure_many, args=(units(),))
    with meter._lock:
        measuring.start()
        measuring.join(0.5)
        assert meter._chunk_lengths == {}
    measuring.join()
    assert len(meter._chunk_lengths) == len(SIZES) - 1


def test_after_a_failure_units_are_measured_one_by_one(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __getitem__(self, _: Any) -> Any:
            raise RuntimeError("no compiler")

    monkeypatch.setattr(kernels, "_fill", Failing())
    meter = SketchMeter()
    assert meter.measure_many(units()) == {} and meter._one_by_one
