"""A small job under supervision: what it does at which attempt, and when it dies, is told by its spec.

total, every    steps; ``flush`` waits for each save, so that what is committed when it dies is known
dies            [attempt (from 1; null: each), step, how], ... : how is "kill", an exit code, or "hang"
poison          steps that no attempt survives which resumes at them: it dies two steps later
    nan         steps at which weights become NaN in each attempt that resumes at them
    poison_now      the same, before the first step
    settled         each version in memory is waited for
settings        more of the configuration
broken          the exit code of each attempt, before it imports or does anything
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

spec = json.loads(Path(sys.argv[1]).read_text())
results = Path(spec["results"])
rank = int(os.environ.get("RANK", "0"))


def record(kind: str, **facts: Any) -> None:
    with results.open("a") as file:
        file.write(json.dumps({"kind": kind, "rank": rank, "pid": os.getpid(), **facts}) + "\n")


def attempts() -> int:
    lines = results.read_text().splitlines() if results.exists() else []
    return sum(1 for line in map(json.loads, lines) if line["kind"] == "began" and line["rank"] == rank)


def die(how: str | int) -> None:
    record("dies", how=how)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while how == "hang":
        time.sleep(0.1)
    os._exit(int(how))


attempt = attempts() + 1
record("began", attempt=attempt)
if spec.get("broken"):
    sys.exit(spec["broken"])

gc.disable()  # imports leave no garbage, and the search for it takes a third of their time

import torch  # noqa: E402
import torch._dynamo  # noqa: E402 - the first optimizer would import it

from tests.support.internals import wait_for_snapshot  # noqa: E402
from tests.support.jobs import Job  # noqa: E402

gc.enable()
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
job = Job(Path(spec["store"]), every=spec["every"], **spec.get("settings", {}))
start = job.ckpt.resume()
record("resumed", start=start)
if start in spec.get("poison_now", []):
    die(42)
for step in range(start, spec["total"]):
    if step == start and start in spec.get("nan", []):
        job.model.head.weight.data.fill_(float("nan"))
    job.step()
    if spec.get("settled"):
        wait_for_snapshot(job.ckpt)
    record("step", step=step + 1)
    for which, at, how in spec.get("dies", []):
        if which in (None, attempt) and at == step + 1 and rank == spec.get("dying_rank", rank):
            die(how)
    if start in spec.get("poison", []) and step + 1 == start + 2:
        die(41)
job.ckpt.close()
total = sum(float(tensor.double().sum()) for tensor in job.weights().values())
record("done", total=total)
