"""One rank of ``scaling.py``: one part of it, on models whose tensors are tiny, so that only their number counts."""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import monitor
from benchmarks.ranks import hand_in

NEVER = 1 << 30
CALLS = {"open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "os.link", "os.rmdir", "os.truncate"}
"""Audit events that are calls to the storage."""

COLLECTIVES = (
    *("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce", "barrier"),
    *(
        "reduce_scatter",
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
        "monitored_barrier",
        "send",
        "recv",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--counts", type=int, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--started", type=float, required=True, help="not used")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hand_in(options.out, PARTS[options.part](options))
    while True:  # SIGKILL by the parent, once all ranks have told
        signal.pause()


class Job:
    """A model of ``count`` tensors in layers of ten, with AdamW."""

    def __init__(self, count: int, width: int = 16) -> None:
        torch.manual_seed(1)
        sizes = [min(10, count - start) for start in range(0, count, 10)]
        layers = (torch.nn.ParameterList(torch.randn(width) for _ in range(size)) for size in sizes)
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.step()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def attach(self, store: Path, **settings: Any) -> monitor.Checkpointer:
        common = {"store": str(store), "metrics": {"enabled": False}}
        return monitor.attach((self.model, self.optimizer), {**common, **settings})

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}


def tensors(options: argparse.Namespace) -> dict[str, Any]:
    """Processor seconds of this thread, except where a name says that it is the whole process or wall time."""
    job, store = Job(options.counts[0]), options.folder / "store"
    seen: dict[str, Any] = {"decision": [], "observed": [], "passes": [], "passing": []}
    collector = FullCollections()
    for name, settings in (("decision", {}), ("observed", {"policy": {"name": "observe"}})):
        ckpt = job.attach(store, every=1, **settings)
        ckpt.resume()
        for number in range(options.repeats + 2):  # the first saves are not like the others
            job.step()
            collector.seconds.clear()
            began = time.thread_time()
            ckpt.step()
            if number > 1:
                seen[name].append(time.thread_time() - began)
            ckpt.flush()
            if number > 1 and name == "decision":
                seen["passes"].append(len(collector.seconds))
                seen["passing"].append(sum(collector.seconds))
        ckpt.close(save=False)
    other = Job(options.counts[0])
    began, wall = time.process_time(), time.perf_counter()
    ckpt = other.attach(store, every=NEVER)
    seen |= {"attach": time.process_time() - began, "attach_wall": time.perf_counter() - wall}
    began, wall = time.process_time(), time.perf_counter()
    ckpt.resume()
    seen |= {"resume": time.process_time() - began, "resume_wall": time.perf_counter() - wall}
    ckpt.close(save=False)
    seen["torch"], seen["dcp"] = torch_load(job, options.folder), dcp_load(job, options.folder)
    return seen


class FullCollections:
    """Wall seconds of each pass of the garbage collector over all objects, in any thread."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        gc.callbacks.append(self.saw)

    def saw(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.began = time.perf_counter()
        elif info["generation"] == 2:
            self.seconds.append(time.perf_counter() - self.began)


def torch_load(job: Job, folder: Path) -> float:
    torch.save(job.state(), folder / "state.pt")
    began = time.process_time()
    state = torch.load(folder / "state.pt", weights_only=True)
    job.model.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optim"])
    return time.process_time() - began


def dcp_load(job: Job, folder: Path) -> float:
    dcp.save(job.state(), checkpoint_id=str(folder / "dcp"))
    began = time.process_time()
    dcp.load(job.state(), checkpoint_id=str(folder / "dcp"))
    return time.process_time() - began


def commits(options: argparse.Namespace) -> dict[str, Any]:
    """A store that keeps all; at each of the counts, what some saves take. What is seen so far is left in a file."""
    job, seen, calls = Job(10), {}, StorageCalls()
    ckpt = job.attach(options.folder / "store", every=NEVER, retention={"keep_last": NEVER})
    ckpt.resume()
    there = 0
    for count in sorted(options.counts):
        while there < count:
            job.step()
            ckpt.step()
            ckpt.save(wait=True)
            there += 1
        one: dict[str, list[float]] = {"seconds": [], "wall": [], "calls": []}
        for _ in range(options.repeats):
            job.step()
            ckpt.step()
            before, began, wall = calls.count, time.process_time(), time.perf_counter()
            ckpt.save(wait=True)
            one["wall"].append(time.perf_counter() - wall)
            ckpt.flush()
            one["seconds"].append(time.process_time() - began)
            one["calls"].append(calls.count - before)
            there += 1
        seen[str(count)] = one
        hand_in(options.folder / "partly.json", seen)
    ckpt.close(save=False)
    return seen


class StorageCalls:
    """Counts the calls that Python makes to files and folders, in all threads of this process."""

    def __init__(self) -> None:
        self.count = 0
        sys.addaudithook(self.heard)

    def heard(self, event: str, _: tuple[Any, ...]) -> None:
        self.count += event in CALLS


def ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Collectives that the training thread waits for in a decision, by kind, and the seconds in all of them."""
    job, counted = Job(110), Collectives()
    ckpt = job.attach(options.folder / "store", every=1)
    ckpt.resume()
    seen: dict[str, Any] = {"collectives": [], "seconds": [], "inside": [], "kinds": {}}
    for number in range(options.repeats + 2):
        job.step()
        dist.barrier()
        counted.reset()
        began = time.perf_counter()
        ckpt.step()
        seconds = time.perf_counter() - began
        if number > 1:
            seen["seconds"].append(seconds)
            seen["collectives"].append(sum(counted.kinds.values()))
            seen["inside"].append(counted.seconds)
            seen["kinds"] = dict(+counted.kinds)
        ckpt.flush()
        dist.barrier()
    dist.barrier()
    return seen


class Collectives:
    """Counts collectives that the main thread waits for. Those on objects are counted as the ones on tensors that they
    are made of; one inside another counts once."""

    def __init__(self) -> None:
        self.reset()
        self.inside = False
        for name in COLLECTIVES:
            if (function := getattr(dist.distributed_c10d, name, None)) is not None:
                counting = self.counting(name, function)
                setattr(dist.distributed_c10d, name, counting)
                if hasattr(dist, name):
                    setattr(dist, name, counting)

    def reset(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.seconds = 0.0

    def counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if self.inside or threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            self.inside, began = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside = False
                self.seconds += time.perf_counter() - began
                self.kinds[name] += not kwargs.get("async_op", False)

        return called


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "tensors": tensors,
    "commits": commits,
    "ranks": ranks,
}

if __name__ == "__main__":
    main()
