"""One rank of ``overhead.py``: one engine, and blocks of steps with this or that way of saving or with none.

Every way has a checkpointer of its own on the same engine; only that of the block is called. A block is timed until
all that it began is done, so that none pays for the one before it.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import monitor
from benchmarks.blocks import cycle, rows_for
from benchmarks.llama import llama_engine, train_step
from benchmarks.ranks import hand_in
from monitor.adapters import adapter_for

OFF = "off"
ALWAYS = (OFF, "full", "memory auto")
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "memory auto": {"memory": {"enabled": True, "every": "auto"}},
    "memory each step": {"memory": {"enabled": True, "every": 1}},
    "compact": {"encoding": "compact"},
    "threshold, sketch": {"policy": {"name": "threshold", "threshold": 0.01}},
}
EXTRAS = tuple(name for name in WAYS if name not in ALWAYS)
LENGTH = 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--cycles", type=int, required=True)
    parser.add_argument("--extras", type=int, required=True)
    parser.add_argument("--block", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    deepspeed.init_distributed(dist_backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    bench = Bench(options)
    result = bench.result(options.cycles, options.extras)
    if dist.get_rank() == 0:
        hand_in(options.out, result)
    dist.barrier()
    dist.destroy_process_group()


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.engine = llama_engine(options.stage, options.layers, options.hidden)
        self.block_steps = options.block
        self.rows = 1
        for _ in range(2):
            self.step()
        self.rows = self.calibrated(options.seconds)
        self.ways = {name: self.attached(name, options) for name in WAYS}
        self.begun = dict.fromkeys(WAYS, 0)
        while self.engine.global_steps % self.block_steps != self.block_steps - 1:
            self.step()  # saves are due at the first step of a block

    def calibrated(self, seconds: float) -> int:
        """Rows with which a step takes ``seconds`` on the slowest rank."""
        measured = []
        for rows in (1, 5):
            self.rows = rows
            self.step()
            measured.append((rows, self.timed(self.step)))
        return rows_for(seconds, measured[0], measured[1])

    def attached(self, name: str, options: argparse.Namespace) -> monitor.Checkpointer:
        settings: dict[str, Any] = {
            "store": str(options.folder / name.replace(" ", "-").replace(",", "")),
            "every": self.block_steps,
            "metrics": {"enabled": False},
            "retention": {"keep_last": 1, "log_spaced": False},
            **WAYS[name],
        }
        if "memory" in settings:
            settings["memory"] = {**settings["memory"], "path": str(options.shared)}
        ckpt = monitor.attach(self.engine, settings)
        ckpt.resume()
        ckpt.save(wait=True)
        return ckpt

    def result(self, cycles: int, extras: int) -> dict[str, Any]:
        seen: dict[str, dict[int, float]] = {}
        for number in range(cycles):
            for name in cycle(number, ALWAYS, EXTRAS, extras):
                seen.setdefault(name, {})[number] = self.block(name) / self.block_steps
        for name, ckpt in self.ways.items():
            self.require_saved(name, ckpt)
            ckpt.close(save=False)
        nbytes = sum(p.tensor.numel() * p.tensor.element_size() for p in adapter_for(self.engine).owned())
        return {
            "steps": {name: {str(number): value for number, value in found.items()} for name, found in seen.items()},
            "rows": self.rows,
            "parameters": sum(p.numel() for p in self.engine.module.parameters()),
            "bytes_a_rank": nbytes,
            "versions": {name: value(ckpt, "driftpoint_memory_versions_total") for name, ckpt in self.ways.items()},
            "blocks": self.begun,
        }

    def block(self, name: str) -> float:
        """Seconds of the slowest rank for a block of steps and whatever they began."""
        ckpt = self.ways.get(name)
        if ckpt is not None:
            self.begun[name] += 1

        def steps() -> None:
            for _ in range(self.block_steps):
                self.step()
                if ckpt is not None:
                    ckpt.step()
            if ckpt is not None:
                ckpt.flush()
            quiet()

        return self.timed(steps)

    def require_saved(self, name: str, ckpt: monitor.Checkpointer) -> None:
        """What saved less than it was to would look cheap. The last block's save is counted at the next decision."""
        if dist.get_rank() or "threshold" in name:  # what moved less than the threshold is rightly not saved
            return
        saves = value(ckpt, "driftpoint_saves_total")
        if saves < self.begun[name]:  # with the one when it was attached
            raise RuntimeError(f"{name}: {self.begun[name]} blocks, but only {saves:.0f} saves: too slow a disk?")

    def step(self) -> None:
        train_step(self.engine, LENGTH, self.rows)

    def timed(self, action: Any) -> float:
        os.sync()
        dist.barrier()
        began = time.perf_counter()
        action()
        box = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return float(box)


def quiet(window: float = 0.02) -> None:
    """Return once this process uses hardly any processor: its background threads are done."""
    while True:
        began, used = time.perf_counter(), time.process_time()
        time.sleep(window)
        if time.process_time() - used < 0.1 * (time.perf_counter() - began):
            return


def value(ckpt: monitor.Checkpointer, name: str) -> float:
    found = ckpt.metrics.registry.get_sample_value(name)
    return math.nan if found is None else found


if __name__ == "__main__":
    main()
