"""One rank of ``journal.py``: train with the journal or without, or resume and tell how long that took."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import monitor
from benchmarks.llama import llama_engine, train_step
from benchmarks.ranks import hand_in

LENGTH = 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--precision", choices=("bf16", "fp32"), required=True)
    parser.add_argument("--way", choices=("off", "journal", "resume"), required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    deepspeed.init_distributed(dist_backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    result = run(options)
    if dist.get_rank() == 0:
        hand_in(options.out, result)
    dist.barrier()
    dist.destroy_process_group()


def run(options: argparse.Namespace) -> dict[str, Any]:
    engine = llama_engine(options.stage, options.layers, precision=options.precision)
    parameters = sum(getattr(one, "ds_numel", one.numel()) for one in engine.module.parameters())
    journal = {"enabled": options.way != "off"}
    settings = {"store": str(options.store), "every": 10_000, "journal": journal, "metrics": {"enabled": False}}
    ckpt = monitor.attach(engine, settings)
    if options.way == "resume":
        began = time.perf_counter()
        step = ckpt.resume()
        seconds = slowest(time.perf_counter() - began)
        ckpt.close(save=False)
        return {"seconds": seconds, "step": step, "parameters": parameters}
    ckpt.resume()
    for _ in range(2):
        train_step(engine, LENGTH, options.rows)
        ckpt.step()
    ckpt.save(wait=True)
    train_step(engine, LENGTH, options.rows)  # the buffers of the first record
    ckpt.step()
    ckpt.flush()
    os.sync()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(options.steps):
        train_step(engine, LENGTH, options.rows)
        ckpt.step()
    training = slowest(time.perf_counter() - began)
    ckpt.flush()
    written = slowest(time.perf_counter() - began)
    ckpt.close(save=False)
    return {"seconds": training / options.steps, "written": written / options.steps, "parameters": parameters}


def slowest(seconds: float) -> float:
    box = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box)


if __name__ == "__main__":
    main()
