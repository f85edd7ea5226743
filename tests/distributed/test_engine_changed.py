"""Engines that change in mid-run, on every ZeRO stage, on all ranks or on one: training goes on, saving stops on all
of them with the reason, and goes on once the engine is what was attached again.
"""

from __future__ import annotations

import pytest

from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WORDS = {
    "another_group": "",
    "another_module_on_one_rank": "rank 1: adapter.weight",
    "a_module_in_place_of_one": "rank 0: ",
    "another_optimizer": "rank 0: the engine's optimizer was replaced",
    "another_optimizer_inside": "rank 0: ZeRO's inner optimizer was replaced",
}
CASES = [
    (stage, change) for stage in (0, 1, 2, 3) for change in WORDS
    if stage or change not in ("a_module_in_place_of_one", "another_optimizer_inside")
]  # fmt: skip


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    pytest.importorskip("deepspeed")
    done = torchrun("engine_changed.py", 2, {}, tmp_path_factory.mktemp("engines"))
    assert done.code == 0, done.output[-6000:]
    return done


@pytest.mark.parametrize("rank", (0, 1))
@pytest.mark.parametrize(("stage", "change"), CASES)
def test_training_goes_on_and_saving_stops_on_all_ranks(launched: Launched, stage: int, change: str, rank: int) -> None:
    steps = launched.of("step", stage=stage, change=change, rank=rank)
    assert [(one["step"], one["skipped"]) for one in steps] == [
        (1, None), (2, None), (3, "unsupported"), (4, "unsupported"), (5, None)
    ]  # fmt: skip
    assert all(WORDS[change] in one["problem"] for one in steps if one["skipped"])


def test_a_call_before_the_step_of_an_engine_is_noticed_and_no_other(launched: Launched) -> None:
    assert launched.output.count("ckpt.step() is called before the optimizer step") == 4  # by rank 0, of each stage
    assert "times for each optimizer step" not in launched.output


@pytest.mark.parametrize(("stage", "change"), CASES)
def test_what_was_saved_is_whole(launched: Launched, stage: int, change: str) -> None:
    for rank in (0, 1):
        end = launched.one("end", stage=stage, change=change, rank=rank)
        assert (end["commits"], end["resumed"], end["differing"]) == ([1, 2, 5], 5, [])
        assert end["counted"] == (2 if rank == 0 else 0)  # rank 0 tells
