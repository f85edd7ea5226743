"""Two ranks on a full disk: one of them cannot write, or the job cannot claim its store when it starts.

Usage: full_disk_ranks.py SPEC.json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from faults_ranks import Scenario
from resume_jobs import Results, leave, rank, start_group

import store.session
from store.errors import NoSpaceError
from store.names import EPOCHS
from tests.support.jobs import same


def rank_without_room(s: Scenario) -> None:
    """Rank 1's quota is used up until the oldest commit is gone; rank 0 has room."""
    job = s.job(retention={"keep_last": 3, "max_share": None}, timeouts={"commit": 60, "close": 60})
    s.steps(job, 3)
    oldest = s.store / "manifests" / "00000001-000001.json"

    def full(operation: str, path: str) -> None:
        if operation == "write" and oldest.exists():
            raise NoSpaceError(f"cannot write {path}: the disk quota is used up")

    def late(operation: str, path: str) -> None:
        deadline = time.monotonic() + 60
        while oldest.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        full(operation, path)

    files = job.hook()
    if rank() == 1:
        files.before = full
    s.steps(job, 1, flush=rank() == 1)  # rank 0 waits for rank 1's part, until the next decision
    s.steps(job, 1)
    if rank() == 1:
        files.before = late  # until rank 0 has made room
    s.steps(job, 2)
    s.end(job)


def start_without_room(s: Scenario) -> None:
    """The record of the start does not fit: all ranks resume, skip their saves, and save once there is room."""
    job = s.job()
    s.steps(job, 2)
    saved = job.weights()
    s.end(job)
    real = store.session._write_epoch
    store.session._write_epoch = refuse
    other = s.job()
    s.tell("resumed", step=other.ckpt.resume(), same=same(saved, other.weights()))
    s.steps(other, 2)
    s.tell("epochs", names=sorted(path.name for path in (s.store / EPOCHS).iterdir() if path.name[0] != "."))
    store.session._write_epoch = real
    s.steps(other, 2)
    s.end(other)


def refuse(*args: Any) -> Any:
    """Stands for a disk that has no room for a record."""
    raise NoSpaceError("cannot write a record: the filesystem is full")


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=False)
    results = Results(spec["results"])
    for scenario in (rank_without_room, start_without_room):
        scenario(Scenario(scenario.__name__, Path(spec["directory"]), results))
        dist.barrier()
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
