"""Parameters never change under a copy: what is hashed of staged bytes is what a copy hashes to that was taken with
training paused, over a long run, for versions in memory and for saves, with copies made beside training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import Launched, torchrun
from tests.support.mounts import shared_memory

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def run(directory: Path, case: dict[str, Any], steps: int, mutant: bool = False) -> Launched:
    with shared_memory() as shared:
        spec = {"case": case, "steps": steps, "shared": str(shared), "mutant": mutant}
        done = torchrun("staging_consistency.py", 2, spec, directory, timeout=400)
        assert not list(shared.rglob("rank-*"))
    assert done.code == 0, done.output[-5000:]
    return done


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_staged_bytes_are_those_of_a_copy_taken_with_training_paused(tmp_path: Path, precision: str) -> None:
    case = {"kind": "zero", "stage": 2, "precision": precision}
    done = run(tmp_path, case, 400)
    assert done.of("wrong") == []
    for rank in (0, 1):
        counted = done.one("compared", rank=rank)
        assert counted["memory"] > 200 and counted["saves"] > 50 and counted["fragments"] > 1000


def test_a_script_that_changes_them_is_seen_by_this_very_check(tmp_path: Path) -> None:
    """Through ``.data``, which nothing else sees, before the copies are made: so the check above can fail."""
    case = {"kind": "zero", "stage": 2, "precision": "bf16", "width": 301}
    done = run(tmp_path, case, 60, mutant=True)
    assert done.of("wrong", of="memory")
