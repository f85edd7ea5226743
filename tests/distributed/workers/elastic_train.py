"""DistributedDataParallel under torchrun's elastic agent. A step's batch follows from its number.

Usage: elastic_train.py STORE RECORDS STEPS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import monitor


def main(store: str, records: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def tell(**record: object) -> None:
        if rank == 0:
            with records.open("a") as file:
                file.write(json.dumps(record) + "\n")

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"store": store, "every": 5, "metrics": {"enabled": False}}
    with monitor.attach((model, optimizer), settings) as ckpt:
        first = ckpt.resume()
        tell(start=first, ranks=ranks, exact=ckpt.certificate is not None and ckpt.certificate.exact)
        for step in range(first, steps):
            batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))[rank::ranks]
            loss = (model(batch) - batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step()
            tell(step=step + 1)
            time.sleep(0.05)
    tell(end=steps, ranks=ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
