"""A few rounds of random kills; the long run is ``python -m tests.chaos.kills``."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.chaos.kills import Chaos

SEED = int(os.environ.get("DRIFTPOINT_SEED", "3"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "rounds"), [(1, 8), (2, 5)])
def test_a_few_rounds_of_random_kills(tmp_path: Path, ranks: int, rounds: int) -> None:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as shared:
        print(f"DRIFTPOINT_SEED={SEED}")
        outcomes = Chaos(tmp_path, Path(shared), rounds, SEED, ranks).run()
        assert outcomes["from memory"] > 0
        assert sum(outcomes[name] for name in ("one rank", "all ranks", "everything", "stopped")) == rounds


@pytest.mark.slow
@pytest.mark.distributed
def test_a_few_rounds_with_the_daemon_killed_too(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as shared:
        victims = ("daemon first", "daemon last", "daemon lives")
        outcomes = Chaos(tmp_path, Path(shared), 4, SEED, names=victims, daemon=True).run()
        assert sum(outcomes[name] for name in victims) == 4


@pytest.mark.slow
@pytest.mark.distributed
def test_a_few_rounds_with_the_supervisor_killed_too(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as shared:
        outcomes = Chaos(tmp_path, Path(shared), 3, SEED, names=("everything",), supervised=True).run()
        assert outcomes["everything"] == 3


@pytest.mark.slow
@pytest.mark.distributed
def test_a_few_rounds_in_which_nodes_are_lost_too(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as shared:
        outcomes = Chaos(tmp_path, Path(shared), 4, SEED, 2, peers=True).run()
        assert outcomes["a node lost"] > 0 and outcomes["from peers"] > 0
