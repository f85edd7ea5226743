"""How often the ranks wait for each other at a decision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.policies import policy_file, selecting
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.core]

_DECISIONS = """
import json, sys
import torch
import torch.distributed as dist
rank, path, folder, policy, buffer = int(sys.argv[1]), *sys.argv[2:6]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
waited = []
def counting(name, function):
    def called(*args, **kwargs):
        if not kwargs.get("async_op"):
            waited.append(name)
        return function(*args, **kwargs)
    return called
for name in ("all_reduce", "all_gather", "broadcast", "barrier"):
    setattr(dist, name, counting(name, getattr(dist, name)))
import monitor
torch.manual_seed(1)
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
if buffer == "buffer":
    model.register_buffer("seen", torch.zeros(3))
optimizer = torch.optim.AdamW(model.parameters())
settings = {"store": f"{folder}/store", "every": 1, "policy": json.loads(policy), "metrics": {"enabled": False}}
ckpt = monitor.attach((model, optimizer), settings)
for step in range(ckpt.resume(), 8):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    waited.clear()
    report = ckpt.step()
    seen = tuple(waited)
    ckpt.flush()
    dist.barrier()
    if step > 2:
        with open(f"{folder}/seen-{rank}", "a") as out:
            saved = {str(unit): choice.reason for unit, choice in report.saved.items()}
            out.write(json.dumps([seen, report.skipped, saved]) + "\\n")
ckpt.close()
if rank == 0:
    failures = ckpt.metrics.registry.get_sample_value("driftpoint_policy_failures_total")
    open(f"{folder}/failures", "w").write(str(int(failures)))
dist.destroy_process_group()
"""

FULL = '{"name": "full"}'
PARITY = '{"name": "parity", "k": 2}'
DRIFT = '{"name": "threshold", "threshold": 0.0}'


@pytest.mark.parametrize(
    ("policy", "buffer", "expected"),
    [
        (FULL, "-", ["all_gather"]),
        (PARITY, "-", ["all_gather", "all_reduce"]),  # what is not saved is measured
        (FULL, "buffer", ["all_gather", "all_reduce", "broadcast"]),  # a buffer is saved where it changed on any rank
        (DRIFT, "-", ["all_gather", "all_reduce", "broadcast"]),
    ],
)
def test_ranks_wait_no_more_often_than_they_must(tmp_path: Path, policy: str, buffer: str, expected: list[str]) -> None:
    run_ranks(_DECISIONS, tmp_path, str(tmp_path), policy, buffer)
    mine, other = ((tmp_path / f"seen-{rank}").read_text().splitlines() for rank in (0, 1))
    assert mine == other
    assert len(mine) == 5
    for line in mine:
        seen, skipped, saved = json.loads(line)
        assert (seen, skipped) == (expected, None)
        assert saved


_ASKS = selecting(
    """
with open(FOLDER + "/asked", "a") as out:
    out.write(f"{history.step}\\n")
if RAISES and os.path.exists(FOLDER + "/seen-0"):
    raise ValueError("no")
return Decision({one.unit: Choice("raw", f"because of {one.unit}" * 9) for one in stats})
"""
)


@pytest.mark.parametrize("raises", [False, True])
def test_a_policy_is_asked_once_at_a_decision(tmp_path: Path, raises: bool) -> None:
    """Its choices are too long to be sent along; or there are none, and it is asked again."""
    body = f"import os\nFOLDER, RAISES = {str(tmp_path)!r}, {raises}\n" + _ASKS
    run_ranks(_DECISIONS, tmp_path, str(tmp_path), json.dumps({"name": policy_file(tmp_path, body)}), "-")
    mine, other = ((tmp_path / f"seen-{rank}").read_text().splitlines() for rank in (0, 1))
    assert mine == other
    assert {tuple(json.loads(line)[0]) for line in mine} == {("all_gather", "broadcast")}
    asked = [step for step in map(int, (tmp_path / "asked").read_text().split()) if step > 3]
    assert [asked.count(step) for step in range(4, 9)] == [1, *[2 if raises else 1] * 4]
    assert int((tmp_path / "failures").read_text()) == (4 if raises else 0)
