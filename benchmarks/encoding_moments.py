"""What moments would take in other forms: entropies, on real training state. Nothing here is stored.

First moments in whole multiples of a share of AdamW's update, m / √v, at the steps whose error is that of ``compact``.
Second moments as differences to what the means of their row and column predict, as Adafactor stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.encoding_entropy import SETTLING, Codes, entropy
from benchmarks.figures import Figure
from benchmarks.learner import Learner
from monitor.save.torch_codecs import encoder_named
from store.encoding import INT8_LOG2, INT8_SHARED_EXPONENT_128, encoding_named

Values = npt.NDArray[np.float64]


def moments(learner: Learner) -> list[Figure]:
    """Bytes a parameter of both moments, each in two forms."""
    for _ in range(SETTLING):
        learner.step()
    rate = learner.schedule.get_last_lr()[0]
    beta2 = learner.optimizer.param_groups[0]["betas"][1]
    at = f"lr {rate:.0e}, beta2 {beta2:g}"
    return [Figure(f"{at}: {name}", value, unit) for name, value, unit in (*_first(learner), *_second(learner))]


def _first(learner: Learner) -> Iterator[tuple[str, float, str]]:
    exact, coarse, shares = [], [], []
    for state in _states(learner):
        m, root = state["exp_avg"], state["exp_avg_sq"].sqrt() + 1e-12
        codes, decoded = _coded(m, INT8_SHARED_EXPONENT_128)
        exact.append((m / root).numpy())
        coarse.append((decoded / root).numpy())
        shares.append(codes)
    updates, error = np.concatenate(exact).astype(np.float64), _error(np.concatenate(exact), np.concatenate(coarse))
    blocks = entropy(np.concatenate([codes for codes, _ in shares])) + entropy(
        np.concatenate([exponents for _, exponents in shares])
    ) * (sum(exponents.size for _, exponents in shares) / updates.size)
    steps = _where(lambda q: _error(updates, np.rint(updates * q) / q) - error)
    yield "first moments, one exponent for 128", blocks, "B"
    yield "the same, error of updates", error, ""
    yield f"in units of √v / {steps:.2g}, the same error", entropy(np.rint(updates * steps).astype(np.int64)), "B"
    finer = _where(lambda q: _error(updates, np.rint(updates * q) / q) - error / 2)
    yield f"in units of √v / {finer:.2g}, half of the error", entropy(np.rint(updates * finer).astype(np.int64)), "B"


def _second(learner: Learner) -> Iterator[tuple[str, float, str]]:
    plain, rests = [], []
    for parameter, state in zip(learner.model.parameters(), _states(learner), strict=True):
        codes, _ = _coded(state["exp_avg_sq"], INT8_LOG2)
        plain.append(codes[0])
        rests.append(codes[0] - _predicted(state["exp_avg_sq"].reshape(parameter.shape)))
    yield "second moments, two levels an octave", entropy(np.concatenate(plain)), "B"
    yield "the same, beside means of rows and columns", entropy(np.concatenate(rests)), "B"


def _predicted(values: torch.Tensor) -> Codes:
    """Levels of the product of both means over the mean of all; for a vector, of its mean."""
    if values.ndim < 2:
        expected = values.mean().expand(values.shape).clone()
    else:
        rows, columns = values.mean(dim=1, keepdim=True), values.mean(dim=0, keepdim=True)
        expected = rows * columns / values.mean().clamp_min(1e-30)
    codes, _ = _coded(expected.reshape(-1), INT8_LOG2)
    return codes[0]


def _states(learner: Learner) -> Iterator[dict[str, torch.Tensor]]:
    for parameter in learner.model.parameters():
        state = learner.optimizer.state[parameter]
        yield {slot: state[slot].detach().reshape(-1) for slot in ("exp_avg", "exp_avg_sq")}


def _coded(values: torch.Tensor, name: str) -> tuple[tuple[Codes, Codes], torch.Tensor]:
    """Codes and exponents of one parameter, in one chunk, and what they decode to."""
    data = torch.empty(encoding_named(name).stored_bytes(values.numel(), "F32"), dtype=torch.uint8)
    encoder_named(name).encode(values, data)
    decoded = torch.empty_like(values)
    encoder_named(name).decode(data, decoded)
    codes = data[: values.numel()].numpy().astype(np.int64)
    return (codes, data[values.numel() :].numpy().astype(np.int64)), decoded


def _error(exact: npt.NDArray[np.floating], coarse: npt.NDArray[np.floating]) -> float:
    """Root mean square, in that of the exact ones."""
    return float(np.sqrt(np.square(coarse - exact).sum() / np.square(exact).sum()))


def _where(above: Callable[[float], float]) -> float:
    """The least steps a unit at which an error, which falls with them, is no longer above: by halving."""
    low, high = 1 / 16, 64.0
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if above(middle) > 0 else (low, middle)
    return high
