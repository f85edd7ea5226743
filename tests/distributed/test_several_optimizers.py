"""Several optimizers and several models of one job, on two ranks, go on bit for bit in other processes."""

from __future__ import annotations

import pytest

from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.core]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> list[Launched]:
    folder = tmp_path_factory.mktemp("several")
    done = [torchrun("several_optimizers.py", 2, {"resume": resume}, folder) for resume in (False, True)]
    assert all(one.code == 0 for one in done), done[-1].output[-6000:]
    return done


@pytest.mark.parametrize("scenario", ["ddp", "fsdp2", "named", "named fsdp2"])
def test_the_next_five_steps_are_equal(launched: list[Launched], scenario: str) -> None:
    for rank in (0, 1):
        first, resumed = (one.one("ran", scenario=scenario, rank=rank) for one in launched)
        assert (first["start"], resumed["start"]) == (0, 3)
        assert resumed["exact"]
        assert len(resumed["losses"]) == 5 and resumed["losses"] == first["losses"]
        assert resumed["end"] == first["end"]


def test_state_on_some_ranks_only_is_refused_on_all(launched: list[Launched]) -> None:
    for rank in (0, 1):
        assert "on some ranks only" in launched[0].one("divided", rank=rank)["error"]
