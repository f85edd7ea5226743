"""What a save costs beside training on one device: copies, stalls, drift and encoding, against plain copies.

    python benchmarks/gpu_copies.py --folder DIR [--gigabytes 10] [--device cuda] [--rounds 1] [--parts PART ...]
                                    [--profile] [--json FILE]

Plain PyTorch with AdamW on layers of 16.8 million parameters, as many as make the state so large (float32 weights and
moments); a step takes about a second. Rates are told as times, since goals are upper bounds: 1.25 x the time of a plain
copy is 80 % of its rate. Exits 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import monitor
from benchmarks.drift import measure_all
from benchmarks.figures import Figure, report
from monitor.observe.sketch_meter import SketchMeter
from monitor.save.staging import StagingPool
from monitor.save.torch_codecs import EncodedCopy
from store.encoding import ENCODINGS, WRITABLE
from store.names import Unit

BLOCK = 1 << 28  # bytes of one plain copy
PARTS = ("stalls", "drift", "copies", "encodings", "peers")


class Trainer:
    """Layers of ``width`` x ``width``, whose step takes about ``seconds``."""

    def __init__(self, device: str, gigabytes: float, seconds: float) -> None:
        self.device, cuda = device, device == "cuda"
        width = 4096 if cuda else 256
        count = max(1, round(gigabytes * 1e9 / (12 * width * width)))
        torch.set_float32_matmul_precision("high")
        layers = [nn.Linear(width, width, bias=False, device=device) for _ in range(count)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=cuda)
        self.batch = torch.randn(4096 if cuda else 64, width, device=device)
        self.turns = 1
        self.step()
        self.turns = max(1, round(seconds / max(1e-4, self.timed(self.step))))

    def step(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.turns):
            self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def timed(self, action: Callable[[], object]) -> float:
        """Return the seconds until the device has done it."""
        self.wait()
        began = time.perf_counter()
        action()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def state(self) -> dict[Unit, list[torch.Tensor]]:
        """Return all weights and moments, by layer and slot."""
        found: dict[Unit, list[torch.Tensor]] = {}
        for index, weight in enumerate(self.model.parameters()):
            slots = {"fp32": weight.detach(), **self.optimizer.state[weight]}
            for slot in ("fp32", "exp_avg", "exp_avg_sq"):
                found[Unit(f"layers.{index}", slot)] = [slots[slot].view(-1)]
        return found


def copies(trainer: Trainer, folder: Path, rounds: int) -> list[Figure]:
    """Copy all state before ``step()`` returns, and compare with plain copies into one pinned block."""
    ckpt = _attached(trainer, folder / "eager", "eager")
    tensors = [piece for pieces in trainer.state().values() for piece in pieces]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    target = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=trainer.device == "cuda")

    def plain() -> None:
        for tensor in tensors:
            for part in tensor.view(torch.uint8).split(BLOCK):
                target[: part.numel()].copy_(part, non_blocking=True)

    ratios, rates = [], []
    for _ in range(rounds):
        trainer.step()
        seconds = trainer.timed(plain)
        ours = trainer.timed(lambda: _save(ckpt))
        ckpt.flush()
        ratios.append(ours / seconds)
        rates.append(nbytes / ours / 1e9)
    ckpt.close(save=False)
    shutil.rmtree(folder / "eager")
    return [
        Figure("state", nbytes / 1e9, "GB"),
        Figure("copy, eager", statistics.median(rates), "GB/s"),
        Figure("copy, eager, time", statistics.median(ratios), "x", "plain pinned copy of the same bytes", 1.25),
    ]


def stalls(trainer: Trainer, folder: Path, rounds: int, profiled: bool = False) -> list[Figure]:
    """Copy beside a step: how long ``ckpt.step()`` takes, how long the optimizer waits, how long the step is."""
    ckpt = _attached(trainer, folder / "lazy", "lazy")
    _save(ckpt)
    ckpt.flush()
    found: dict[str, list[float]] = {"step": [], "save": [], "wait": [], "beside": []}
    for _ in range(rounds):
        found["step"].append(trainer.timed(trainer.step))
        waited = _waited(ckpt)
        began = time.perf_counter()
        _save(ckpt)
        found["save"].append(time.perf_counter() - began)
        found["beside"].append(trainer.timed(trainer.step))
        found["wait"].append(_waited(ckpt) - waited)
        ckpt.flush()
    if profiled:
        trainer.wait()
        _profile(lambda: _save(ckpt))
        ckpt.flush()
    ckpt.close(save=False)
    shutil.rmtree(folder / "lazy")
    middle = {name: statistics.median(values) for name, values in found.items()}
    return [
        Figure("step", middle["step"], "s"),
        Figure(
            "stall, lazy", 1000 * (middle["save"] + middle["wait"]), "ms", f"beside a step of {middle['step']:.2f} s", 2
        ),
        Figure("of it, wait of the optimizer's step", 1000 * middle["wait"], "ms"),
        Figure("step beside a copy", middle["beside"] / middle["step"], "x", "step without", 1.03),
    ]


def peers(trainer: Trainer, folder: Path, stall: float) -> list[Figure]:
    """Save the same state by DCP, which copies into pinned buffers that it keeps, and by torch.save."""
    state = {str(unit): tensor for unit, (tensor,) in trainer.state().items()}
    stager = BlockingAsyncStager(cache_staged_state_dict=True) if trainer.device == "cuda" else None
    stalls = []
    for turn in range(2):  # the first makes the buffers
        trainer.step()
        trainer.wait()
        began = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=str(folder / f"dcp-{turn}"), async_stager=stager)
        stalls.append(time.perf_counter() - began)
        future.result()
        shutil.rmtree(folder / f"dcp-{turn}")
    plain = trainer.timed(lambda: torch.save(state, folder / "state.pt"))
    (folder / "state.pt").unlink()
    return [
        Figure("stall of DCP async_save", 1000 * stalls[-1], "ms"),
        Figure("stall of torch.save", 1000 * plain, "ms"),
        Figure("stall, lazy, of DCP's", stall / stalls[-1], "x", "DCP async_save, buffers kept", 1 / 3),
        Figure("stall, lazy, of torch.save's", stall / plain, "x", "torch.save"),
    ]


def drift(trainer: Trainer, rounds: int, profiled: bool = False) -> list[Figure]:
    """Measure all state with the sketch, against ten steps and against reading it."""
    state, meter = trainer.state(), SketchMeter()
    pieces = [piece for unit in state.values() for piece in unit]
    nbytes = sum(piece.nbytes for piece in pieces)
    room = torch.empty_like(pieces[0])
    for unit, parts in state.items():
        meter.reset(unit, parts)
    measure_all(meter, state)
    seconds = [trainer.timed(lambda: measure_all(meter, state)) for _ in range(3 * rounds)]
    single = trainer.timed(lambda: [meter.measure(*item) for item in state.items()])
    moved = [trainer.timed(lambda: [room.copy_(piece) for piece in pieces]) for _ in range(3 * rounds)]
    measured, read = statistics.median(seconds), statistics.median(moved) / 2  # a copy reads and writes
    step = trainer.timed(trainer.step)
    if profiled:
        _profile(lambda: measure_all(meter, state))
    return [
        Figure("drift pass", nbytes / measured / 1e9, "GB/s"),
        Figure("drift pass, time", measured / read, "x", "reading at the bandwidth of a copy", 1 / 0.6),
        Figure("drift pass, a unit after the other", single / read, "x", "the same"),
        Figure("drift pass, share", 100 * measured / (10 * step), "%", "ten steps", 1.0),
    ]


def encodings(trainer: Trainer, rounds: int) -> list[Figure]:
    """Encode one layer after the other on the device, and copy the bytes to pinned memory."""
    weights = [weight.detach().abs().view(-1) for weight in trainer.model.parameters()][:32]
    values = torch.cat(weights)
    figures = []
    for name in (name for name in WRITABLE if not ENCODINGS[name].lossless):
        cuda = values.device if values.is_cuda else None
        (buffer,) = StagingPool().take_bytes(
            Unit("all", name), [ENCODINGS[name].stored_bytes(values.numel(), "F32")], cuda
        )
        copy = EncodedCopy(values, name, buffer, torch.empty(0))
        seconds = [trainer.timed(copy.begin) for _ in range(rounds + 1)][1:]
        copy.finish()
        if copy.no_memory or not copy.held:
            raise RuntimeError(f"{name} was not encoded: no_memory={copy.no_memory}, held={copy.held}")
        rate = values.nbytes / statistics.median(seconds) / 1e9
        figures.append(Figure(f"{name}, encoded", rate, "GB/s"))
        goal = 1.0 if trainer.device == "cuda" else None
        figures.append(Figure(f"{name}, time for 20 GB", 20 / rate, "s", "20 GB/s", goal))
    return figures


def _attached(trainer: Trainer, store: Path, staging: str) -> monitor.Checkpointer:
    settings = {
        "store": str(store),
        "every": 1,
        "staging": staging,
        "metrics": {"enabled": False},
        "retention": {"keep_last": 1, "log_spaced": False},
    }
    ckpt = monitor.attach((trainer.model, trainer.optimizer), settings)
    ckpt.resume()
    return ckpt


def _save(ckpt: monitor.Checkpointer) -> None:
    """Decide, which saves. It is called only where a save is wanted, so it counts fewer steps than there are."""
    report = ckpt.step()
    if report is None or report.skipped:
        raise RuntimeError(f"nothing was saved: {report}")


def _profile(call: Callable[[], object]) -> None:
    with cProfile.Profile() as profile:
        call()
    for order in ("tottime", "cumulative"):
        pstats.Stats(profile).sort_stats(order).print_stats(40)


def _waited(ckpt: monitor.Checkpointer) -> float:
    return ckpt.metrics.registry.get_sample_value("driftpoint_copy_wait_seconds_sum") or 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", type=Path, required=True, help="for a store of twice the state")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a step")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="peers need stalls")
    parser.add_argument("--profile", action="store_true", help="print what the training thread does")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    trainer = Trainer(options.device, options.gigabytes, options.seconds)
    folder, rounds = options.folder, options.rounds
    figures: list[Figure] = []

    def stall() -> float:
        return next(figure.value for figure in figures if figure.name == "stall, lazy") / 1000

    parts: dict[str, Callable[[], list[Figure]]] = {
        "stalls": lambda: stalls(trainer, folder, rounds, options.profile),
        "drift": lambda: drift(trainer, rounds, options.profile),
        "copies": lambda: copies(trainer, folder, rounds),
        "encodings": lambda: encodings(trainer, rounds),
        "peers": lambda: peers(trainer, folder, stall()),
    }
    status = 0
    for part in options.parts:  # told after each: one that runs out of time loses only what it would have found
        figures += parts[part]()
        status = report(f"a save beside training, on {options.device}", figures, options.json)
    return status


if __name__ == "__main__":
    sys.exit(main())
