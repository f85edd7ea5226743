"""One process of ``peers.py``: trains with one saver and measures it, or loads what another process left.

train   saves in turn with plain steps; stall, lost time, slowest step, time to durable
kill    saves one step to its end, begins another, and trains on until it is killed
load    loads each of the steps given, and compares the values with the digests of those steps
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from benchmarks.peers_savers import SAVERS, Saver
from benchmarks.ranks import hand_in

LEAST_STEPS, MOST_STEPS = 3, 60
"""Beside one save."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["train", "kill", "load"])
    parser.add_argument("--peer", choices=SAVERS, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--rows", type=int, required=True, help="0: as many as make a step of --seconds")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--saves", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, nargs="*", default=[], help="to load")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    rendezvous = options.out.with_suffix(".group")
    rendezvous.unlink(missing_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    training = Training(options)
    if options.mode == "train":
        hand_in(options.out, training.measured(options.saves))
    elif options.mode == "kill":
        training.until_killed()
    else:
        hand_in(options.out, training.loaded(options.steps))
    dist.destroy_process_group()


class Block(torch.nn.Module):
    """A layer of about a million parameters, of the sizes that layers of transformers have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = value + self.down(torch.nn.functional.gelu(self.up(self.norm(value))))
        return out


class Training:
    """The same training for every saver: blocks in fp32 with AdamW, so that a parameter has 12 bytes of state."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(1)
        self.width, self.options = (512 if options.megabytes >= 50 else 128), options
        blocks = max(1, round(options.megabytes * 1e6 / 12 / (4 * self.width**2 + 5 * self.width)))
        self.model = torch.nn.Sequential(*(Block(self.width) for _ in range(blocks)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.rows: int = options.rows or 8
        self.backward()
        self.update()  # the optimizer's state exists from now on
        self.saver: Saver = SAVERS[options.peer](self.model, self.optimizer, options.folder)
        self.step, self.stalled = 0, 0.0
        if options.mode != "load":
            self.saver.begin()
            self.marker("baseline")

    def marker(self, name: str) -> None:
        """Tell the parent what this process is at. It looks at memory, or kills."""
        self.options.out.with_suffix(".phase").write_text(name)

    def backward(self) -> None:
        value = torch.randn(self.rows, self.width)
        self.model(value).square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def one(self) -> float:
        """Seconds of a step. What it waits for copies before it may change the state is added to ``stalled``."""
        began = time.perf_counter()
        self.backward()
        reached = time.perf_counter()
        self.saver.before_update()
        with self.saver.updating():
            self.stalled += time.perf_counter() - reached
            self.update()
        self.step += 1
        self.saver.after_update()
        return time.perf_counter() - began

    def calibrate(self) -> None:
        """Choose the rows with which a step takes as long as was asked for."""
        if self.options.rows:
            return
        taken = min(self.one() for _ in range(3))
        while taken < self.options.seconds / 2:  # a few rows take no longer than none: the weights have to be read
            self.rows *= 2
            taken = min(self.one() for _ in range(2))
        self.rows = max(1, round(self.rows * self.options.seconds / taken))
        self.one()

    def measured(self, saves: int) -> dict[str, Any]:
        """What ``saves`` saves cost, after two that are not counted; the last step is left on the disk."""
        saver = self.saver
        time.sleep(0.2)  # the parent looks at the memory before the first save
        self.calibrate()
        self.one()  # no peer needs to take step 0 for a step
        for _ in range(2):
            self.beside()
        seen: dict[str, Any] = {}
        for _ in range(saves):
            plain = [self.one() for _ in range(6)]
            for name, value in (self.beside() | {"step": median(plain)}).items():
                seen.setdefault(name, []).append(value)
            self.one()
        for _ in range(saves):
            seen.setdefault("durable", []).append(self.durable())
            seen.setdefault("floor", []).append(self.floor())
        self.marker("saving")
        self.beside()
        self.marker("saved")
        self.one()
        kept = self.step
        digest = self.digest()
        saver.save(kept)
        saver.wait()
        seen |= {"kept": kept, "digests": {str(kept): digest}, "bytes": self.nbytes(), "rows": self.rows}
        seen |= {"tensors": len(saver.tensors()), "version": saver.version()}
        saver.close()
        return seen

    def beside(self) -> dict[str, float]:
        """A save, and steps beside it until it is finished."""
        saver, saved = self.saver, self.step
        os.sync()
        waited, began = self.stalled + saver.waited(), time.perf_counter()
        saver.save(saved)
        called = time.perf_counter() - began
        steps: list[float] = []
        syncing: list[threading.Thread] = []
        while (self.unsynced(saved, syncing) and len(steps) < MOST_STEPS) or len(steps) < LEAST_STEPS:
            steps.append(self.one())
        total = time.perf_counter() - began
        stall = called + self.stalled + saver.waited() - waited
        saver.wait()
        for thread in syncing:
            thread.join()
        saver.drop(saved)
        return {"stall": stall, "total": total, "steps": len(steps), "slowest": max(called + steps[0], *steps[1:])}

    def unsynced(self, saved: int, syncing: list[threading.Thread]) -> bool:
        """Whether the save is not finished, or not on the disk. Once it is finished, a thread brings it there."""
        if not syncing and self.saver.done():
            syncing.append(threading.Thread(target=sync, args=(self.saver.path(saved),)))
            syncing[0].start()
        return not syncing or syncing[0].is_alive()

    def durable(self) -> float:
        """Seconds of a save without training beside it, until its files and their folders are on the disk."""
        saver, saved = self.saver, self.step
        os.sync()
        began = time.perf_counter()
        saver.save(saved)
        saver.before_update()
        saver.wait()
        sync(saver.path(saved))
        seconds = time.perf_counter() - began
        saver.drop(saved)
        self.one()
        return seconds

    def floor(self) -> float:
        """Seconds of a plain write of the same bytes with one fsync."""
        tensors = [tensor.detach().contiguous() for tensor in self.saver.tensors()]
        path = self.options.out.with_suffix(".floor")
        os.sync()
        began = time.perf_counter()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for tensor in tensors:
            data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            while data:
                data = data[os.write(descriptor, data[: 1 << 24]) :]
        os.fsync(descriptor)
        os.close(descriptor)
        seconds = time.perf_counter() - began
        path.unlink()
        return seconds

    def until_killed(self) -> None:
        """One step on the disk, and another begun; then steps until the end."""
        saver, digests = self.saver, {}
        for last in (False, True):
            for _ in range(2):
                self.one()
            digests[str(self.step)] = self.digest()
            if last:
                hand_in(self.options.out, {"digests": digests})
                os.sync()
                self.marker("saving")
            saver.save(self.step)
            if not last:
                saver.before_update()
                saver.wait()
                sync(saver.path(self.step))
        while True:
            self.one()

    def loaded(self, steps: list[int]) -> list[dict[str, Any]]:
        """For each step, what came back: its number and digest with the seconds it took, or why nothing did."""
        told = []
        for step in steps:
            began = time.perf_counter()
            try:
                found = self.saver.load(step)
            except BaseException as error:  # DCP's own error is no Exception
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                told.append({"refused": f"{type(error).__name__}: {error}"[:200]})
            else:
                seconds = time.perf_counter() - began
                told.append({"step": found, "seconds": seconds, "digest": self.digest()})
            self.saver.after_load()
        return told

    def digest(self) -> str:
        """Of every byte of every tensor of model and optimizer."""
        found = xxhash.xxh3_128()
        for tensor in self.saver.tensors():
            found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.saver.tensors())


def sync(path: Path) -> None:
    """Fsync a file, or all below a folder, and the folders that name them."""
    for one in (path, *(path.rglob("*") if path.is_dir() else ()), path.parent):
        descriptor = os.open(one, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


if __name__ == "__main__":
    main()
