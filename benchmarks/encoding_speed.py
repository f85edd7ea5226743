"""How fast state is encoded, decoded and packed, and what that costs a save. One thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.encoding_bytes import attached
from benchmarks.figures import Figure
from benchmarks.learner import Learner
from monitor.save.torch_codecs import encoded_chunks, encoder_named
from store.encoding import (
    BF16,
    BF16_INT8,
    CHUNK,
    INT8_BLOCK,
    INT8_LOG2,
    INT8_SHARED_EXPONENT,
    INT8_SHARED_EXPONENT_128,
    INT16_SHARED_EXPONENT,
    chunk_sizes,
    encoding_named,
)
from store.encoding.base import Bytes
from store.encoding.compression import FRAME_HEADER, pack_chunk, unpack_body

GOAL = 1.0
"""Seconds for a gigabyte of float32: 1 GB/s."""

MOMENTS = dict.fromkeys((INT8_BLOCK, INT8_SHARED_EXPONENT, INT8_SHARED_EXPONENT_128), "exp_avg") | {
    INT8_LOG2: "exp_avg_sq"
}
OF_SLOT = dict.fromkeys((BF16, BF16_INT8, INT16_SHARED_EXPONENT), "fp32") | MOMENTS

SAVED = {
    "raw": {},
    "compact": {"encoding": "compact"},
    "compact, zstd 1": {"encoding": "compact", "packing": 1},
    "compact, zstd 1, differences": {"encoding": "compact", "packing": 1, "differences": True},
}
STALL_GOAL = 1.1
"""Of the stall of a raw save: encoding happens beside training, so it should be the same."""


@dataclass(frozen=True)
class Snapshots:
    """The slots of a learner, flat, at one moment and ten steps earlier."""

    now: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]


def snapshots(learner: Learner) -> Snapshots:
    """Takes ten steps."""
    before = {slot: learner.flat(slot) for slot in set(OF_SLOT.values())}
    for _ in range(10):
        learner.step()
    return Snapshots({slot: learner.flat(slot) for slot in before}, before)


def encoders(state: Snapshots, rounds: int) -> list[Figure]:
    """Encoding in torch; decoding in numpy and torch."""
    weights = state.now["fp32"]
    figures = [_speed("torch, plain copy", partial(torch.empty_like(weights).copy_, weights), weights, rounds)]
    for name, slot in OF_SLOT.items():
        values = state.now[slot]
        forth, back = _in_torch(name, values)
        figures += [
            _speed(f"torch, {name}, encode", forth, values, rounds, GOAL),
            _speed(f"torch, {name}, decode", back, values, rounds, GOAL),
            _speed(f"numpy, {name}, decode", _numpy_decode(name, values), values, rounds, GOAL),
        ]
    return figures


def packers(state: Snapshots, rounds: int) -> list[Figure]:
    """Packing what is encoded: by itself, and as the difference to what it was ten steps earlier; and back."""
    figures = []
    for name in (BF16, INT16_SHARED_EXPONENT, *MOMENTS):
        values, older = state.now[OF_SLOT[name]], state.before[OF_SLOT[name]]
        chunks, bases = _encoded(name, values), _encoded(name, older)
        for level in (1, 3):
            for what, base in (("packed", [None] * len(chunks)), ("as a difference", bases)):
                figures += _packing(f"{name}, {what}, zstd {level}", name, values, chunks, base, level, rounds)
    return figures


def _packing(
    title: str,
    name: str,
    values: torch.Tensor,
    chunks: Sequence[Bytes],
    bases: Sequence[Bytes | None],
    level: int,
    rounds: int,
) -> list[Figure]:
    lanes = [encoding_named(name).lanes(part.numel(), "F32") for part in torch.split(values, CHUNK)]

    def pack() -> list[bytes]:
        return [pack_chunk(chunk, lane, level, base) for chunk, lane, base in zip(chunks, lanes, bases, strict=True)]

    frames = pack()

    def unpack() -> list[Bytes]:
        bodies = [memoryview(frame)[FRAME_HEADER:] for frame in frames]
        return [unpack_body(body, lane, base) for body, lane, base in zip(bodies, lanes, bases, strict=True)]

    same = all(np.array_equal(old, new) for old, new in zip(chunks, unpack(), strict=True))
    if not same:
        raise RuntimeError(f"{title}: unpacking gave other bytes")
    return [_speed(title, pack, values, rounds), _speed(f"{title}, back", unpack, values, rounds)]


def stalls(learner: Learner, rounds: int, folder: Path) -> list[Figure]:
    """Saves in turns, one after the other on the same state: what training waits, and when they are committed."""
    ckpts = {name: attached(learner, folder / name, {"every": 1, **settings}) for name, settings in SAVED.items()}
    stall: dict[str, list[float]] = {name: [] for name in SAVED}
    durable: dict[str, list[float]] = {name: [] for name in SAVED}
    for number in range(rounds + 2):
        learner.step()
        for name in sorted(SAVED, key=lambda name: (list(SAVED).index(name) + number) % len(SAVED)):
            began = time.perf_counter()
            report = ckpts[name].step()
            ckpts[name].flush()
            if report is None or report.skipped is not None:
                raise RuntimeError(f"{name}: no save: {report}")
            if number > 1:  # the first ones touch fresh memory
                stall[name].append(report.stall_seconds)
                durable[name].append(time.perf_counter() - began)
    for ckpt in ckpts.values():
        ckpt.close(save=False)
    figures = []
    for name in SAVED:
        goal = STALL_GOAL if name == "compact" else None
        figures.append(Figure(f"stall, {name}", 1e3 * median(stall[name]), "ms"))
        if name != "raw":
            figures.append(Figure(f"stall, {name}, ratio", _ratio(stall[name], stall["raw"]), "x", "raw", goal))
    for name in SAVED:
        figures.append(Figure(f"until committed, {name}", 1e3 * median(durable[name]), "ms"))
    return figures


def _ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    return median(one / other for one, other in zip(ones, others, strict=True))


def _numpy_decode(name: str, values: torch.Tensor) -> Callable[[], object]:
    encoding, chunks, sizes = encoding_named(name), _encoded(name, values), list(chunk_sizes(values.numel()))

    def back() -> None:
        for chunk, size in zip(chunks, sizes, strict=True):
            encoding.decode(chunk, size, "F32")

    return back


def _in_torch(name: str, values: torch.Tensor) -> tuple[Callable[[], list[torch.Tensor]], Callable[[], None]]:
    encoder, chunks = encoder_named(name), list(encoded_chunks(values.numel(), name))
    data = torch.empty(encoding_named(name).stored_bytes(values.numel(), "F32"), dtype=torch.uint8)
    decoded = torch.empty_like(values)

    def forth() -> list[torch.Tensor]:
        return [encoder.encode(values[values_at], data[bytes_at]) for values_at, bytes_at in chunks]

    def back() -> None:
        for values_at, bytes_at in chunks:
            encoder.decode(data[bytes_at], decoded[values_at])

    if not all(forth()):
        raise RuntimeError(f"{name} cannot hold the state that was trained")
    return forth, back


def _encoded(name: str, values: torch.Tensor) -> list[Bytes]:
    data = []
    for part in torch.split(values, CHUNK):
        data.append(torch.empty(encoding_named(name).stored_bytes(part.numel(), "F32"), dtype=torch.uint8))
        encoder_named(name).encode(part, data[-1])
    return [chunk.numpy() for chunk in data]


def _speed(
    title: str, job: Callable[[], object], values: torch.Tensor, rounds: int, goal: float | None = None
) -> Figure:
    """Seconds of this thread's own time for a gigabyte of float32: what else runs on the machine weighs less."""
    job()
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        job()
        times.append(time.thread_time() - began)
    seconds = median(times) / (4 * values.numel() / 1e9)
    return Figure(title, seconds, "s/GB", f"{1 / seconds:.2f} GB/s of float32", goal)
