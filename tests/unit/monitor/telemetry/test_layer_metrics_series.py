"""Which units have series of their own: enough of them, spread, and the same ones tomorrow."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from monitor.telemetry.layer_metrics import SeriesSelector
from store.names import Unit

SLOTS = ("fp32", "exp_avg", "exp_avg_sq")


def units(layers: int) -> list[Unit]:
    return [Unit(f"blocks.{i}", slot) for i in range(layers) for slot in SLOTS]


def shown(one: SeriesSelector, of: list[Unit]) -> list[Unit]:
    return [unit for unit in of if unit in one]


def test_all_are_shown_where_there_is_room() -> None:
    one, all_ = SeriesSelector(512), units(129)
    assert one.set_units(all_) == set()
    assert shown(one, all_) == all_ and one.hidden == 0


def test_of_many_whole_layers_from_first_to_last_are() -> None:
    one, all_ = SeriesSelector(512), units(10_000)
    one.set_units(all_)
    found = shown(one, all_)
    assert 440 <= len(found) <= 448, "seven eighths of the places"
    assert one.hidden == len(all_) - len(found)
    layers = sorted({int(unit.layer.split(".")[1]) for unit in found})
    assert layers[0] == 0 and layers[-1] == 9999
    gaps = [b - a for a, b in pairwise(layers)]
    assert max(gaps) - min(gaps) <= 1
    assert len(found) == 3 * len(layers)


def test_what_stands_out_gets_a_place_and_keeps_it() -> None:
    one, all_ = SeriesSelector(64), units(1000)
    one.set_units(all_)
    before = set(shown(one, all_))
    for unit in all_[1:400]:
        one.add(unit)
    after = shown(one, all_)
    assert before < set(after) and len(after) == 64
    one.set_units(all_)
    assert shown(one, all_) == after
    one.add(Unit("a stranger", "fp32"))
    assert Unit("a stranger", "fp32") not in one


def test_units_that_come_and_go() -> None:
    one = SeriesSelector(30)
    one.set_units(units(100))
    old = shown(one, units(100))
    gone = one.set_units(units(50))
    assert gone == {unit for unit in old if unit not in set(units(50))}
    assert set(shown(one, units(100))) >= {unit for unit in old if unit in set(units(50))}


@given(st.integers(1, 600), st.lists(st.integers(0, 300), min_size=1, max_size=5), st.integers(0, 50))
def test_there_are_never_more_than_allowed(most: int, sizes: list[int], out: int) -> None:
    one = SeriesSelector(most)
    for size in sizes:
        all_ = units(size)
        one.set_units(all_)
        for unit in all_[:out]:
            one.add(unit)
        count = len(shown(one, all_))
        assert count <= most and one.hidden == len(all_) - count
