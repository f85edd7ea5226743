"""Train a small model on one rank or several, saving every second step. The result is OUT/final.safetensors.

Prints the step that it starts from. With RANK and WORLD_SIZE in the environment it is one rank of
DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import monitor

STEPS, EVERY = 6, 2


def main(args: argparse.Namespace) -> None:
    out: Path = args.out
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    if args.after and not out.exists():
        out.mkdir()
        subprocess.run(["cp", "-r", args.after / "store", out], check=True)  # of which the judge sees no file event
    if args.forget:
        for newest in sorted((out / "store" / "manifests").glob("0*.json"))[-1:]:
            newest.unlink()
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=STEPS)
    with monitor.attach((model, optimizer), settings(out), state=[scheduler]) as ckpt:
        start = ckpt.resume()
        await_trace(out)
        print(f"resumed from step {start}")
        for _ in range(start, args.steps):
            batch = torch.randn(16, 8)  # of a generator that a resume must restore
            nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            ckpt.step()
            ckpt.flush()  # so that every run of the judge makes the same saves
    write(out, result(model, optimizer))


def write(out: Path, mine: dict[str, torch.Tensor]) -> None:
    """Write the results of all ranks to one file, of the same bytes if they have the same values."""
    gathered: list[Any] = [mine]
    if dist.is_initialized():
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
    if int(os.environ.get("RANK", "0")) == 0:
        save_file(
            {f"{rank}.{name}": value for rank, one in enumerate(gathered) for name, value in one.items()},
            out / "final.safetensors",
        )
    if dist.is_initialized():
        dist.barrier()


def await_trace(out: Path) -> None:
    """Wait until rank 0 has opened the trace, in a thread of its own: so file events always come in the same order."""
    while not (out / "store.trace.jsonl").exists():
        time.sleep(0.001)


def result(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return what must be the same to the bit: weights, optimizer state, and the random generator.

    Not as ``torch.save`` writes them: the judge compares bytes, and in its files the same values may have other bytes.
    """
    moments = {
        f"optimizer.{number}.{slot}": value
        for number, state in optimizer.state_dict()["state"].items()
        for slot, value in state.items()
    }
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    return {**weights, **moments, "random": torch.get_rng_state()}


def settings(out: Path) -> dict[str, Any]:
    return {"store": str(out / "store"), "every": EVERY, "metrics": {"enabled": False}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--after", type=Path, help="OUT of another job: continue from its store where there is none")
    parser.add_argument("--forget", action="store_true", help="remove the newest commit first, as a wrong resume would")
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
