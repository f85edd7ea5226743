"""With the journal a job that was killed loses no step: it goes on from the very step before, as a state of one step to
the last bit, also where the commits are composites.

The jobs are those of test_resume_bitwise.py: dropout, a schedule, accumulation, clipping, two param groups, tied
weights, a frozen block, and an order of data from four random generators; killed by SIGKILL in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.test_resume_bitwise import KILL_AT, STEPS, losses, spec
from tests.support.launch import Launched, alone, once, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

JOURNAL = {"journal": {"enabled": True}}
PARITY = {"name": "parity", "k": 2}
THIRDS = {"name": "parity", "k": 3}
ZERO: list[dict[str, Any]] = [
    {"name": "zero1-bf16", "kind": "zero", "stage": 1, "precision": "bf16", "every": 3},
    {"name": "zero2-fp32", "kind": "zero", "stage": 2, "precision": "fp32", "every": 3},
    {"name": "zero3-bf16", "kind": "zero", "stage": 3, "precision": "bf16", "every": 3},
    {"name": "zero2-parity", "kind": "zero", "stage": 2, "precision": "bf16", "every": 2, "policy": PARITY},
    {"name": "zero3-parity", "kind": "zero", "stage": 3, "precision": "bf16", "every": 1, "policy": THIRDS},
]
TORCH: list[dict[str, Any]] = [
    {"name": "ddp-lazy", "kind": "ddp", "every": 3, "staging": "lazy"},
    {"name": "fsdp2-bf16", "kind": "fsdp2", "every": 3, "bf16": True, "staging": "lazy"},
    {"name": "ddp-parity", "kind": "ddp", "every": 2, "policy": PARITY},
    {"name": "fsdp2-parity", "kind": "fsdp2", "every": 2, "policy": THIRDS},
]
PLAIN: list[dict[str, Any]] = [
    {"name": "plain", "kind": "plain", "every": 3},
    {"name": "plain-parity", "kind": "plain", "every": 1, "policy": {"name": "parity", "k": 4}},
    {"name": "plain-memory", "kind": "plain", "every": 6, "settings": {"memory": {"enabled": True, "every": 3}}},
]
LAUNCHES = {"zero": ZERO, "torch": TORCH, "plain": PLAIN}
CASES = [
    pytest.param(case["name"], marks=[pytest.mark.core] if case["name"] in ("plain", "zero2-parity") else [])
    for cases in LAUNCHES.values()
    for case in cases
]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Launched]:
    pytest.importorskip("deepspeed")
    launch_of = {case["name"]: launch for launch, cases in LAUNCHES.items() for case in cases}

    @once
    def launch(name: str) -> Launched:
        directory = tmp_path_factory.mktemp(f"journal-{name}")
        memory = {"path": str(directory)}  # of the tier: a test leaves nothing in /dev/shm
        cases = [
            {
                **case,
                "settings": {
                    **JOURNAL,
                    **more,
                    **({"memory": {**more["memory"], **memory}} if "memory" in more else {}),
                },
            }
            for case in LAUNCHES[name]
            for more in [case.get("settings", {})]
        ]
        if name == "plain":
            done = [alone("resume_train.py", spec(cases, phase=phase), directory) for phase in (0, 1)]
        else:
            done = [torchrun("resume_train.py", 2, spec(cases), directory, restarts=1)]
        assert [one.code for one in done] == ([-9, 0] if name == "plain" else [0]), done[-1].output[-5000:]
        return Launched(0, "".join(one.output for one in done), [record for one in done for record in one.records])

    return lambda case: launch(launch_of[case])


@pytest.mark.parametrize("case", CASES)
def test_no_step_is_lost(launched: Callable[[str], Launched], case: str) -> None:
    resumed = launched(case).of("resumed", case=case)
    assert [(one["step"], one["exact"]) for one in resumed] == [(KILL_AT, True)] * len(resumed)
    assert resumed
    assert {one["save"][:8] for one in resumed} == {f"{KILL_AT:08d}"}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_the_end_are_those_of_the_uninterrupted_run(launched: Callable[[str], Launched], case: str) -> None:
    straight, continued = losses(launched(case), "straight", case), losses(launched(case), "continued", case)
    assert {step for _, step in continued} == set(range(KILL_AT, STEPS))
    assert continued == {key: value for key, value in straight.items() if key[1] >= KILL_AT}
    for one in launched(case).of("end", case=case, of="resumed"):
        assert one["hashes"] == launched(case).one("end", case=case, of="straight", rank=one["rank"])["hashes"]
