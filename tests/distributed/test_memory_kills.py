"""Ranks killed at random moments, with the memory tier: what comes back is the state of an uninterrupted run, to the
bit, it comes from memory wherever that is newer, and training goes on as if nothing had been.

The moments come from a seed, which is printed; set ``DRIFTPOINT_SEED`` to have others, or the same again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import Launched, torchrun
from tests.support.mounts import shared_memory

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.core]

STEPS, KILLS = 24, 2
CASES: list[dict[str, Any]] = [
    {"name": "zero1", "kind": "zero", "stage": 1, "precision": "bf16"},
    {"name": "zero2", "kind": "zero", "stage": 2, "precision": "fp32", "staging": "lazy"},
    {"name": "zero3", "kind": "zero", "stage": 3, "precision": "bf16", "kept": 2},
    {"name": "ddp", "kind": "ddp"},
    {"name": "ddp-lazy", "kind": "ddp", "staging": "lazy", "kept": "auto"},
]
NAMES = [case["name"] for case in CASES]
SEED = int(os.environ.get("DRIFTPOINT_SEED", "1"))


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """Of real shared memory, where there is some."""
    with shared_memory() as place:
        yield place


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Launched:
    print(f"DRIFTPOINT_SEED={SEED}")
    spec = {"cases": CASES, "steps": STEPS, "seed": SEED, "shared": str(shared)}
    done = torchrun(
        "memory_kills.py", 2, spec, tmp_path_factory.mktemp("kills"), restarts=len(CASES) * KILLS, timeout=420
    )
    assert done.code == 0, done.output[-6000:]
    return done


def straight(launched: Launched, name: str, rank: int) -> dict[int, dict[str, Any]]:
    return {one["step"]: one for one in launched.of("straight", case=name, rank=rank)}


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_back_is_the_state_of_an_uninterrupted_run(launched: Launched, name: str) -> None:
    for rank in (0, 1):
        lives = launched.of("resumed", case=name, rank=rank)
        assert [one["life"] for one in lives] == [0, 1, 2]
        for one in lives[1:]:
            assert one["state"] == straight(launched, name, rank)[one["step"]]["state"], one


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_all_ranks_had_is_lost(launched: Launched, name: str) -> None:
    for life in (1, 2):
        before = [one for one in launched.of("trained", case=name) if one["life"] < life]
        had = max([one["newest"] or 0 for one in before] + [one["committed"] for one in before])
        resumed = launched.of("resumed", case=name, life=life)
        assert len({one["step"] for one in resumed}) == 1, "the same on both ranks"
        assert resumed[0]["step"] >= had > 0


@pytest.mark.parametrize("name", NAMES)
def test_it_comes_from_memory_where_that_is_newer(launched: Launched, name: str) -> None:
    for life in (1, 2):
        told = [one["committed"] for one in launched.of("trained", case=name) if one["life"] < life]
        for one in launched.of("resumed", case=name, life=life):
            if "memory" in one["sources"]:  # of a third step, too, where the save before was still being written
                assert one["step"] > max(told), one
            else:
                assert one["step"] % 3 == 0, one


def test_memory_was_resumed_from_at_all(launched: Launched) -> None:
    assert sum("memory" in one["sources"] for one in launched.of("resumed")) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_to_the_last_bit(launched: Launched, name: str) -> None:
    for rank in (0, 1):
        wanted = straight(launched, name, rank)
        for one in launched.of("trained", case=name, rank=rank):
            assert one["losses"] == wanted[one["step"]]["losses"], one
        assert launched.one("end", case=name, rank=rank)["state"] == wanted[STEPS]["state"]


def test_nothing_is_left_in_shared_memory(launched: Launched, shared: Path) -> None:
    assert launched.of("end")
    assert not list(shared.rglob("rank-*"))
