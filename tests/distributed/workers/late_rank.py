"""A job whose second rank takes its last step later than the first one ends. The processes end as Python's do.

Usage: late_rank.py STORE SECONDS
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import monitor


class Slow:
    """What ends slowly with the interpreter, as memory of a large model does."""

    def __del__(self) -> None:
        time.sleep(1)


slow = Slow()


def main(store: Path, seconds: float) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"store": str(store), "every": 2, "metrics": {"enabled": False}}
    ckpt = monitor.attach((model, optimizer), settings)
    for step in range(ckpt.resume(), 3):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            dist.barrier()
            time.sleep(seconds * dist.get_rank())
        ckpt.step()  # no decision is due, so the first rank does not wait
    ckpt.close(save=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
