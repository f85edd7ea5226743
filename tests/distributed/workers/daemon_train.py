"""A small job that keeps every step in memory, then does as it is told on stdin: step, close, fork, fail."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from pathlib import Path

gc.disable()  # imports leave no garbage, and the search for it takes a third of their time

import torch  # noqa: E402
import torch._dynamo  # noqa: E402 - the first optimizer would import it
import torch.distributed as dist  # noqa: E402

from tests.support.jobs import Job  # noqa: E402
from tests.support.kept import kept_step  # noqa: E402

gc.enable()
spec = json.loads(Path(sys.argv[1]).read_text())
folder = Path(spec["folder"])
rank = int(os.environ.get("RANK", "0"))
logging.basicConfig(level=logging.INFO)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(5 + rank)


def write_down() -> None:
    state = {**one.weights(), "random": torch.get_rng_state(), "step": torch.tensor(taken)}
    torch.save(state, folder / f"{rank}.new")
    (folder / f"{rank}.new").rename(folder / ("state.pt" if rank == 0 else f"state-{rank}.pt"))


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


one = Job(Path(spec["store"]), width=spec.get("width", 8), **spec["settings"])
taken = one.ckpt.resume()
while taken < spec["steps"]:
    kept_step(one)
    taken += 1
write_down()
if dist.is_initialized():
    dist.barrier()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    (folder / f"pid-{rank}").rename(folder / f"ready-{rank}")
    while True:
        time.sleep(1.0)
say("ready")
for line in sys.stdin:
    word = line.strip()
    if word == "step":
        kept_step(one)
        taken += 1
        write_down()
    elif word == "close":
        one.ckpt.close()
    elif word == "fork":
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        (folder / "child").write_text(str(child))
    elif word == "fail":
        say("done")
        raise RuntimeError("as it was told")
    say("done")
