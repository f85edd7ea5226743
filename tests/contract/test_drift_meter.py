"""What a drift meter must do, with units small and large."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from monitor.observe.drift_meter import DriftMeter, drift_ratio
from monitor.observe.sketch_meter import SketchMeter
from store.errors import ConfigError
from store.names import Unit
from tests.support.internals import has_reference, signature_bytes

UNIT = Unit("model.layers.0", "fp32")
OTHER = Unit("model.layers.1", "fp32")
SMALL = (700, 0, 33, 1)
LARGE = (40_000, 0, 17, 300_000, 1)


@pytest.fixture
def meter() -> SketchMeter:
    return SketchMeter()


@pytest.fixture(params=[SMALL, LARGE], ids=["small", "large"])
def sizes(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return request.param


def tolerance(sizes: Sequence[int]) -> float:
    """Relative error allowed of a distance; a sketch keeps small units whole."""
    return 1e-6 if sum(sizes) <= 4099 else 0.05


def values(sizes: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def copies(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [piece.clone() for piece in pieces]


def nudge(pieces: Sequence[torch.Tensor], by: float, seed: int = 99) -> None:
    for piece, noise in zip(pieces, values([len(piece) for piece in pieces], seed), strict=True):
        piece.add_(noise.to(piece.dtype), alpha=by)


def distance(now: Sequence[torch.Tensor], then: Sequence[torch.Tensor]) -> float:
    """The same in numpy, in float64."""
    flat = [np.concatenate([piece.double().numpy() for piece in pieces]) for pieces in (now, then)]
    return float(np.linalg.norm(flat[0] - flat[1]))


def moved(meter: DriftMeter, pieces: Sequence[torch.Tensor], unit: Unit = UNIT) -> float:
    return math.sqrt(meter.measure(unit, pieces).moved_sq)


def commit(meter: DriftMeter, pieces: Sequence[torch.Tensor], unit: Unit = UNIT) -> None:
    meter.stage(unit, copies(pieces))
    meter.settle({unit: True})


def test_without_a_reference_both_squares_are_zero(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    measure = meter.measure(UNIT, values(sizes))
    assert (measure.moved_sq, measure.reference_sq, measure.finite) == (0.0, 0.0, True)
    assert not has_reference(meter, UNIT)
    assert not meter.measure(UNIT, [torch.tensor([math.nan])]).finite


def test_reset_makes_the_present_the_reference(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    pieces = values(sizes)
    meter.reset(UNIT, pieces)
    assert has_reference(meter, UNIT)
    assert not has_reference(meter, OTHER)
    measure = meter.measure(UNIT, pieces)
    assert measure.moved_sq == 0.0
    norm = distance(pieces, [torch.zeros_like(piece) for piece in pieces])
    assert math.sqrt(measure.reference_sq) == pytest.approx(norm, rel=tolerance(sizes))


@pytest.mark.parametrize("by", [1.0, 1e-2, 1e-4, 1e-5])
def test_distance_agrees_with_float64(meter: SketchMeter, sizes: tuple[int, ...], by: float) -> None:
    pieces = values(sizes)
    before = copies(pieces)
    meter.reset(UNIT, pieces)
    nudge(pieces, by)
    assert moved(meter, pieces) == pytest.approx(distance(pieces, before), rel=tolerance(sizes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types(meter: SketchMeter, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    pieces = values(sizes, dtype=dtype)
    before = copies(pieces)
    meter.reset(UNIT, pieces)
    nudge(pieces, 0.1)
    assert moved(meter, pieces) == pytest.approx(distance(pieces, before), rel=tolerance(sizes))


def test_integers_and_booleans_among_the_pieces(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    counters = [torch.tensor([10**12 + 7]), torch.tensor([True, False])]
    large = [torch.arange(sum(sizes)) % 1000]
    for start in (counters, large):
        meter.reset(UNIT, start)
        after = copies(start)
        after[0] += 3
        allowed = tolerance([sum(len(piece) for piece in start)])
        assert moved(meter, after) == pytest.approx(distance(after, start), rel=allowed)


def test_a_unit_without_values(meter: SketchMeter) -> None:
    for pieces in ([], [torch.empty(0)]):
        meter.reset(UNIT, pieces)
        assert meter.measure(UNIT, pieces).moved_sq == 0.0
        commit(meter, pieces)


def test_parameters_that_require_gradients(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    pieces = [piece.requires_grad_() for piece in values(sizes)]
    meter.reset(UNIT, [piece.view(-1) for piece in pieces])
    with torch.no_grad():
        nudge(pieces, 0.5)
    assert moved(meter, [piece.view(-1) for piece in pieces]) > 0


def test_units_do_not_mix(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    pieces, others = values(sizes), values(sizes, seed=1)
    meter.reset(UNIT, pieces)
    meter.reset(OTHER, others)
    assert moved(meter, pieces) == 0.0
    assert moved(meter, others, OTHER) == 0.0
    nudge(pieces, 1.0)
    assert moved(meter, others, OTHER) == 0.0


def test_a_commit_moves_the_reference(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    pieces = values(sizes)
    commit(meter, pieces)
    assert has_reference(meter, UNIT)
    saved = copies(pieces)
    nudge(pieces, 0.1)
    assert moved(meter, pieces) == pytest.approx(distance(pieces, saved), rel=tolerance(sizes))
    commit(meter, pieces)
    assert moved(meter, pieces) == 0.0


def test_a_failed_save_leaves_the_reference(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    pieces = values(sizes)
    meter.reset(UNIT, pieces)
    nudge(pieces, 0.1)
    before = meter.measure(UNIT, pieces)
    meter.stage(UNIT, copies(pieces))
    assert meter.measure(UNIT, pieces) == before
    meter.settle({UNIT: False})
    assert meter.measure(UNIT, pieces) == before


def test_a_failed_first_save_leaves_no_reference(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    pieces = values(sizes)
    meter.stage(UNIT, copies(pieces))
    assert not has_reference(meter, UNIT)
    meter.settle({UNIT: False})
    assert not has_reference(meter, UNIT)


def test_units_of_a_save_settle_together(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    for unit in (UNIT, OTHER):
        meter.stage(unit, values(sizes))
    meter.settle({UNIT: True, OTHER: False})
    assert has_reference(meter, UNIT) and not has_reference(meter, OTHER)


def test_a_unit_that_is_not_staged_keeps_the_others_from_settling(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    meter.stage(OTHER, values(sizes))
    with pytest.raises(ValueError, match="not staged"):
        meter.settle({OTHER: True, UNIT: True})
    assert not has_reference(meter, OTHER)
    meter.settle({OTHER: True})
    assert has_reference(meter, OTHER)


def test_an_error_at_one_unit_leaves_none_staged(
    meter: SketchMeter, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    for unit in (UNIT, OTHER):
        meter.stage(unit, values(sizes))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(meter, "_reference_of", fail)
        meter.settle({UNIT: True, OTHER: True})
    for unit in (UNIT, OTHER):
        commit(meter, values(sizes), unit)
        assert has_reference(meter, unit)


def test_measuring_between_stage_and_settle_disturbs_nothing(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    pieces = values(sizes)
    meter.measure(UNIT, pieces)
    saved = copies(pieces)
    meter.stage(UNIT, copies(saved))
    nudge(pieces, 1.0)
    meter.measure(UNIT, pieces)
    meter.settle({UNIT: True})
    assert moved(meter, saved) == 0.0
    assert moved(meter, pieces) == pytest.approx(distance(pieces, saved), rel=tolerance(sizes))


def test_the_state_may_move_on_before_it_is_staged(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    pieces = values(sizes)
    meter.measure(UNIT, pieces)
    nudge(pieces, 1e-3)
    commit(meter, pieces)
    assert moved(meter, pieces) == 0.0


def test_copies_may_fill_after_they_are_staged(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    pieces = values(sizes)
    for measured in (True, False):
        if measured:
            meter.measure(UNIT, pieces)
        staged = [torch.full_like(piece, 1e30) for piece in pieces]
        meter.stage(UNIT, staged)
        for copy, piece in zip(staged, pieces, strict=True):
            copy.copy_(piece)
        meter.settle({UNIT: True})
        assert moved(meter, pieces) == 0.0
        nudge(pieces, 1.0)


def test_the_thread_of_a_save_and_the_training_thread_keep_apart(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    pieces, saved = values(sizes), values(sizes)
    with ThreadPoolExecutor(1) as saver:
        saver.submit(meter.measure, UNIT, saved).result()
        pieces[0][5] += 1.0  # no value of a sample
        meter.measure(UNIT, pieces)
        saver.submit(meter.stage, UNIT, saved).result()
        meter.settle({UNIT: True})
    assert moved(meter, saved) == 0.0
    assert moved(meter, pieces) == pytest.approx(1.0, rel=1e-5)


def test_two_threads_measure_what_one_measures(meter: DriftMeter) -> None:
    units = [Unit(f"layers.{i}", "fp32") for i in range(8)]
    state = {unit: values((60_000, 1000), seed) for seed, unit in enumerate(units)}
    for unit in units:
        meter.reset(unit, values((60_000, 1000), seed=77))
    alone = [meter.measure(unit, state[unit]) for unit in units]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(10):
            again = threads.map(lambda unit: meter.measure(unit, state[unit]), units)
            assert list(again) == alone


def test_a_measurement_serves_one_save_only(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    pieces = values(sizes)
    meter.measure(UNIT, pieces)
    commit(meter, pieces)
    nudge(pieces, 1e-3)
    commit(meter, pieces)
    assert moved(meter, pieces) == 0.0


def test_copies_are_free_once_they_are_settled(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    pieces = values(sizes)
    for committed in (True, True, False, True, False, False, True):
        nudge(pieces, 0.1)
        staged = copies(pieces)
        meter.stage(UNIT, staged)
        meter.settle({UNIT: committed})
        for tensor in staged:
            tensor.fill_(7.0)
    assert moved(meter, pieces) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_bad_value_hides(meter: SketchMeter, sizes: tuple[int, ...], bad: float, dtype: torch.dtype) -> None:
    pieces = values(sizes, dtype=dtype)
    meter.reset(UNIT, pieces)
    for piece in pieces:
        for place in {0, len(piece) // 3, len(piece) - 1} if len(piece) else ():
            kept = piece[place].clone()
            piece[place] = bad
            measure = meter.measure(UNIT, pieces)
            assert not measure.finite
            assert measure.moved_sq == math.inf
            assert math.isfinite(measure.reference_sq)
            piece[place] = kept
    assert meter.measure(UNIT, pieces).finite


def test_two_opposite_infinities_are_seen(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    pieces = values(sizes)
    pieces[0][::2], pieces[0][1::2] = math.inf, -math.inf
    assert not meter.measure(UNIT, pieces).finite


def test_huge_values_are_finite(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    pieces = [piece.abs().add_(1).mul_(4e37) for piece in values(sizes)]
    meter.reset(UNIT, pieces)
    measure = meter.measure(UNIT, pieces)
    assert measure.finite
    assert not math.isnan(drift_ratio(measure.moved_sq, measure.reference_sq))


def test_memory_is_what_the_references_take(meter: SketchMeter, sizes: tuple[int, ...]) -> None:
    assert signature_bytes(meter) == 0
    meter.reset(UNIT, values(sizes))
    elements = min(sum(sizes), 4099)
    assert signature_bytes(meter) == 4 * elements
    meter.measure(UNIT, values(sizes, seed=1))
    commit(meter, values(sizes, seed=1))
    assert signature_bytes(meter) == 4 * elements


Misuse = Callable[[DriftMeter, list[torch.Tensor]], object]


@pytest.mark.parametrize(
    ("misuse", "said"),
    [
        (lambda meter, pieces: meter.settle({UNIT: True}), "not staged"),
        (lambda meter, pieces: (meter.stage(UNIT, pieces), meter.stage(UNIT, pieces)), "already staged"),
        (lambda meter, pieces: (meter.reset(UNIT, pieces), meter.measure(UNIT, pieces[:1])), "reset the unit"),
    ],
)
def test_misuse_is_told(meter: SketchMeter, sizes: tuple[int, ...], misuse: Misuse, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        misuse(meter, values(sizes))
    assert str(UNIT) in str(caught.value)


def test_a_sketch_that_is_too_narrow_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 64"):
        SketchMeter(8, 0)
