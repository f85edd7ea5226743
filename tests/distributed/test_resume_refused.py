"""A resume that is refused changes nothing on any rank, and is refused on all of them, at every ZeRO stage.

What stands in the way: param groups that were saved apart, another optimizer, an object of the user's that raises on
one rank only, one rank with more objects, a scheduler that does so. The job has taken no step yet, or gone another way.
"""

from __future__ import annotations

import pytest

from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.core]

STAGES, TRAINED, RANKS = (1, 2, 3), (0, 3), (0, 1)
ERRORS = {
    "groups": ("ModelMismatchError", "joins", "joins"),
    "optimizer": ("ModelMismatchError", "optimizer AdamW, this job has SGD", "optimizer AdamW, this job has SGD"),
    "objects": ("ModelMismatchError", "rank 1: the store holds the state of 1 objects", "state=[...] has 2"),
    "object": ("UsageError", "rank 1: state[0] (a Counter)", "state[0] (a Counter) cannot load"),
    "scheduler": ("UsageError", "rank 1: the engine's lr_scheduler", "the engine's lr_scheduler (a Refusing) cannot"),
}
"""Class, and words on rank 0 and on rank 1."""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    pytest.importorskip("deepspeed")
    done = torchrun("resume_refused.py", 2, {}, tmp_path_factory.mktemp("refused"))
    assert done.code == 0, done.output[-6000:]
    return done


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.parametrize("stage", STAGES)
def test_refused_on_all_ranks_and_nothing_changed(
    launched: Launched, stage: int, case: str, trained: int, rank: int
) -> None:
    found = launched.one("refused", stage=stage, case=case, trained=trained, rank=rank)
    error, *words = ERRORS[case]
    assert found["error"] == error
    assert words[rank] in found["text"]
    assert found["changed"] == []


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_once_it_is_mended_the_same_process_resumes(launched: Launched, stage: int, rank: int) -> None:
    for found in launched.of("again", stage=stage, rank=rank):
        assert (found["step"], found["count"], found["differing"]) == (2, 0, [])
    assert len(launched.of("again", stage=stage, rank=rank)) == len(TRAINED)
