"""State that each rank has alone comes back on each rank: buffers that are not synchronized, extra state of modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch import Launched, alone, torchrun
from tests.support.mounts import shared_memory

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.core]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rank-state")


@pytest.fixture(scope="module")
def launched(folder: Path) -> Iterator[Launched]:
    with shared_memory() as shared:
        done = torchrun("rank_state.py", 2, {"memory": str(shared)}, folder)
        assert done.code == 0, done.output[-6000:]
        yield done


@pytest.mark.parametrize(("scenario", "memory"), [("local", False), ("memory", True), ("rollouts", False)])
def test_each_rank_gets_its_own_values_back(launched: Launched, scenario: str, memory: bool) -> None:
    saved = [launched.one("saved", scenario=scenario, rank=rank)["state"] for rank in (0, 1)]
    assert saved[0]["norm.running_mean"] != saved[1]["norm.running_mean"]
    for rank in (0, 1):
        found = launched.one("resumed", scenario=scenario, rank=rank)
        assert (found["step"], found["exact"], found["memory"]) == (4, True, memory)
        assert found["state"] == saved[rank]


def test_buffers_that_every_forward_broadcasts_are_those_of_rank_0(launched: Launched) -> None:
    saved = launched.one("saved", scenario="broadcast", rank=0)["state"]
    for rank in (0, 1):
        found = launched.one("resumed", scenario="broadcast", rank=rank)
        assert found["exact"] and found["state"]["norm.running_mean"] == saved["norm.running_mean"]


def test_a_broadcast_that_was_to_be_left_out_is_left_out_after_a_resume(launched: Launched) -> None:
    for rank in (0, 1):
        ours, again = (launched.one(kind, scenario="rollouts", rank=rank) for kind in ("trained", "trained again"))
        assert (again["state"], again["weights"]) == (ours["state"], ours["weights"])


def test_wrong_types_on_one_rank_pass_the_commit_over_on_all(launched: Launched) -> None:
    assert [launched.one("resumed", scenario="wrong on rank 1", rank=rank)["step"] for rank in (0, 1)] == [2, 2]


def test_on_another_number_of_ranks_the_word_exact_is_taken_away(launched: Launched, folder: Path) -> None:
    done = alone("rank_state.py", {"alone": str(folder / "local")}, folder)
    assert done.code == 0, done.output[-6000:]
    found = done.one("resumed", scenario="alone")
    assert (found["step"], found["exact"]) == (4, False)
    assert found["state"] == launched.one("saved", scenario="local", rank=0)["state"]
