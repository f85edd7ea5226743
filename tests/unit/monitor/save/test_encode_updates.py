"""No step after a resume explodes: updates stay close to those of the uninterrupted run, in every encoding.

Rows of an embedding that hardly ever come up make it hard: their second moments decay beside large ones. A naive
encoding, to the nearest in the linear domain, turns them into 0, and the same test then sees updates explode.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monitor
from monitor.save.torch_codecs import Int8SqrtBlockEncoder
from store.encoding.base import BLOCK
from store.encoding.int8 import Int8SqrtBlock

SAVED_AT, WATCHED, MOST = 30, 20, 1.5
ROWS, WIDTH = 192, 32
DIFFERENCES = {"packing": 1, "differences": True}
WAYS: dict[str, dict[str, Any]] = {
    "weights in bf16": {"encoding": {"fp32": "bf16"}},
    "weights in 24 bits": {"encoding": {"fp32": "bf16+int8"}},
    "first moments": {"encoding": {"exp_avg": "int8-block"}},
    "second moments": {"encoding": {"exp_avg_sq": "int8-sqrt-block"}},
    "moments in bf16": {"encoding": {"exp_avg": "bf16", "exp_avg_sq": "bf16"}},
    "compact": {"encoding": "compact"},
    "careful": {"encoding": "careful"},
    "compact packed": {"encoding": "compact", "packing": 1},
    "compact differences": {"encoding": "compact", **DIFFERENCES},
    "careful differences": {"encoding": "careful", **DIFFERENCES},
}
Sizes = list[dict[str, float]]


class Job:
    """A small language model of rare and common tokens; batches follow from the step."""

    def __init__(self, seed: int, beta: float) -> None:
        torch.manual_seed(seed)
        body = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ROWS)]
        self.model = nn.Sequential(nn.Embedding(ROWS, WIDTH), *body)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, beta))

    def update(self, step: int) -> dict[str, float]:
        """Sizes of the update: the largest of any element, and the norm in every layer."""
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        generator = torch.Generator().manual_seed(step)
        rare = torch.rand(64, generator=generator).pow(6)  # of 192 tokens, a few make up most of the text
        tokens = (rare * ROWS).long()
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(tokens), (7 * tokens + 1) % ROWS).backward()
        self.optimizer.step()
        deltas = {name: p.detach() - before[name] for name, p in self.model.named_parameters()}
        norms: dict[str, float] = {}
        for name, delta in deltas.items():
            layer = name.split(".")[0]
            norms[layer] = norms.get(layer, 0.0) + float(delta.double().square().sum())
        return {"largest": max(float(d.abs().max()) for d in deltas.values()), **norms}


def sizes(store: Path, beta: float, settings: dict[str, Any]) -> tuple[Sizes, Sizes]:
    """Of the updates after the save: in the run that was not interrupted, and after a resume in a new job."""
    values = {"store": str(store), "every": 10, "metrics": {"enabled": False}, **settings}
    job = Job(1, beta)
    with monitor.attach((job.model, job.optimizer), values) as ckpt:
        for step in range(ckpt.resume(), SAVED_AT):
            job.update(step)
            report = ckpt.step()
            assert report is None or report.skipped is None
            ckpt.flush()
    straight = [job.update(step) for step in range(SAVED_AT, SAVED_AT + WATCHED)]
    resumed = Job(2, beta)
    with monitor.attach((resumed.model, resumed.optimizer), values) as ckpt:
        assert ckpt.resume() == SAVED_AT
        assert ckpt.certificate is not None and not ckpt.certificate.exact
    return straight, [resumed.update(step) for step in range(SAVED_AT, SAVED_AT + WATCHED)]


def largest_ratio(straight: Sizes, resumed: Sizes) -> float:
    """Over all steps and all sizes."""
    return max(found[what] / size for one, found in zip(straight, resumed, strict=True) for what, size in one.items())


@pytest.mark.parametrize("beta", [0.95, 0.999])
@pytest.mark.parametrize("way", WAYS)
def test_no_update_explodes(tmp_path: Path, way: str, beta: float) -> None:
    assert largest_ratio(*sizes(tmp_path, beta, WAYS[way])) <= MOST


@pytest.mark.parametrize("beta", [0.95, 0.999])
def test_a_naive_encoding_of_second_moments_is_caught(tmp_path: Path, naive: None, beta: float) -> None:
    assert largest_ratio(*sizes(tmp_path, beta, WAYS["second moments"])) > 3 * MOST


@pytest.fixture
def naive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The mutant: in the place of the encoding for second moments, the same codes without root or rounding up."""
    monkeypatch.setattr(Int8SqrtBlock, "encode", lambda _, values: np.concatenate(_codes(values)))
    monkeypatch.setattr(Int8SqrtBlock, "decode", lambda _, data, numel, dtype: _values(data, numel))
    monkeypatch.setattr(Int8SqrtBlockEncoder, "encode", _torch_encode)
    monkeypatch.setattr(Int8SqrtBlockEncoder, "decode", _torch_decode)
    yield


def _codes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blocks = np.zeros((-(-values.size // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: values.size] = values
    scales = blocks.max(1) / np.float32(255)
    codes = np.rint(blocks / np.where(scales > 0, scales, 1)[:, None]).astype(np.uint8)
    return codes.reshape(-1)[: values.size], scales.view(np.uint8)


def _values(data: np.ndarray, numel: int) -> np.ndarray:
    scales = data[numel:].copy().view(np.float32)
    return data[:numel].astype(np.float32) * np.repeat(scales, BLOCK)[:numel]


def _torch_encode(_: object, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out.copy_(torch.from_numpy(np.concatenate(_codes(values.numpy()))))
    return torch.tensor(True)


def _torch_decode(_: object, data: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.from_numpy(_values(data.numpy(), out.numel())))
