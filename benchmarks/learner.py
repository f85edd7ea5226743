"""A small Llama that learns to read bytes: what the benchmarks of encodings, precision and quality train.

Weights and moments are float32 and the forward is autocast to bfloat16, as mixed precision does it. The text is on
every machine that has Python: the standard library's sources, or, as another text, the reference that ``help()``
shows. A batch follows from the seed and the step alone, so a learner that resumes sees what it would have seen. On a
GPU the forward and the backward take deterministic kernels where torch has them, so that exact resumes change nothing.
"""

from __future__ import annotations

import gc
import math
import os
import pydoc_data.topics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.stdlib_text import Batches, standard_library

Text = npt.NDArray[np.uint8]

HELD_OUT = 1 << 18
"""Bytes at the end of a text that are never trained on."""


@dataclass(frozen=True)
class Shape:
    """Of the model and of a batch: ``windows`` of ``length`` bytes. device: where it trains, ``cpu`` or ``cuda``."""

    hidden: int = 128
    inner: int = 352
    layers: int = 4
    heads: int = 4
    windows: int = 4
    length: int = 64
    held_out: int = 64
    """Windows that the loss is taken on."""
    device: str = "cpu"


@dataclass(frozen=True)
class Course:
    """What is learned: a text, and how fast. The rate warms up, then falls along a cosine to ``floor`` of itself.

    floor: 1 leaves it where it is. hold: it stays at its height up to this step and then falls in a straight line.
    spurt: so many of the first steps are taken at three times the rate. betas: AdamW's."""

    text: Text
    rate: float
    steps: int
    warm_up: int = 20
    floor: float = 0.1
    hold: int | None = None
    spurt: int = 0
    betas: tuple[float, float] = (0.9, 0.999)

    def factor(self, step: int) -> float:
        """Of the rate, at a step counted from 0."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        if step < self.spurt:
            return 3.0
        if self.hold is not None:
            return 1 - (1 - self.floor) * min(1.0, max(0, step - self.hold) / (self.steps - self.hold))
        share = min(1.0, (step - self.warm_up) / max(1, self.steps - self.warm_up))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * share))


class Learner:
    """A model, its optimizer, its schedule and its place in the text.

    seed: decides the order of the text, and, where ``init`` does not, the weights."""

    def __init__(self, shape: Shape, course: Course, seed: int, *, init: int | None = None) -> None:
        if shape.device == "cuda":
            _prepare_device()
        torch.manual_seed(seed if init is None else init)
        self.shape, self.course = shape, course
        with torch.device(shape.device):
            self.model = self._new_model()
        fused = True if shape.device == "cuda" else None
        self.optimizer = torch.optim.AdamW(self._groups(), lr=course.rate, betas=course.betas, fused=fused)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, course.factor)
        self.batches = Batches(course.text[:-HELD_OUT], length=shape.length, size=shape.windows, seed=seed)
        held_out = course.text[-HELD_OUT:][: shape.held_out * shape.length].reshape(-1, shape.length)
        self._held_out = torch.from_numpy(held_out.astype(np.int64))

    def _new_model(self) -> torch.nn.Module:
        shape = self.shape
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=shape.hidden,
                intermediate_size=shape.inner,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.heads,
                max_position_embeddings=shape.length,
                use_cache=False,
                # On a CPU, eager is a quarter faster than the fused one at such lengths.
                attn_implementation="sdpa" if shape.device == "cuda" else "eager",
            )
        )

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return [{"params": list(self.model.parameters())}]

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def state(self) -> list[object]:
        """What ``attach(state=...)`` takes."""
        return [self.schedule, self.batches]

    def step(self) -> None:
        """One optimizer step."""
        with self._repeatable():
            self._loss(next(self.batches)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def loss(self) -> float:
        """In nats a byte, on text held out."""
        with self._repeatable():
            return float(self._loss(self._held_out))

    @torch.no_grad()
    def flat(self, slot: str) -> torch.Tensor:
        """All weights (``fp32``), or all of one moment, in one float32 tensor."""
        values = [
            parameter if slot == "fp32" else self.optimizer.state[parameter][slot]
            for parameter in self.model.parameters()
        ]
        return torch.cat([value.detach().reshape(-1) for value in values])

    def _loss(self, windows: torch.Tensor) -> torch.Tensor:
        windows = windows.to(self.shape.device)
        with torch.autocast(self.shape.device, dtype=torch.bfloat16):
            loss: torch.Tensor = self.model(input_ids=windows, labels=windows).loss
        return loss

    @contextmanager
    def _repeatable(self) -> Iterator[None]:
        """On a GPU, take deterministic kernels; not for what is attached, which runs in the optimizer's step."""
        if self.shape.device == "cuda":
            torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            if self.shape.device == "cuda":
                torch.use_deterministic_algorithms(False)


def _prepare_device() -> None:
    """Free the memory of learners that are gone: those that were attached are in reference cycles."""
    gc.collect()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic kernels; before the first use
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def sources() -> Text:
    """Four million bytes of Python's standard library."""
    return standard_library(1 << 22)


def reference() -> Text:
    """The other text: Python's reference as ``help()`` shows it, English prose with examples."""
    topics = pydoc_data.topics.topics
    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), dtype=np.uint8)


def at_rate(course: Course, rate: float) -> Course:
    """The same text at another, constant rate."""
    return replace(course, rate=rate, warm_up=1, floor=1.0)
