"""Under ``every: auto`` ranks that take their steps at different speeds decide at the same steps, with the same
interval: while a save is under way, after a ``save()`` by hand, under accumulation, and after an interruption.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 19
"""In each of two phases; the schedule of these jobs ends after 40."""
OFTEN = {"auto": {"gpu_hours_per_interruption": 1e-4}}
"""As often as saves allow."""
DDP = [
    {"name": "ddp", "kind": "ddp", "settings": OFTEN},
    {
        "name": "ddp-bounded", "kind": "ddp",
        "settings": {"policy": {"name": "threshold", "threshold": 1e9}, "bounds": {"max_staleness": 5}},
    },
    {"name": "ddp-lazy", "kind": "ddp", "settings": {**OFTEN, "staging": "lazy"}},
]  # fmt: skip
ZERO = [{"name": "zero1", "kind": "zero", "stage": 1, "precision": "bf16", "settings": OFTEN}]
CASES = [case["name"] for case in [*DDP, *ZERO]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Each launch is killed at the end of its last job, and torchrun starts it again."""
    pytest.importorskip("deepspeed")
    done = [
        torchrun("adaptive_interval.py", 2, {"cases": cases, "steps": STEPS, "zero": zero}, directory, restarts=1)
        for cases, zero, directory in (
            (DDP, False, tmp_path_factory.mktemp("ddp")),
            (ZERO, True, tmp_path_factory.mktemp("zero")),
        )
    ]
    assert [one.code for one in done] == [0, 0], "\n".join(one.output[-4000:] for one in done)
    return Launched(0, "", [record for one in done for record in one.records])


def told(launched: Launched, kind: str, **wanted: Any) -> list[dict[str, Any]]:
    """Records without the rank that made them."""
    return [{key: value for key, value in one.items() if key != "rank"} for one in launched.of(kind, **wanted)]


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_decide_at_the_same_steps(launched: Launched, case: str, phase: int) -> None:
    for kind in ("decided", "asked"):
        seen = [told(launched, kind, case=case, phase=phase, rank=rank) for rank in (0, 1)]
        assert seen[0] == seen[1] and seen[0]
    made = [one for one in seen[0] if one["skipped"] is None]
    assert made


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_decisions_come_where_they_were_announced(launched: Launched, case: str, phase: int) -> None:
    found = [
        *told(launched, "decided", case=case, phase=phase, rank=0),
        *told(launched, "asked", case=case, phase=phase, rank=0),
    ]
    found.sort(key=lambda one: one["step"])
    asked = launched.one("asked", case=case, phase=phase, rank=0)
    assert asked["skipped"] is None
    for earlier, later in pairwise(found):
        if earlier["interval"] is not None and later["step"] != asked["step"]:
            assert later["step"] - earlier["step"] in (0, earlier["interval"])


@pytest.mark.parametrize("case", CASES)
def test_it_resumes_where_the_last_save_was_and_counts_the_interruption(launched: Launched, case: str) -> None:
    before = [*launched.of("decided", case=case, phase=0, rank=0), *launched.of("asked", case=case, phase=0, rank=0)]
    committed = {one["step"] for one in before if one["skipped"] is None}
    resumed = [launched.one("resumed", case=case, phase=1, rank=rank) for rank in (0, 1)]
    assert resumed[0]["step"] == resumed[1]["step"] in committed
    killed = case in ("ddp-lazy", "zero1")  # the last job of each launch; the others were closed
    assert resumed[0]["interruptions"] == killed
    first = launched.of("decided", case=case, phase=1, rank=0)[0]
    assert first["step"] - resumed[0]["step"] == (1 if case == "ddp-bounded" else 3)


@pytest.mark.parametrize("phase", [0, 1])
def test_max_staleness_is_the_most_between_decisions(launched: Launched, phase: int) -> None:
    intervals = [one["interval"] for one in launched.of("decided", case="ddp-bounded", phase=phase, rank=0)]
    assert all(interval is None or interval <= 5 for interval in intervals)
