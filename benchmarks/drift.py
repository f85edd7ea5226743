"""What measuring drift costs and how well the sketch measures it.

    python benchmarks/drift.py [--layers 8] [--rounds 3] [--device cpu] [--json FILE]

Three parts, each side by side in one run:

1. training: a Llama on the standard library's sources, AdamW in fp32 on the CPU; every 10 steps one pass over all
   layers and slots. The pass against those steps; and the sketch's drift against that in float64.
2. speed, one thread: the pass against a copy of the same bytes and against the simpler sketch (a row of random
   signs times the values as rows of k), memory against the shard, on a shard of 50 million parameters.
3. accuracy over seeds: the sketch and the simpler one, on updates of known length.

Exits 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import ast
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.figures import Figure, report
from monitor.observe.drift_meter import drift_ratio
from monitor.observe.layers import find_layers
from monitor.observe.sketch_meter import SketchMeter
from store.names import Unit

State = dict[Unit, list[torch.Tensor]]
WIDTH = 4099
EVERY = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, default=8, help="8 make 14 million parameters")
    parser.add_argument("--rounds", type=int, default=3, help="of 10 steps and a pass")
    parser.add_argument("--tokens", type=int, default=2048, help="in a batch")
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--device", default="cpu", help="of the training; the speed of one thread is a CPU's")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.manual_seed(0)
    figures = training(options.layers, options.rounds, options.tokens, options.device)
    torch.set_num_threads(1)
    figures += speed() if options.device == "cpu" else []
    figures += accuracy(options.seeds)
    return report("measuring drift", figures, options.json)


def clock(job: Callable[[], object], now: Callable[[], float] = time.perf_counter) -> float:
    wait_for_device()
    began = now()
    job()
    wait_for_device()
    return now() - began


def wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def training(layers: int, rounds: int, tokens: int, device: str) -> list[Figure]:
    trainer = Trainer(layers, tokens, device)
    trainer.steps(2)
    sketch, before = SketchMeter(WIDTH), {}
    for unit, pieces in trainer.state().items():
        sketch.reset(unit, pieces)
        before[unit] = torch.cat(list(pieces)).double()
    measure_all(sketch, trainer.state())  # once before: on a device, kernels are compiled
    shares, errors = [], []
    for _ in range(rounds):
        spent = clock(lambda: trainer.steps(EVERY))
        shares.append(clock(lambda: measure_all(sketch, trainer.state())) / spent)
        for unit, pieces in trainer.state().items():
            seen, then = sketch.measure(unit, pieces), before[unit]
            true = float((torch.cat(list(pieces)).double() - then).norm() / then.norm())
            errors.append(abs(drift_ratio(seen.moved_sq, seen.reference_sq) / true - 1))
    millions = sum(parameter.numel() for parameter in trainer.model.parameters()) / 1e6
    return [
        Figure("pass", 100 * statistics.median(shares), "%", f"10 steps, Llama of {millions:.0f} M", 1.0),
        Figure("drift off, middle", 100 * statistics.median(errors), "%", "in float64, real training"),
        Figure("drift off, worst", 100 * max(errors), "%", "in float64, real training", 5.0),
    ]


def measure_all(meter: SketchMeter, state: State) -> None:
    """Measure all units as a decision does."""
    found = meter.measure_many(state)
    for unit, pieces in state.items():
        if unit not in found:
            meter.measure(unit, pieces)


class Trainer:
    """A Llama that learns Python from its standard library, byte by byte."""

    def __init__(self, layers: int, tokens: int, device: str) -> None:
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=layers,
            num_attention_heads=6,
            num_key_value_heads=6,
        )
        self.device = device
        self.model = LlamaForCausalLM(config).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.batch = tokens // 256
        sources = sorted(Path(ast.__file__).parent.glob("*.py"))
        self.text = torch.tensor(list(b"".join(path.read_bytes() for path in sources[:60])))

    def steps(self, count: int) -> None:
        for _ in range(count):
            starts = torch.randint(len(self.text) - 256, (self.batch,)).tolist()
            batch = torch.stack([self.text[start : start + 256] for start in starts]).to(self.device)
            loss = self.model(input_ids=batch, labels=batch).loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def state(self) -> State:
        parameters = dict(self.model.named_parameters())
        state: State = {}
        for layer in find_layers(self.model, list(parameters)):
            for fqn in layer.fqns:
                slots = {"fp32": parameters[fqn].detach(), **self.optimizer.state[parameters[fqn]]}
                del slots["step"]
                for slot, value in slots.items():
                    state.setdefault(Unit(layer.name, slot), []).append(value.view(-1))
        return state


def shard() -> State:
    """12 layers of 4.2 M parameters, three slots: 50 M parameters, 600 MB."""
    sizes = [*[590 * 590] * 4, *[590 * 1590] * 3, 590, 590]
    slots = ("fp32", "exp_avg", "exp_avg_sq")
    units = [Unit(f"layers.{i}", slot) for i in range(12) for slot in slots]
    return {unit: [torch.randn(size) for size in sizes] for unit in units}


def speed() -> list[Figure]:
    state = shard()
    targets = {unit: [torch.empty_like(piece) for piece in pieces] for unit, pieces in state.items()}
    meter = SketchMeter(WIDTH)
    for unit, pieces in state.items():  # all three signatures of every unit held: the most it ever takes
        meter.reset(unit, pieces)
        meter.measure(unit, pieces)
        meter.stage(unit, pieces)
    rows = RowVector(0)

    def copy() -> None:
        for unit, pieces in state.items():
            for target, piece in zip(targets[unit], pieces, strict=True):
                target.copy_(piece)

    jobs = {
        "sketch": lambda: [meter.measure(unit, pieces) for unit, pieces in state.items()],
        "copy": copy,
        "rows": lambda: [rows.signature(piece) for pieces in state.values() for piece in pieces],
    }
    times = taken_in_turns(jobs, 15)
    size = sum(piece.numel() * piece.element_size() for pieces in state.values() for piece in pieces)

    def ratio(name: str) -> float:
        return statistics.median(a / b for a, b in zip(times[name], times["copy"], strict=True))

    measured = meter._measured.values()
    signatures = sum(one.signature.values.nbytes + (0 if one.sample is None else one.sample.nbytes) for one in measured)
    signatures += sum(one.values.nbytes for one in meter._references.values())
    parts = [part for board in meter._projection._boards.values() for part in vars(board).values()]
    boards = sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
    return [
        Figure("pass, time", ratio("sketch"), "x", "copy of the same bytes, one thread"),
        Figure("row-vector pass, time", ratio("rows"), "x", "copy of the same bytes, one thread"),
        Figure("pass, speed", size / statistics.median(times["sketch"]) / 1e9, "GB/s", "reading, one thread"),
        Figure("signatures, most ever", 100 * signatures / size, "%", "shard of 50 M parameters", 0.5),
        Figure("tables and boards", boards / 2**20, "MiB", "once a device"),
    ]


def taken_in_turns(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            # One thread's own time: what else runs on the machine weighs less.
            times[name].append(clock(job, time.thread_time))
    return times


@dataclass(frozen=True)
class RowVector:
    """The simpler sketch: values as rows of k, times a row of random signs."""

    seed: int

    def signature(self, values: torch.Tensor) -> torch.Tensor:
        rows = values[: values.numel() // WIDTH * WIDTH].view(-1, WIDTH)
        generator = torch.Generator().manual_seed(self.seed)
        signs = torch.randint(0, 2, (len(rows),), generator=generator, dtype=values.dtype) * 2 - 1
        rest = values[rows.numel() :]
        signature = signs @ rows
        signature[: len(rest)] += rest
        return signature


def updates() -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    size = 250 * 2 * WIDTH
    yield "dense", randn(size)
    yield "constant", torch.ones(size)
    yield "second moments", randn(size).square()
    for width in (1024, WIDTH, 2 * WIDTH):
        rows = size // width
        yield f"rank one, width {width}", torch.outer(randn(rows), randn(width)).flatten()
        column = torch.zeros(rows, width)
        column[:, 3] = randn(rows)
        yield f"column, width {width}", column.flatten()


def accuracy(seeds: int) -> list[Figure]:
    figures = []
    for name, update in updates():
        length = float(update.double().norm())
        sketched = [measured(update, seed) / length - 1 for seed in range(seeds)]
        rows = [float(RowVector(seed).signature(update).double().norm()) / length - 1 for seed in range(seeds)]
        figures += [
            Figure(f"off, {name}", 100 * rms(sketched), "% rms", f"true length, {seeds} seeds", 2.5),
            Figure(f"off, {name}, row vector", 100 * rms(rows), "% rms", f"true length, {seeds} seeds"),
        ]
    return figures


def measured(update: torch.Tensor, seed: int) -> float:
    unit, meter = Unit("layer", "fp32"), SketchMeter(WIDTH, seed)
    meter.reset(unit, [torch.zeros(1).expand(update.numel())])
    return math.sqrt(meter.measure(unit, [update]).moved_sq)


def rms(values: list[float]) -> float:
    return math.sqrt(statistics.fmean(value * value for value in values))


if __name__ == "__main__":
    sys.exit(main())
