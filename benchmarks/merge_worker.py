"""One rank of ``merge.py``: an engine that trains, saves in both ways, and loads what it saved in both ways."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

import monitor
from benchmarks.llama import llama_engine, train_step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--saves", type=int, required=True, help="commits of the store, one step apart")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    worker = Worker(options.stage, options.layers, options.folder)
    if options.saves:
        worker.save_often(options.saves)
    else:
        worker.save()
        for _ in range(options.rounds):
            worker.load()
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(worker.seen))
    dist.barrier()
    os._exit(0)  # gloo's threads may abort at the interpreter's end


class Worker:
    def __init__(self, stage: int, layers: int, folder: Path) -> None:
        self.engine = llama_engine(stage, layers)
        self.folder = folder
        self.seen: dict[str, list[float]] = {}

    def step(self) -> None:
        train_step(self.engine, 64)

    def save(self) -> None:
        self.step()
        self.step()
        ckpt = self._attached()
        ckpt.resume()
        ckpt.save(wait=True)
        ckpt.close(save=False)
        self.engine.save_checkpoint(str(self.folder / "own"))
        self.load()  # both ways once, for what is made only once
        self.seen.clear()

    def save_often(self, count: int) -> None:
        """So many full commits, and nothing else."""
        ckpt = self._attached(keep_last=count)
        ckpt.resume()
        for _ in range(count):
            self.step()
            ckpt.save(wait=True)
        ckpt.close(save=False)

    def load(self) -> None:
        ckpt = self._attached()
        self.note("resume", ckpt.resume)
        ckpt.close(save=False)
        self.note("load", lambda: self.engine.load_checkpoint(str(self.folder / "own")))

    def _attached(self, keep_last: int = 3) -> monitor.Checkpointer:
        settings = {"every": 1 << 20, "metrics": {"enabled": False}, "retention": {"keep_last": keep_last}}
        return monitor.attach(self.engine, {**settings, "store": str(self.folder / "store")})

    def note(self, name: str, action: Callable[[], object]) -> None:
        """Seconds of the slowest rank, begun together."""
        dist.barrier()
        began = time.perf_counter()
        action()
        box = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        self.seen.setdefault(name, []).append(float(box))


if __name__ == "__main__":
    main()
