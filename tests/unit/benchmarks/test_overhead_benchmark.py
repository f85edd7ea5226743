"""The arithmetic behind the figures of overhead and of recovery."""

from __future__ import annotations

from collections import Counter
from math import inf
from pathlib import Path

import pytest

from benchmarks.blocks import cycle, rows_for
from benchmarks.intervals import estimate, paired
from benchmarks.overhead import figures as overhead_figures
from benchmarks.page_cache import cached_share, chill, warm
from benchmarks.recover import COLD, MEMORY, WARM
from benchmarks.recover import figures as recover_figures

ALWAYS, EXTRAS = ("off", "full"), ("a", "b", "c", "d")


def test_interval_is_students() -> None:
    found = estimate([1.0, 1.02, 1.04])
    assert found.mean == pytest.approx(1.02)
    assert found.around == pytest.approx(4.303 * 0.02 / 3**0.5)
    assert estimate([3.0]).around == inf


def test_what_a_pair_has_in_common_drops_out() -> None:
    slow = [1.0, 2.0, 5.0]
    found = paired([1.1 * one for one in slow], slow)
    assert found.mean == pytest.approx(1.1)
    assert found.around == pytest.approx(0.0, abs=1e-12)


def test_a_row_without_its_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired([1.0, 1.0], [1.0])


def test_every_cycle_has_the_main_rows_and_all_extras_come_equally_often() -> None:
    turns = [cycle(number, ALWAYS, EXTRAS, 2) for number in range(6)]
    assert all(set(ALWAYS) <= set(one) and len(one) == len(set(one)) == 4 for one in turns)
    counted = Counter(name for one in turns for name in one if name in EXTRAS)
    assert counted == dict.fromkeys(EXTRAS, 3)


def test_no_row_always_begins_nor_always_follows_the_same() -> None:
    turns = [cycle(number, ("off", "full", "memory"), (), 0) for number in range(6)]
    assert {one[0] for one in turns} == {"off", "full", "memory"}
    assert {one[one.index("full") - 1] for one in turns if one[0] != "full"} == {"off", "memory"}


def test_rows_that_a_long_step_needs() -> None:
    assert rows_for(1.0, (1, 0.4), (5, 0.8)) == 7
    assert rows_for(0.1, (1, 0.4), (5, 0.8)) == 1
    with pytest.raises(ValueError, match="no longer"):
        rows_for(1.0, (1, 0.4), (5, 0.3))


def test_steps_are_compared_with_the_same_cycle_without_saving() -> None:
    steps = {"off": {"0": 1.0, "1": 2.0, "2": 3.0}, "full": {"0": 1.01, "1": 2.02, "2": 3.03}, "compact": {"2": 3.3}}
    seen = {"steps": steps, "parameters": 1e6, "rows": 2, "bytes_a_rank": 2e6, "blocks": {}, "versions": {}}
    found = {figure.name: figure for figure in overhead_figures(seen, 10)}
    assert found["step, full save every 10 steps"].value == pytest.approx(1.01)
    assert found["step, full save every 10 steps"].holds
    assert found["step, full save every 10 steps, encoding compact"].value == pytest.approx(1.1)
    assert found["step, full save every 10 steps, encoding compact"].holds is None
    assert found["state a rank and second of step"].value == pytest.approx(1.0)


def test_recovery_without_a_cold_disk_has_no_goal_to_hold() -> None:
    told = {"resume": 1.0, "first_step": 5.0, "copy": 0.5, "bytes": 2e9}
    seen = {MEMORY: [told], WARM: [{**told, "resume": 2.0}]}
    assert all(figure.goal is None for figure in recover_figures(seen, None, [], 200))
    seen[COLD] = [{**told, "resume": 4.0}]
    goals = [figure for figure in recover_figures(seen, "drop_caches", [3.0], 200) if figure.goal is not None]
    assert [(figure.value, figure.holds) for figure in goals] == [(0.25, False)]


def test_what_is_in_the_page_cache_is_asked_of_the_kernel(tmp_path: Path) -> None:
    assert cached_share(tmp_path) == 0.0
    (tmp_path / "empty").touch()
    (tmp_path / "file").write_bytes(bytes(1 << 22))
    warm(tmp_path)
    assert cached_share(tmp_path) > 0.5
    if chill(tmp_path) is None:
        pytest.skip("this filesystem keeps its files in memory")
    assert cached_share(tmp_path) < 0.5
