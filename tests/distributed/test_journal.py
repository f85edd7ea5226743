"""With the journal a job that was killed loses no step: it goes on from the very step before, as a state of one step to
the last bit, also where the commits are composites.

The jobs are those of test_resume_bitwise.py: dropout, a schedule, accumulation, clipping, two param groups, tied
weights, a frozen block, and an order of data from four random generators; killed by SIGKILL in the middle of a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
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
    {"name": "ddp-topk", "kind": "ddp", "every": 3, "topk": 0.05, "settings": {"packing": "auto"}},
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
def stores(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Launched, Path]]:
    """What became of a case, and its store."""
    pytest.importorskip("deepspeed")
    launch_of = {case["name"]: launch for launch, cases in LAUNCHES.items() for case in cases}

    @once
    def launch(name: str) -> tuple[Launched, Path]:
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
        output, records = "".join(one.output for one in done), [record for one in done for record in one.records]
        return Launched(0, output, records), directory

    def of(case: str) -> tuple[Launched, Path]:
        found, directory = launch(launch_of[case])
        return found, directory / case

    return of


@pytest.fixture(scope="module")
def launched(stores: Callable[[str], tuple[Launched, Path]]) -> Callable[[str], Launched]:
    return lambda case: stores(case)[0]


def gradients(store: Path) -> list[Mapping[str, Any]]:
    """The gradients in the first record of a job, on all ranks."""
    record = min((store / "journal/segments").iterdir())
    parts = [json.loads(path.read_bytes())["body"] for path in record.glob("*.json")]
    return [entry for part in parts for entry in part["entries"] if entry["slot"] == "grad"]


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


@pytest.mark.parametrize("case", ["zero1-bf16", "zero3-bf16"])
def test_clipped_gradients_of_bfloat16_take_two_bytes(
    stores: Callable[[str], tuple[Launched, Path]], case: str
) -> None:
    """And four for the factor of each piece, which are small here."""
    found = gradients(stores(case)[1])
    assert {(one["dtype"], one["encoding"]) for one in found} == {("F32", "bf16-scaled")}
    assert all(one["nbytes"] == 2 * one["numel"] + 4 for one in found)


def test_gradients_that_a_hook_made_sparse_take_less(stores: Callable[[str], tuple[Launched, Path]]) -> None:
    found = [one for one in gradients(stores("ddp-topk")[1]) if one["numel"] > 500]
    assert found
    assert all(one["packing"] and one["nbytes"] < 1.2 * one["numel"] for one in found)
