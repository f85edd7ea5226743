"""Ranks that save and close; each tells how many threads of gloo it has before and after.

Usage: group_threads.py SPEC.json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from resume_jobs import Results, build, leave, rank, start_group

import monitor


def threads() -> int:
    """How many of this process's threads are gloo's, by the names that they give themselves."""
    return sum("gloo" in task.read_text() for task in Path("/proc/self/task").glob("*/comm"))


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=False)
    results, trainee, mine = Results(spec["results"]), build({"kind": "ddp", "width": 6}, seed=1), rank()
    before = threads()
    settings = {"store": str(Path(spec["directory"]) / "store"), "every": 2, "metrics": {"enabled": False}}
    settings["trace"] = {"anchors": 4}  # which sums over the ranks
    ckpt = monitor.attach(trainee.target, settings, state=trainee.state)
    ckpt.resume()
    for _ in range(3):
        trainee.step()
        ckpt.step()
    during = threads()
    if spec["how"] == "late" and mine == 0:
        time.sleep(2)  # the other rank's last sum is still under way
    if spec["how"] == "after the job's group":
        dist.barrier()
        ckpt.commit_last_step()
        dist.destroy_process_group()
    if spec["how"] == "close":
        ckpt.close()
    else:
        ckpt.finish(clean=False)
    deadline = time.monotonic() + 60
    while (after := threads()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    results.tell(f"ended {mine}", before=before, during=during, after=after)
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
