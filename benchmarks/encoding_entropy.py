"""What differences of weights could take at least: entropies, on real training state.

A packer that knows the distribution of its values takes their entropy. A prediction from the moments of the two saves
makes it smaller. Nothing here is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.figures import Figure
from benchmarks.learner import Learner
from monitor.save.torch_codecs import encoder_named
from store.encoding import INT16_SHARED_EXPONENT, encoding_named

EVERY = 10
SETTLING = 50
"""Steps at the new rate before the first state."""

Values = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class State:
    """Weights, the update that AdamW would take with the moments alone, codes of the weights, and their scales."""

    weights: Values
    update: Values
    codes: Codes
    scales: Values


def entropies(learner: Learner, distances: tuple[int, ...] = (1, 4, 8)) -> list[Figure]:
    """Bytes a parameter of differences between states that are so many saves apart."""
    for _ in range(SETTLING):
        learner.step()
    states = [_state(learner)]
    for _ in range(max(distances)):
        for _ in range(EVERY):
            learner.step()
        states.append(_state(learner))
    rate = learner.schedule.get_last_lr()[0]
    return [
        Figure(f"lr {rate:.0e}, {distance * EVERY} steps apart: {name}", value, "B")
        for distance in distances
        for name, value in _of(states[-1 - distance], states[-1]).items()
    ]


def _state(learner: Learner) -> State:
    weights, updates, coded = [], [], []
    for group in learner.optimizer.param_groups:
        beta1, beta2 = group["betas"]
        for parameter in group["params"]:
            state = learner.optimizer.state[parameter]
            step = float(state["step"])
            root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
            weights.append(parameter.detach().flatten())
            updates.append((-group["lr"] * state["exp_avg"] / (1 - beta1**step) / root).flatten())
            coded.append(_coded(weights[-1]))
    codes, scales = (np.concatenate(arrays) for arrays in zip(*coded, strict=True))
    return State(torch.cat(weights).numpy().copy(), torch.cat(updates).numpy(), codes, scales)


def _coded(weights: torch.Tensor) -> tuple[Codes, Values]:
    """Codes of one parameter, in one chunk, and the scale of each."""
    encoding = encoding_named(INT16_SHARED_EXPONENT)
    data = torch.empty(encoding.stored_bytes(weights.numel(), "F32"), dtype=torch.uint8)
    encoder_named(INT16_SHARED_EXPONENT).encode(weights, data)
    codes = data[: 2 * weights.numel()].view(torch.int16).numpy().astype(np.int64)
    exponents = data[2 * weights.numel() :].numpy().astype(np.int64) - 127
    block = -(-weights.numel() // exponents.size) if exponents.size == 1 else 4096
    return codes, np.repeat(np.exp2(exponents), block)[: codes.size].astype(np.float32)


def _of(base: State, after: State) -> dict[str, float]:
    """The prediction is the best sum of both updates; two numbers for all weights, which take no room."""
    updates = np.stack((after.update, base.update), axis=1)
    factors, *_ = np.linalg.lstsq(updates, after.weights - base.weights, rcond=None)
    predicted = base.codes + np.rint((updates @ factors) / base.scales).astype(np.int64)
    return {
        "bf16": entropy(_bfloat16(after.weights) - _bfloat16(base.weights)),
        "int16-shared-exponent": entropy(after.codes - base.codes),
        "the same, predicted from moments": entropy(after.codes - predicted),
    }


def _bfloat16(values: Values) -> Codes:
    """The numbers of bf16 in their order, so that neighbours differ by one."""
    bits = torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def entropy(codes: Codes) -> float:
    """Bytes a value of the best code that knows how often each occurs."""
    share = np.unique(codes, return_counts=True)[1] / codes.size
    return float(-(share * np.log2(share)).sum() / 8)
