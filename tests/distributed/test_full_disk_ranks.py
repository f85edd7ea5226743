"""A full disk under two ranks: all of them agree on what is skipped, and saves come about again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RANKS = (0, 1)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    done = torchrun("full_disk_ranks.py", 2, {}, tmp_path_factory.mktemp("full"), timeout=180)
    assert done.code == 0, done.output[-6000:]
    return done


def skipped(launched: Launched, scenario: str, rank: int) -> list[Any]:
    """Why each step saved nothing, None where it did."""
    return [one["skipped"] for one in launched.of("step", scenario=scenario, rank=rank)]


def commits(launched: Launched, scenario: str, rank: int) -> list[str]:
    """Commits that stand at the end."""
    return list(launched.of("end", scenario=scenario, rank=rank)[-1]["commits"])


@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_without_room_makes_rank_0_give_up_the_oldest_commit(launched: Launched, rank: int) -> None:
    assert skipped(launched, "rank_without_room", rank)[-1] is None
    found = commits(launched, "rank_without_room", rank)
    assert "00000001-000001" not in found
    assert found[-1] == "00000007-000001"
    assert "deleted the commits of steps 1, which `retention:` keeps otherwise" in launched.output


@pytest.mark.parametrize("rank", RANKS)
def test_all_ranks_start_without_room(launched: Launched, rank: int) -> None:
    resumed = launched.one("resumed", scenario="start_without_room", rank=rank)
    assert (resumed["step"], resumed["same"]) == (2, True)
    assert skipped(launched, "start_without_room", rank) == [None, None, "storage", "storage", None, None]
    assert launched.one("epochs", scenario="start_without_room", rank=rank)["names"] == ["000001.json"]
    assert commits(launched, "start_without_room", rank)[-1] == "00000006-000002"
    assert launched.output.count("the store has no room for the record of this start") == 1
