"""A loop of Accelerate's, killed and started again with monitor.attach(accelerator), goes on to the last bit: under
DistributedDataParallel and DeepSpeed ZeRO-2, with accumulation, a schedule and an object registered for checkpointing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASES = [{"name": "ddp", "zero": 0}, {"name": "zero2", "zero": 2}]


def test_a_killed_loop_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    done = torchrun("hf_accelerate.py", 2, {"cases": CASES}, tmp_path, restarts=1)
    assert done.code == 0, done.output[-6000:]
    for case in CASES:
        for rank in (0, 1):
            straight = done.one("straight", case=case["name"], rank=rank)["told"]
            resumed = done.one("resumed", case=case["name"], rank=rank)["told"]
            assert len(resumed) == 2 * (15 - 6)
            assert resumed == [entry for entry in straight if entry[0] >= 6], case["name"]
