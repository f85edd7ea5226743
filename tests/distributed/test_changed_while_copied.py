"""DeepSpeed's own calls that write masters and moments through ``.data`` wait for the copies that are under way.

What is committed, and kept in memory, is the state of the decision.
"""

from __future__ import annotations

import pytest

from tests.support.launch import Launched, torchrun
from tests.support.mounts import shared_memory

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASES = [(1, "fp32"), (2, "bf16"), (3, "bf16")]
FULL = ("load_checkpoint", "load_module_only", "full_param", "full_state")
CHANGES = [(stage, change) for stage, _ in CASES for change in FULL] + [(3, "local_param"), (3, "local_state")]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    pytest.importorskip("deepspeed")
    cases = [{"kind": "zero", "stage": stage, "precision": precision, "width": 12} for stage, precision in CASES]
    with shared_memory() as shared:
        spec = {"cases": cases, "shared": str(shared)}
        done = torchrun("changed_while_copied.py", 2, spec, tmp_path_factory.mktemp("changed"))
    assert done.code == 0, done.output[-6000:]
    return done


@pytest.mark.parametrize("rank", (0, 1))
@pytest.mark.parametrize(("stage", "change"), CHANGES)
def test_the_state_of_the_decision_is_committed_and_kept(
    launched: Launched, stage: int, change: str, rank: int
) -> None:
    commit = launched.one("commit", stage=stage, change=change, rank=rank)
    assert (commit["committed"], commit["equal"]) == (True, True)
    assert launched.one("kept", stage=stage, change=change, rank=rank)["equal"] is True


@pytest.mark.parametrize(("stage", "change"), CHANGES)
def test_the_state_was_changed_indeed(launched: Launched, stage: int, change: str) -> None:
    assert any(one["differs"] for one in launched.of("changed", stage=stage, change=change))
