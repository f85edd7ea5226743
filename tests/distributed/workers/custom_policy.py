"""Policies and settings on two ranks: refused alike before a store is made, and in mid-run carried past alike."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.distributed import destroy_process_group, get_rank, init_process_group

from store.errors import DriftpointError
from tests.support.jobs import Job

spec = json.loads(Path(sys.argv[1]).read_text())
folder = Path(spec["directory"])


def record(**fields: object) -> None:
    with Path(spec["results"]).open("a") as results:
        results.write(json.dumps({**fields, "rank": get_rank()}) + "\n")


init_process_group("gloo")
torch.manual_seed(0)
for case, settings in spec["refused"].items():
    try:
        Job(folder / case, **settings[get_rank()])
    except DriftpointError as error:
        record(kind="refused", case=case, error=type(error).__name__, text=str(error))

job = Job(folder / "store", policy=spec["raises"])
job.ckpt.resume()
saved = []
for _ in range(5):
    report = job.step()
    assert report is not None
    saved.append(len(report.saved))
    torch.distributed.barrier()
kept = {key: value.double().sum().item() for key, value in job.weights().items()}
failures = job.metric("driftpoint_policy_failures_total")
job.ckpt.close(save=False)
torch.distributed.barrier()
other = Job(folder / "store", policy="full")
step = other.ckpt.resume()
found = {key: value.double().sum().item() for key, value in other.weights().items()}
record(kind="ran", saved=saved, failures=failures, step=step, same=kept == found)
other.ckpt.close(save=False)
destroy_process_group()
