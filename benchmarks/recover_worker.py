"""One rank of ``recover.py``: begins a job and leaves it to be killed, or resumes it and says how long that took."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import xxhash

import monitor
from benchmarks.llama import llama_engine, train_step
from benchmarks.ranks import hand_in
from monitor.adapters import adapter_for
from store.catalog import open_catalog
from store.memory.index import scan_node
from store.memory.layout import Tier
from store.storage.local import LocalFiles

COMMITTED, KEPT = 2, 3
"""Steps of the commit on disk, and of the version in memory that is newer."""

NEVER = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["begin", "memory", "disk"], required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--started", type=float, required=True, help="seconds since the epoch")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    deepspeed.init_distributed(dist_backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    worker = Worker(options)
    hand_in(options.out, worker.begin() if options.mode == "begin" else worker.resume())
    while True:  # SIGKILL is how a job of this benchmark ends
        signal.pause()


class Worker:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.engine = llama_engine(options.stage, options.layers)
        memory = {
            "enabled": options.mode != "disk",
            "every": 1 if options.mode == "begin" else NEVER,
            "path": str(options.shared),
        }
        settings: dict[str, Any] = {
            "store": str(options.store),
            "every": NEVER,
            "metrics": {"enabled": False},
            "memory": memory,
        }
        self.ckpt = monitor.attach(self.engine, settings)

    def begin(self) -> dict[str, Any]:
        """A commit, and a version in memory one step newer; digests of both."""
        self.ckpt.resume()
        for _ in range(COMMITTED):
            self.step()
        if self.ckpt.save(wait=True).skipped is not None:
            raise RuntimeError("the commit to resume from was not made")
        digests = {str(COMMITTED): self.digest()}
        self.step()
        self.ckpt.step()
        self.until_kept()
        return {"digests": digests | {str(KEPT): self.digest()}, "bytes": self.nbytes()}

    def until_kept(self) -> None:
        tier = Tier(self.options.shared, open_catalog(LocalFiles(self.options.store)).store_id)
        until, ranks = time.monotonic() + 60, set(range(dist.get_world_size()))
        while not any(save.step == KEPT and set(held) == ranks for save, held in scan_node(tier).versions.items()):
            if time.monotonic() > until:
                raise RuntimeError(f"no version of step {KEPT} of all ranks in memory after 60 s")
            time.sleep(0.05)

    def resume(self) -> dict[str, Any]:
        """What it took, of the slowest rank, and what came of it."""
        reached = time.time() - self.options.started
        step = 0

        def resumed() -> None:
            nonlocal step
            step = self.ckpt.resume()

        seconds = self.timed(resumed)
        back = time.time()
        digest = self.digest()
        copied = self.copied()
        first = self.timed(self.step)
        return {
            "resume": seconds,
            "first_step": self.worst(reached) + (back - self.options.started - reached) + first,
            "copy": copied,
            "step": step,
            "digest": digest,
            "bytes": self.nbytes(),
        }

    def copied(self) -> float:
        """Seconds for one copy of the state in memory, into pages that are there: the floor of a resume."""
        tensors = [piece.tensor for piece in adapter_for(self.engine).owned()]
        copies = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

        def copy() -> None:
            for mine, tensor in zip(copies, tensors, strict=True):
                mine.copy_(tensor)

        return self.timed(copy)

    def digest(self) -> str:
        """Of all that this rank would save."""
        state = xxhash.xxh3_128()
        for piece in adapter_for(self.engine).owned():
            state.update(piece.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return state.hexdigest()

    def nbytes(self) -> float:
        """Of the state, all ranks together."""
        own = sum(p.tensor.numel() * p.tensor.element_size() for p in adapter_for(self.engine).owned())
        box = torch.tensor([own], dtype=torch.float64)
        dist.all_reduce(box)
        return float(box)

    def step(self) -> None:
        train_step(self.engine, 64)

    def timed(self, action: Callable[[], object]) -> float:
        dist.barrier()
        began = time.perf_counter()
        action()
        return self.worst(time.perf_counter() - began)

    def worst(self, value: float) -> float:
        box = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return float(box)


if __name__ == "__main__":
    main()
