"""A few rounds of random kills; the long run is ``python -m tests.chaos.kills``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.kills import Chaos
from tests.support.mounts import shared_memory

SEED = int(os.environ.get("DRIFTPOINT_SEED", "3"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("framework", "rounds"), [("plain", 8), ("ddp", 5)])
def test_a_few_rounds_of_random_kills(tmp_path: Path, framework: str, rounds: int) -> None:
    with shared_memory() as shared:
        print(f"DRIFTPOINT_SEED={SEED}")
        outcomes = Chaos(tmp_path, shared, rounds, SEED, framework).run()
        assert outcomes["from memory"] > 0
        assert sum(outcomes[name] for name in ("one rank", "all ranks", "everything", "stopped")) == rounds


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("framework", "memory"), [("zero2", True), ("zero3", True), ("fsdp2", False), ("plain", False)]
)
def test_two_rounds_of_each_other_kind(tmp_path: Path, framework: str, memory: bool) -> None:
    with shared_memory() as shared:
        outcomes = Chaos(tmp_path, shared, 2, SEED, framework, memory=memory).run()
        assert outcomes["from memory"] + outcomes["from the store"] > 0


@pytest.mark.slow
@pytest.mark.distributed
def test_a_few_rounds_with_the_daemon_killed_too(tmp_path: Path) -> None:
    with shared_memory() as shared:
        victims = ("daemon first", "daemon last", "daemon lives")
        outcomes = Chaos(tmp_path, shared, 4, SEED, names=victims, daemon=True).run()
        assert sum(outcomes[name] for name in victims) == 4


@pytest.mark.slow
@pytest.mark.distributed
def test_a_few_rounds_with_the_supervisor_killed_too(tmp_path: Path) -> None:
    with shared_memory() as shared:
        outcomes = Chaos(tmp_path, shared, 3, SEED, names=("everything",), supervised=True).run()
        assert outcomes["everything"] == 3


@pytest.mark.slow
@pytest.mark.distributed
def test_a_few_rounds_in_which_nodes_are_lost_too(tmp_path: Path) -> None:
    with shared_memory() as shared:
        outcomes = Chaos(tmp_path, shared, 4, SEED, "ddp", peers=True).run()
        assert outcomes["a node lost"] > 0 and outcomes["from peers"] > 0


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("framework", "policy"), [("plain", "parity"), ("zero3", "full")])
def test_a_few_rounds_with_the_journal(tmp_path: Path, framework: str, policy: str) -> None:
    with shared_memory() as shared:
        chaos = Chaos(tmp_path, shared, 3, SEED, framework, memory=False, journal=True, policy=policy)
        outcomes = chaos.run()
        assert sum(count for name, count in outcomes.items() if name.startswith("steps taken again")) > 0
