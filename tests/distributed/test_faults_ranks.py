"""Troubles that ranks meet together: silent, failing, fenced, sick and disagreeing ones. Training goes on through
all of them, on every rank alike; every commit that was made stays; nothing passes without a word.

The scenarios are those of ``workers/faults_ranks.py``, in one launch on two ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.core]

RANKS = (0, 1)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    done = torchrun("faults_ranks.py", 2, {}, tmp_path_factory.mktemp("faults"), timeout=600)
    assert done.code == 0, done.output[-6000:]
    return done


def skipped(launched: Launched, scenario: str, rank: int) -> list[Any]:
    """Why each step saved nothing, None where it did."""
    return [one["skipped"] for one in launched.of("step", scenario=scenario, rank=rank)]


def commits(launched: Launched, scenario: str) -> list[int]:
    """Steps of the commits that stand at the end; both ranks must see the same."""
    seen = [launched.one("end", scenario=scenario, rank=rank)["commits"] for rank in RANKS]
    assert seen[0] == seen[1]
    return [int(name.split("-")[0]) for name in seen[0]]


def failures(launched: Launched, scenario: str) -> dict[str, float]:
    """The metric, on rank 0."""
    found: dict[str, float] = launched.one("end", scenario=scenario, rank=0)["failures"]
    return found


@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_that_never_writes(launched: Launched, rank: int) -> None:
    assert skipped(launched, "silent_rank", rank) == [None, None, "busy", "busy", None]
    assert commits(launched, "silent_rank") == [1, 5]
    assert failures(launched, "silent_rank") == {"SaveError": 1}
    assert "ranks [1]" in launched.output


@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_whose_storage_hangs_between_two_waves_of_copies(launched: Launched, rank: int) -> None:
    assert skipped(launched, "stuck_in_a_wave", rank) == [None, None, "busy", "busy", None]
    assert commits(launched, "stuck_in_a_wave") == [1, 5]
    assert failures(launched, "stuck_in_a_wave") == {"SaveError": 1}
    assert "this save is given up, and training continues" in launched.output


@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_that_cannot_write(launched: Launched, rank: int) -> None:
    assert skipped(launched, "failing_rank", rank) == [None, None, "busy", None, None]
    assert commits(launched, "failing_rank") == [1, 4, 5]
    assert failures(launched, "failing_rank") == {"SaveError": 1}
    assert "was given up: a rank could not write its segment" in launched.output


@pytest.mark.parametrize("rank", RANKS)
def test_ranks_with_other_paths(launched: Launched, rank: int) -> None:
    nothing, other = launched.of("refused", scenario="other_path", rank=rank)
    assert nothing["error"] == other["error"] == "StorageError"
    assert "does not see rank 0's store" in nothing["text"]
    assert "sees another store" in other["text"]
    assert "the same directory for all ranks" in nothing["text"]
    assert commits(launched, "other_path") == [1]


@pytest.mark.parametrize("rank", RANKS)
def test_the_older_of_two_jobs_is_fenced(launched: Launched, rank: int) -> None:
    assert skipped(launched, "fenced", rank) == [None, None, "fenced", "fenced", "fenced"]
    assert commits(launched, "fenced") == [1]
    assert failures(launched, "fenced") == {"FencedError": 1}
    assert "another job has taken over the store" in launched.output


@pytest.mark.parametrize("rank", RANKS)
def test_a_fenced_job_cannot_save_a_step_again(launched: Launched, rank: int) -> None:
    assert launched.one("saved", scenario="fenced_in_the_same_step", rank=rank)["skipped"] == "fenced"
    assert skipped(launched, "fenced_in_the_same_step", rank) == [None, "fenced"]
    assert commits(launched, "fenced_in_the_same_step") == [1]


@pytest.mark.parametrize("rank", RANKS)
def test_a_replica_gone_bad_replaces_nothing_good(launched: Launched, rank: int) -> None:
    resumed = launched.one("resumed", scenario="sick_replica", rank=rank)
    assert (resumed["step"], resumed["wrong"], resumed["exact"]) == (2, [], False)
    assert commits(launched, "sick_replica") == [1, 2]


@pytest.mark.parametrize("rank", RANKS)
def test_a_flipped_byte_makes_one_unit_fall_back_on_all_ranks(launched: Launched, rank: int) -> None:
    resumed = launched.one("resumed", scenario="flipped_byte", rank=rank)
    assert (resumed["step"], resumed["wrong"], resumed["exact"]) == (2, [], False)
    assert resumed["fallbacks"] == ["blocks.2/exp_avg_sq@1"]
    assert any("does not match its hashes" in problem for problem in resumed["problems"])
    assert resumed["metric"] == (1 if rank == 0 else 0)
    assert skipped(launched, "flipped_byte", rank) == [None, None, None]


@pytest.mark.parametrize("rank", RANKS)
def test_state_that_one_rank_cannot_store(launched: Launched, rank: int) -> None:
    assert launched.one("refused", scenario="unstorable", rank=rank)["error"] == "UnsupportedError"
    assert skipped(launched, "unstorable", rank) == [None, None, "busy"]
    assert commits(launched, "unstorable") == [1]
    assert failures(launched, "unstorable") == {"SaveError": 1}


@pytest.mark.parametrize("rank", RANKS)
def test_no_memory_for_the_staging_buffers_of_one_rank(launched: Launched, rank: int) -> None:
    refused = launched.one("refused", scenario="no_memory_at_the_start", rank=rank)
    assert refused["error"] == "SaveError" and "none left" in refused["text"]
    assert commits(launched, "no_memory_at_the_start") == [1]


@pytest.mark.parametrize("rank", RANKS)
def test_no_memory_for_the_copies_of_one_rank(launched: Launched, rank: int) -> None:
    assert skipped(launched, "no_memory_for_a_copy", rank) == [None, None, "busy", None, None]
    assert commits(launched, "no_memory_for_a_copy") == [1, 4, 5]
    assert failures(launched, "no_memory_for_a_copy") == {"SaveError": 1}


@pytest.mark.parametrize("rank", RANKS)
def test_ranks_at_different_steps(launched: Launched, rank: int) -> None:
    assert skipped(launched, "other_step", rank) == [None, "disagree", "disagree", None]
    assert commits(launched, "other_step") == [1, 4]


@pytest.mark.parametrize("rank", RANKS)
def test_the_store_of_another_model(launched: Launched, rank: int) -> None:
    refused = launched.one("refused", scenario="other_model", rank=rank)
    assert refused["error"] == "ModelMismatchError"
    assert launched.one("resumed", scenario="other_model", rank=rank)["step"] == 1


@pytest.mark.parametrize("rank", RANKS)
def test_what_is_stored_stood_still(launched: Launched, rank: int) -> None:
    stored = launched.one("stored", scenario="moving_while_written", rank=rank)
    assert stored["equal"] and stored["count"] > 5


@pytest.mark.parametrize("rank", RANKS)
def test_ranks_that_do_not_find_the_same_versions_resume_none(launched: Launched, rank: int) -> None:
    refused = launched.one("refused", scenario="other_view", rank=rank)
    assert refused["error"] == "StorageError" and "rank 1 and rank 0 resolved different versions" in refused["text"]
    assert launched.one("unchanged", scenario="other_view", rank=rank)["same"]
    assert launched.one("resumed", scenario="other_view", rank=rank)["step"] == 3


def test_the_last_step_is_committed_by_ranks_that_end_well(launched: Launched) -> None:
    assert commits(launched, "last_step") == [2, 3]


def test_a_rank_that_closes_alone_saves_nothing_and_is_not_held(launched: Launched) -> None:
    for rank in RANKS:
        found = launched.one("alone", scenario="last_step", rank=rank)["commits"]
        assert [int(name.split("-")[0]) for name in found] == [2, 3, 4]
    assert "the last step 5 is not saved: not all ranks closed" in launched.output


def test_ranks_that_do_not_call_step_are_told_of(launched: Launched) -> None:
    assert skipped(launched, "called_on_rank_0", 0) == ["unreachable"]
    lines = [line for line in launched.output.splitlines() if "ckpt.step()" in line]
    assert sum("rank 0 waits in ckpt.step() for other ranks" in line for line in lines) == 1
    assert sum("rank 1 took 2 optimizer steps without ckpt.step()" in line for line in lines) == 1
