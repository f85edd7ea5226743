"""Where a layer is left out, DeepSpeed steps with its gradient of an earlier step: no save of that is called exact."""

from __future__ import annotations

import pytest

from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.core]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> list[Launched]:
    folder = tmp_path_factory.mktemp("left out")
    done = [torchrun("layer_left_out.py", 2, {"resume": resume}, folder) for resume in (False, True)]
    assert all(one.code == 0 for one in done), done[-1].output[-6000:]
    return done


LEFT_OUT = ["zero3", "zero3-offload", "zero2-offload", "zero3-stateless", "zero3-unfrozen", "zero2-offload-frozen"]
LEFT_OUT += ["zero3-second-batch", "zero2-offload-second-batch"]
KEPT = ["zero2", "zero3-used", "zero1-offload-second-batch", "zero3-frozen", "zero3-decay"]


@pytest.mark.parametrize("scenario", LEFT_OUT)
def test_a_resume_is_not_called_exact_where_the_losses_differ(launched: list[Launched], scenario: str) -> None:
    for rank in (0, 1):
        first, resumed = (one.one("ran", scenario=scenario, rank=rank) for one in launched)
        assert resumed["losses"] != first["losses"] and not resumed["exact"]
        assert any("with the gradient of the last use of branch." in one for one in resumed["problems"])


@pytest.mark.parametrize("scenario", KEPT)
def test_a_resume_is_exact_where_no_gradient_is_used_again(launched: list[Launched], scenario: str) -> None:
    for rank in (0, 1):
        first, resumed = (one.one("ran", scenario=scenario, rank=rank) for one in launched)
        assert (resumed["start"], resumed["exact"]) == (4, True)
        assert resumed["losses"] == first["losses"] and len(first["losses"]) == 3
        assert launched[1].one("later", scenario=scenario, rank=rank)["differs"] == []


def test_the_first_step_that_leaves_a_layer_out_may_follow_a_resume(launched: list[Launched]) -> None:
    assert launched[1].one("ran", scenario="zero3-left-out-after", rank=0)["exact"]
    later = launched[1].one("later", scenario="zero3-left-out-after", rank=0)
    assert any("branch." in one for one in later["differs"])
    assert "the resume was not exact" in launched[1].output and "the resume was not exact" not in launched[0].output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replay_of_such_a_step_is_not_called_exact(launched: list[Launched], rank: int) -> None:
    """The commit that the journal continues is of a step before."""
    resumed = launched[1].one("ran", scenario="zero3-journal", rank=rank)
    assert (resumed["start"], resumed["exact"]) == (3, False)
    assert any("with the gradient of the last use of branch." in one for one in resumed["problems"])
