"""Train on two workers of Ray Train, and resume by Ray's own handling of failures: kill a worker and watch.

    pip install 'ray[train]' driftpoint
    python examples/ray_train.py --store /shared/driftpoint-checkpoints

The training function has three lines for Driftpoint, marked ``<-``, and reports no checkpoints to Ray. The store is a
directory that the workers of all nodes share, or a bucket.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import monitor


def train(settings: dict[str, Any]) -> None:
    """The training function, which every worker runs, again after each failure."""
    torch.manual_seed(0)  # the same first weights on every worker
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())  # other data on each
    with monitor.attach((model, optimizer), {"store": settings["store"], "every": settings["every"]}) as ckpt:  # <-
        for step in range(ckpt.resume(), settings["steps"]):  # <- 0 when there is nothing to resume
            x = torch.randn(32, 16)
            loss = (model(x) - x.sin()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()  # <-
            note(settings["losses"], step, loss)


def note(folder: str | None, step: int, loss: torch.Tensor) -> None:
    """Append process, step and loss, with all its bits, to a file of this rank."""
    if folder is not None:
        with (Path(folder) / f"rank-{dist.get_rank()}.txt").open("a") as file:
            file.write(f"{os.getpid()} {step} {loss.item().hex()}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True, help="a directory that all workers share")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    parser.add_argument("--losses", type=Path, help="write the losses of every worker to files here")
    args = parser.parse_args()
    settings = {"store": str(args.store.resolve()), "steps": args.steps, "every": args.every}
    settings["losses"] = None if args.losses is None else str(args.losses.resolve())
    TorchTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="driftpoint",
            storage_path=str(args.store.resolve().parent),
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()


if __name__ == "__main__":
    main()
