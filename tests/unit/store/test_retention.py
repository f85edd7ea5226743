from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import ConfigError
from store.names import SaveId
from store.retention import Retention, select_retained

SAVES = st.sets(st.builds(SaveId, st.integers(0, 5000), st.integers(1, 3)), max_size=60)
RETENTIONS = st.builds(Retention, st.integers(1, 6), st.none() | st.integers(1, 500), st.booleans())


@given(SAVES, st.sets(st.builds(SaveId, st.integers(0, 5000), st.integers(1, 3)), max_size=5), RETENTIONS, st.data())
def test_what_is_never_dropped(
    saves: set[SaveId], elsewhere: set[SaveId], retention: Retention, data: st.DataObject
) -> None:
    proven = elsewhere | data.draw(st.sets(st.sampled_from(sorted(saves))) if saves else st.just(set()))
    keep = select_retained(saves, proven, retention)
    newest_first = sorted(saves, reverse=True)
    assert keep <= saves
    assert set(newest_first[: retention.keep_last]) <= keep
    assert set(sorted(proven & saves)[-1:]) <= keep
    assert bool(keep) == bool(saves)


@given(SAVES, RETENTIONS)
def test_it_settles(saves: set[SaveId], retention: Retention) -> None:
    """Pruning twice drops nothing more, so an interrupted prune that is run again ends where it would have."""
    once = select_retained(saves, set(), retention)
    assert select_retained(once, set(), retention) == once


@given(SAVES, RETENTIONS, st.data())
def test_an_interrupted_prune_drops_nothing_more(saves: set[SaveId], retention: Retention, data: st.DataObject) -> None:
    keep = select_retained(saves, set(), retention)
    gone = data.draw(st.sets(st.sampled_from(sorted(saves - keep))) if saves - keep else st.just(set()))
    assert select_retained(saves - gone, set(), retention) == keep


@given(SAVES, st.integers(1, 500))
def test_one_in_each_stretch_of_steps(saves: set[SaveId], every: int) -> None:
    keep = select_retained(saves, set(), Retention(1, every, log_spaced=False))
    assert {save.step // every for save in keep} == {save.step // every for save in saves}


@pytest.mark.parametrize("interval", [1, 10, 7])
def test_log_spaced_covers_every_age_with_few_commits(interval: int) -> None:
    """Silent corruption is found late: for any age a there is a commit aged a to 8 a, at any time in a long run."""
    saves: set[SaveId] = set()
    for step in range(interval, 3000 * interval, interval):
        saves.add(SaveId(step, 1))
        saves = select_retained(saves, set(), Retention(keep_last=2))
        ages = sorted(step - save.step for save in saves)
        assert len(saves) <= 2 + (step).bit_length() + 1
        for age in range(2 * interval, step - interval, max(interval, step // 50)):
            older = [a for a in ages if a >= age]
            assert older, (step, age)
            assert older[0] <= 8 * age, (step, age, ages)


def test_steps_that_went_back_do_not_confuse_it() -> None:
    """After a rollback the newest commit has a smaller step than older ones."""
    saves = {SaveId(1000, 1), SaveId(1010, 1), SaveId(500, 2)}
    assert SaveId(500, 2) in select_retained(saves, set(), Retention(keep_last=1, log_spaced=False))


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_last": -1}, {"keep_every": 0}, {"keep_every": -5}])
def test_senseless_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Retention(**wrong)  # type: ignore[arg-type]
