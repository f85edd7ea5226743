"""A job of several ranks with a memory tier, a daemon beside it and an endpoint: its first incarnation is killed.

That happens when memory holds a version newer than the newest commit. The next one trains until it is told to stop."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from tests.support.jobs import Job

config = yaml.safe_load(Path(sys.argv[1]).read_text())
stop = Path(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(3 + dist.get_rank())
one = Job(Path(config.pop("store")), **config)
first = one.ckpt.resume() == 0
going = torch.ones(1)
while going.item():
    one.step()
    time.sleep(0.05)  # a step of a real model takes longer than one of this
    step = int(one.metric("driftpoint_step"))
    # The commit of the step three before is whole, and a version of a step since.
    ripe = step % config["every"] == 3 and one.metric("driftpoint_memory_step") > step - 3
    if first and ripe and one.metric("driftpoint_saves_total") > 5:
        os.kill(os.getpid(), signal.SIGKILL)
    if stop.exists():
        going.zero_()
    dist.broadcast(going, 0)
one.ckpt.close(save=False)
