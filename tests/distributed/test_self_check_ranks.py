"""One rank has state that no save can hold: the job ends on all. Or state that is not saved, or that is not the other
rank's where both train one model: every commit says so."""

from __future__ import annotations

import pytest

from monitor.ledger import UNLIKE
from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.core]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    done = torchrun("self_check_ranks.py", 2, {}, tmp_path_factory.mktemp("self-check"), timeout=300)
    assert done.code == 0, done.output[-6000:]
    return done


@pytest.mark.parametrize("rank", [0, 1])
def test_refused_on_all_ranks(launched: Launched, rank: int) -> None:
    found = launched.one("refused", scenario="subclass_on_one_rank", rank=rank)
    assert found["error"] == "UnstorableError"
    assert ("rank 1: " if rank == 0 else "") + "AdamW keeps 'exp_avg' of head.weight" in found["text"]
    assert launched.one("end", scenario="subclass_on_one_rank", rank=rank)["commits"] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_difference_of_one_rank_is_in_every_commit(launched: Launched, rank: int) -> None:
    for manifest in launched.of("manifest", scenario="left_over_on_one_rank", rank=rank):
        (text,) = manifest["differs"]
        assert text.startswith("optimizer.state_dict()['average'] is torch.Tensor")
    assert len(launched.of("manifest", scenario="left_over_on_one_rank", rank=rank)) == 2
    resumed = launched.one("resumed", scenario="left_over_on_one_rank", rank=rank)
    assert not resumed["exact"] and any("average" in problem for problem in resumed["problems"])
    told = [line for line in launched.output.splitlines() if "self-check: not all of the state comes back" in line]
    assert len([line for line in told if "average" in line]) == 1


WEIGHTS = "0.weight/fp32, 0.bias/fp32, 1.weight/fp32 and 1 more"
EVERYTHING = "0.weight/fp32, 0.weight/exp_avg, 0.weight/exp_avg_sq and 9 more"
LAYER = "0.weight/fp32, 0.weight/exp_avg, 0.weight/exp_avg_sq and 3 more"


@pytest.mark.parametrize(
    ("scenario", "unequal"),
    [
        ("synchronized", {1: None, 2: None}),
        ("unfrozen", {1: LAYER, 2: LAYER}),
        ("unfrozen_later", {1: None, 2: LAYER, 3: LAYER}),
        ("other_moments", {1: "1.weight/exp_avg_sq"}),
        ("other_rates", {1: None, 2: None, 3: UNLIKE, 4: UNLIKE}),
        ("other_rate_of_one_step", {1: None, 2: WEIGHTS, 3: WEIGHTS}),
        ("other_rate_of_the_next_step", {1: UNLIKE, 2: None}),
        ("other_decay", {1: UNLIKE, 2: WEIGHTS}),
        ("averaged", {3: None, 6: None}),
        ("averaged_later", {2: None, 4: EVERYTHING, 6: EVERYTHING}),
        ("averaged_by_a_hook", {1: None, 2: EVERYTHING}),
        ("past_the_wrapper", {1: None, 2: EVERYTHING}),
        ("gone_back", {1: None, 2: None}),
        ("skipped_in_turn", {3: None, 6: EVERYTHING}),
    ],
)
def test_ranks_that_train_one_model_are_alike_or_no_commit_is_exact(
    launched: Launched, scenario: str, unequal: dict[int, str | None]
) -> None:
    differs = {one["step"]: one["differs"] for one in launched.of("manifest", scenario=scenario, rank=0)}
    assert differs.keys() == unequal.keys()
    for step, names in unequal.items():
        assert len(differs[step]) == (names is not None)
        assert all(text == names or text.startswith(f"the ranks differ in {names}: ") for text in differs[step])
    for rank in (0, 1):
        found = launched.one("resumed", scenario=scenario, rank=rank)
        assert found["exact"] is (unequal[max(unequal)] is None)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("scenario", ["in_memory", "in_the_journal"])
def test_a_resume_ends_where_the_ranks_came_apart(launched: Launched, scenario: str, rank: int) -> None:
    """Whatever hyperparameter it was, seen by no decision."""
    found = launched.of("back", scenario=scenario, rank=rank)
    assert {one["name"] for one in found} == {"lr", "weight_decay", "betas"}
    for back in found:
        assert (back["step"], back["exact"], back["alike"]) == (4, True, True), back


@pytest.mark.parametrize("rank", [0, 1])
def test_hyperparameters_that_no_step_was_taken_with_cost_nothing(launched: Launched, rank: int) -> None:
    found = launched.of("back", scenario="alike_at_every_step", rank=rank)
    assert len(found) == 4
    for back in found:
        assert (back["step"], back["exact"], back["alike"]) == (10, True, True), back


@pytest.mark.parametrize("rank", [0, 1])
def test_a_forward_without_gradients_costs_nothing(launched: Launched, rank: int) -> None:
    found = launched.of("back", scenario="evaluated_before_each_step", rank=rank)
    assert [(back["step"], back["exact"], back["alike"]) for back in found] == [(7, True, True)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_resume_ends_where_local_sgd_averaged_last(launched: Launched, rank: int) -> None:
    """In memory that is step 6; the journal does not lead through steps that differ."""
    found = {back["name"]: back for back in launched.of("back", scenario="averaged_in_memory", rank=rank)}
    assert {name: (back["step"], back["exact"], back["alike"]) for name, back in found.items()} == {
        "True": (6, True, True), "False": (4, True, True),
    }  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_a_resume_made_alike_are_resumed_from_memory(launched: Launched, rank: int) -> None:
    back = launched.one("back", scenario="gone_back_in_memory", rank=rank)
    assert (back["step"], back["exact"], back["alike"]) == (5, True, True)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_are_known_to_be_apart_are_resumed_from_memory(launched: Launched, rank: int) -> None:
    back = launched.one("back", scenario="apart_in_memory", rank=rank)
    assert (back["step"], back["exact"]) == (7, False)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_are_never_compared_are_resumed_from_memory_and_never_exact(launched: Launched, rank: int) -> None:
    back = launched.one("back", scenario="not_compared", rank=rank)
    assert (back["step"], back["exact"]) == (11, False)
    assert launched.output.count("so commits are not exact from now on") == 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["the run state", "the samples"])
def test_what_a_comparison_found_stays_if_its_save_is_not_checked(launched: Launched, name: str, rank: int) -> None:
    back = launched.one("back", scenario="apart_and_not_checked", rank=rank, name=name)
    assert (back["step"], back["exact"]) == (11, False)


@pytest.mark.parametrize("rank", [0, 1])
def test_counts_of_steps_that_a_rank_left_out_beside_shards(launched: Launched, rank: int) -> None:
    lives = launched.of("life", scenario="skipped_beside_shards", rank=rank)
    assert [(one["resumed"], one["exact"]) for one in lives] == [(0, True), (6, True), (8, True)]
    assert [set(one["counts"]) for one in lives] == [{6 - rank}, {8 - rank}, {13 - rank}]
    undisturbed = launched.one("undisturbed", scenario="skipped_beside_shards", rank=rank)
    assert lives[-1]["weights"] == undisturbed["weights"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_version_in_memory_that_lacks_a_rank_s_optimizer_state_is_passed_over(launched: Launched, rank: int) -> None:
    back = launched.one("back", scenario="state_of_one_rank", rank=rank)
    assert (back["step"], back["exact"], back["alike"]) == (3, True, True)


def test_ranks_that_are_not_alike_are_told_once_a_job(launched: Launched) -> None:
    told = [line for line in launched.output.splitlines() if "self-check: not all of the state comes back" in line]
    assert len([line for line in told if "the ranks differ in" in line]) == 10
    assert len(told) == 10 + 1  # and the one above
    jobs = [job.count(f"{UNLIKE}: until") for job in launched.output.split("saving all of")]
    assert max(jobs) == 1 and sum(jobs) >= 8
