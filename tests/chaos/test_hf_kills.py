"""A few random kills of a Hugging Face Trainer; the long run is ``python -m tests.chaos.hf_kills``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.hf_kills import TrainerChaos
from tests.support.mounts import shared_memory

SEED = int(os.environ.get("DRIFTPOINT_SEED", "13"))


@pytest.mark.slow
def test_a_few_kills_of_a_trainer(tmp_path: Path) -> None:
    with shared_memory() as shared:
        print(f"DRIFTPOINT_SEED={SEED}")
        outcomes = TrainerChaos(tmp_path, shared, 2, SEED).run()
        assert outcomes["resumed"] > 0 or SEED != 13  # which does not kill before there is a commit
