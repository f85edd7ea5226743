"""What recording the drift trace costs: decisions with it and without, in turns, on the same state.

    python benchmarks/trace.py [--rounds 15] [--large 100] [--json FILE]

A plain model with AdamW in fp32 on the CPU, its state moved a little before every decision. Two checkpointers on the
same model, one with ``trace``, one without; both measure every layer and slot, and write nothing (policy ``observe``).
One thread, whose own time counts: what else runs on the machine weighs less. Parts: a small model of 1.3 million
parameters, one of ``--large``, and the sketches alone of a model with 126 layers. Besides time, the bytes of a decision
in the trace and the memory of the sketches that are kept. Exits 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import monitor
from benchmarks.figures import Figure, report
from monitor.observe.drift_meter import Signature
from monitor.telemetry.drift_history import DriftHistory
from monitor.telemetry.trace import TraceRecorder

WIDTH = 4099
ANCHORS = 6
CLIMBED = 33
"""Decisions after which everything is compared that ever is."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--large", type=int, default=100, help="million parameters")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    figures = model(1.3, 8, 10 * options.rounds, None)
    figures += model(options.large, 12, options.rounds, 1.1)
    figures += ladder(126 * 3 + 7)
    return report("recording the drift trace", figures, options.json)


class Layers(nn.Module):
    """Blocks of one matrix each, so many parameters together."""

    def __init__(self, millions: float, count: int) -> None:
        super().__init__()
        side = int(math.sqrt(millions * 1e6 / count))
        self.blocks = nn.ModuleList([nn.Linear(side, side) for _ in range(count)])


class Trained:
    """A model and the state that AdamW has of it, without the time of a real step."""

    def __init__(self, millions: float, count: int) -> None:
        self.model = Layers(millions, count)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)

    def checkpointer(self, store: Path, **settings: Any) -> Any:
        values = {"store": str(store), "every": 1, "policy": "observe", "metrics": {"enabled": False}, **settings}
        return monitor.attach((self.model, self.optimizer), values)


def model(millions: float, count: int, rounds: int, goal: float | None) -> list[Figure]:
    trained = Trained(millions, count)
    what = f"{millions:.4g} M parameters, {3 * count} units"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        on = trained.checkpointer(path / "on")
        off = trained.checkpointer(path / "off", trace={"enabled": False})
        times: dict[str, list[float]] = {"on": [], "off": []}
        for turn in range(CLIMBED + rounds):
            trained.optimizer.step()
            pair = [("on", on), ("off", off)]
            for name, checkpointer in pair if turn % 2 else pair[::-1]:
                began = time.thread_time()
                checkpointer.step()
                if turn >= CLIMBED:
                    times[name].append(time.thread_time() - began)
        recorder = next(one for one in on._job.listeners.all if isinstance(one, TraceRecorder))
        memory = 0 if recorder._history is None else bytes_of(recorder._history)
        on.close(save=False)
        off.close(save=False)
        written = (path / "on.trace.jsonl").read_bytes().splitlines()
    ratios = [a / b for a, b in zip(times["on"], times["off"], strict=True)]
    lines = CLIMBED + rounds
    share = 100 * memory / (12e6 * millions)
    return [
        Figure("time of a decision", statistics.median(ratios), "x", f"without a trace, {what}", goal),
        Figure("time of a decision", 1e3 * statistics.median(times["on"]), "ms", what),
        Figure("and without a trace", 1e3 * statistics.median(times["off"]), "ms", what),
        Figure("bytes of a decision", sum(map(len, written)) / lines / 3 / count, "B", f"a unit, {what}"),
        Figure("sketches kept", share, "%", f"the state, {what}"),
    ]


def bytes_of(history: DriftHistory) -> int:
    return sum(decision.values.nbytes for decision in history._decisions.values())


def ladder(units: int) -> list[Figure]:
    """The part in the training thread that grows with units, not with parameters."""
    kept = DriftHistory(ANCHORS, WIDTH)
    times = []
    for number in range(2 * CLIMBED):
        found = [Signature(torch.randn(WIDTH), (WIDTH,), True) for _ in range(units)]
        began = time.thread_time()
        kept.add(number, found)
        times.append(time.thread_time() - began)
    return [
        Figure("comparing sketches", 1e3 * statistics.median(times[CLIMBED:]), "ms", f"a decision, {units} units"),
        Figure("sketches kept", bytes_of(kept) / 2**20, "MiB", f"{units} units", 60.0),
    ]


if __name__ == "__main__":
    sys.exit(main())
