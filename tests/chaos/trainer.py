"""What the random kills fall on: a trainer of one or more ranks in plain PyTorch, deterministic to the bit, with a
memory tier. Every step it writes down what it was told, in a file that outlives it.

Usage: trainer.py SPEC.json (under torchrun, or alone)
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from monitor.save.staging import as_bytes
from tests.support.internals import memory_of
from tests.support.jobs import Job


class Diary:
    """A file of JSON lines, each in one write."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def put(self, kind: str, **fields: Any) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        line = json.dumps({"kind": kind, "rank": rank, "pid": os.getpid(), **fields})
        os.write(self._descriptor, f"{line}\n".encode())


def digest(job: Job) -> str:
    """Of weights, moments and the generator's state: all that a resume must bring back."""
    found = job.weights()
    state = xxhash.xxh3_128()
    for key in sorted(found):
        state.update(key.encode())
        state.update(as_bytes(found[key].reshape(-1)))
    state.update(torch.get_rng_state().numpy().tobytes())
    return state.hexdigest()


def main(spec: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(True)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    diary = Diary(spec["diary"])
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    if spec["nodes"]:  # as on several machines: each rank sees its own memory only
        memory = spec["settings"]["memory"]
        memory["path"] += f"/node{dist.get_rank()}"
        Path(memory["path"]).mkdir(exist_ok=True)
    job = Job(Path(spec["store"]), width=spec["width"], **spec["settings"])
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    if spec["reference"]:
        for step in range(1, spec["steps"] + 1):
            job.update()
            diary.put("reference", step=step, digest=digest(job))
        os._exit(0)
    step = job.ckpt.resume()
    found = job.ckpt.certificate
    diary.put(
        "resumed",
        step=step,
        digest=digest(job),
        exact=found is None or found.exact,
        sources=sorted({unit.source for unit in found.units}) if found else [],
    )
    while step < spec["steps"]:
        job.update()
        job.ckpt.step()
        step += 1
        time.sleep(spec["pause"])
        memory = memory_of(job.ckpt)
        replicated = None if memory is None else memory._replication.replicated
        diary.put(
            "step",
            step=step,
            newest=memory.newest.step if memory is not None and memory.newest is not None else 0,
            replicated=replicated.step if replicated is not None else 0,
            committed=int(job.metric("driftpoint_last_commit_step")),
        )
    job.ckpt.save(wait=True)
    job.ckpt.close()
    diary.put("end", digest=digest(job))
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
