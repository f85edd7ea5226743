"""The effective step as a pure rule: bounds, invariances, and the order of saves to go on from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from store.catalog import open_catalog
from store.certificate import LayerAge, by_pace, certify, effective_step, run_saves
from store.names import SaveId
from store.resolve import Resolution, newest_resumable
from store.storage.local import LocalFiles
from tests.support.stores import FakeLayer, How, StoreBuilder

STEP = 1000

moved = st.none() | st.floats(0, 1e300, allow_subnormal=False) | st.floats(0, 10) | st.just(0.0)
aged = st.builds(LayerAge, st.integers(0, 1 << 50), st.integers(0, STEP), moved)
weights = st.lists(aged, max_size=12)


@given(weights)
def test_it_lies_between_the_oldest_weights_and_the_newest_step(found: list[LayerAge]) -> None:
    step = effective_step(STEP, found)
    assert min((STEP - one.staleness for one in found), default=STEP) <= step <= STEP


@given(st.lists(st.builds(LayerAge, st.integers(0, 1 << 50), st.just(0), moved), max_size=8))
def test_fresh_weights_are_at_the_newest_step_itself(found: list[LayerAge]) -> None:
    assert effective_step(STEP, found) == STEP


@given(st.lists(aged, max_size=6).flatmap(lambda found: st.tuples(st.just(found), st.permutations(found))))
def test_the_order_of_layers_does_not_matter(pair: tuple[list[LayerAge], Sequence[LayerAge]]) -> None:
    assert effective_step(STEP, pair[0]) == effective_step(STEP, pair[1])


@given(weights, st.sampled_from([2, 3, 1024]), st.sampled_from([0.5, 3.0, 2.0**40]))
def test_neither_the_size_of_the_model_nor_the_unit_of_drift_matters(
    found: list[LayerAge], larger: int, farther: float
) -> None:
    assume(all(one.moved is None or one.moved == 0 or 1e-290 < one.moved < 1e250 for one in found))
    scaled = [
        LayerAge(one.numel * larger, one.staleness, None if one.moved is None else one.moved * farther) for one in found
    ]
    assert effective_step(STEP, found) == pytest.approx(effective_step(STEP, scaled), abs=1e-6)


@given(weights)
def test_equally_stale_weights_are_where_they_are(found: list[LayerAge]) -> None:
    alike = [LayerAge(one.numel + 1, 7, None if one.moved is None else one.moved + 1) for one in found]
    assert effective_step(STEP, alike) == (STEP - 7 if found else STEP)


def test_a_layer_that_is_fresh_counts_with_the_pace_of_the_others() -> None:
    # Drift alone would give the fresh one no weight, and the step of the stale one.
    assert by_pace([LayerAge(100, 0, 0.0), LayerAge(100, 20, 0.02)]) == 10.0
    assert by_pace([LayerAge(300, 0, 0.0), LayerAge(100, 20, 0.02)]) == 5.0


def test_a_layer_that_moves_three_times_as_fast_counts_three_times() -> None:
    assert by_pace([LayerAge(100, 10, 0.03), LayerAge(100, 30, 0.03)]) == pytest.approx((3 * 10 + 1 * 30) / 4)
    # the fresh one at the mean pace, 2
    assert by_pace([LayerAge(100, 10, 0.03), LayerAge(100, 30, 0.03), LayerAge(100, 0, 0.0)]) == pytest.approx(60 / 6)


def test_a_stale_layer_that_stood_still_lost_nothing() -> None:
    assert by_pace([LayerAge(100, 0, 0.0), LayerAge(100, 50, 0.0)]) == 0.0
    assert by_pace([LayerAge(100, 10, 0.01), LayerAge(100, 50, 0.0)]) == 10.0
    # and one of which nobody knows is not taken to stand still
    assert by_pace([LayerAge(100, 0, 0.0), LayerAge(100, 50, 0.0), LayerAge(100, 40, None)]) == 20.0


def test_moments_and_buffers_have_no_say(tmp_path: Path) -> None:
    store = StoreBuilder(tmp_path, layers=(FakeLayer("a"), FakeLayer("b"), FakeLayer("still", frozen=True)))
    store.save(10)
    store.save(20, slots=("fp32",), drift=0.5)
    certificate = certify(resolved(tmp_path))
    assert certificate.effective_step == 20 and not certificate.exact
    assert certificate.as_json()["effective_step"] == 20.0


def resolved(path: Path) -> Resolution:
    return newest_resumable(open_catalog(LocalFiles(path)))[0]


def in_turn(path: Path) -> StoreBuilder:
    """Layers a to d of the same size, one saved at each of the steps 20 to 50: stale by 0, 10, 20 and 30."""
    store = StoreBuilder(path, layers=tuple(FakeLayer(name) for name in "abcd"))
    store.save(10)
    for step, layer in zip((20, 30, 40, 50), "dcba", strict=True):
        store.save(step, layers=(layer,), drift=0.01)
    return store


def test_saves_are_tried_from_the_nearest_one_and_no_further_than_the_commits_own(tmp_path: Path) -> None:
    in_turn(tmp_path)
    resolution = resolved(tmp_path)
    steps = [[save.step for save in run_saves(resolution, at)] for at in (50.0, 36.0, 35.0, 34.0, 21.0, 0.0)]
    # of two alike the older; the commit's own run state is the last
    assert steps == [[50], [40, 30, 50], [30, 40, 20, 50], [30, 40, 20, 50], [20, 30, 40, 50], [20, 30, 40, 50]]
    assert all(record == resolution.manifest.groups[save.name] for save, record in run_saves(resolution, 20).items())


def test_drift_by_staleness_makes_the_weight(tmp_path: Path) -> None:
    in_turn(tmp_path)
    certificate = certify(resolved(tmp_path))
    paces = [unit.drift / unit.staleness for unit in certificate.units if unit.slot == "fp32" and unit.staleness]  # type: ignore
    mean = math.fsum(paces) / 3
    stale = {unit.layer: unit.staleness for unit in certificate.units if unit.slot == "fp32"}
    assert stale == {"a": 0, "b": 10, "c": 20, "d": 30}
    wanted = math.fsum(pace * age for pace, age in zip(paces, (10, 20, 30), strict=True)) / (math.fsum(paces) + mean)
    assert certificate.effective_step == pytest.approx(50 - wanted)


def test_what_encoding_lost_is_no_pace(tmp_path: Path) -> None:
    store = StoreBuilder(tmp_path, layers=(FakeLayer("a", 256), FakeLayer("b", 256)))
    store.save(10, how={"fp32": How("bf16")})
    store.save(20, layers=("a",), how={"fp32": How("bf16")}, drift=1e-9)
    certificate = certify(resolved(tmp_path))
    stale = next(unit for unit in certificate.units if (unit.layer, unit.slot) == ("b", "fp32"))
    assert stale.error and stale.drift is not None and stale.drift < 2 * stale.error
    assert certificate.effective_step == 15.0  # as many elements, of a pace that nobody knows


def test_a_base_that_is_read_is_a_save_to_go_on_from(tmp_path: Path) -> None:
    store = StoreBuilder(tmp_path, layers=(FakeLayer("a", 4096), FakeLayer("b", 4096)))
    store.save(10, how={"fp32": How("bf16", level=1)})
    base = store.newest
    assert base is not None
    store.save(20)
    store.save(30, how={"fp32": How("bf16", level=1, base=base)})
    assert list(run_saves(resolved(tmp_path), 12.0)) == [base, SaveId(30, 1)]


def test_a_save_of_an_abandoned_branch_is_none_to_go_on_from(tmp_path: Path) -> None:
    """As stores hold it that older releases wrote: the job went back, and what it left was a base all the same."""
    store = StoreBuilder(tmp_path, layers=(FakeLayer("a", 4096), FakeLayer("b", 4096)))
    store.save(10)
    store.save(20, how={"fp32": How("bf16", level=1)})
    left = store.newest
    assert left is not None
    assert store.restart() == 2
    store.save(15, how={"fp32": How("bf16", level=1, base=left)})
    store.save(30, layers=("b",), how={"fp32": How("bf16", level=1, base=left)})
    resolution = resolved(tmp_path)
    assert left in {SaveId.parse(name) for one in resolution.versions.values() for name in one.bases}
    assert list(run_saves(resolution, 19.0)) == [SaveId(15, 2), SaveId(30, 2)]
