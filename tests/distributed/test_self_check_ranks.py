"""One rank has state that no save can hold: the job ends on all. Or state that is not saved: every commit says so."""

from __future__ import annotations

import pytest

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
    assert launched.output.count("self-check: not all of the state comes back") == 1
