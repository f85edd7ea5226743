"""What differences of bf16 weights could take at least: entropies, on real training state.

A packer that knows the distribution of its values takes their entropy. Context, such as the exponent of the base, or
a prediction from the moments of the two saves, makes it smaller. Nothing here is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.figures import Figure
from benchmarks.learner import Learner

EVERY = 10
SETTLING = 50
"""Steps at the new rate before the first state."""

Values = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class State:
    """Weights, and the update that AdamW would take with the moments alone."""

    weights: Values
    update: Values


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
    weights, updates = [], []
    for group in learner.optimizer.param_groups:
        beta1, beta2 = group["betas"]
        for parameter in group["params"]:
            state = learner.optimizer.state[parameter]
            step = float(state["step"])
            root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
            weights.append(parameter.detach().flatten())
            updates.append((-group["lr"] * state["exp_avg"] / (1 - beta1**step) / root).flatten())
    return State(torch.cat(weights).numpy().copy(), torch.cat(updates).numpy())


def _of(base: State, after: State) -> dict[str, float]:
    """The prediction is the best sum of both updates; two numbers for all weights, which take no room."""
    before, now = _codes(base.weights), _codes(after.weights)
    exponents = np.abs(before) >> 7
    updates = np.stack((after.update, base.update), axis=1)
    factors, *_ = np.linalg.lstsq(updates, after.weights - base.weights, rcond=None)
    predicted = _codes(_rounded(base.weights) + (updates @ factors).astype(np.float32))
    return {
        "difference": _entropy(now - before),
        "difference, exponent known": _given(now - before, exponents),
        "predicted from moments": _entropy(now - predicted),
        "predicted, exponent known": _given(now - predicted, exponents),
    }


def _rounded(values: Values) -> Values:
    return np.asarray(torch.from_numpy(values).bfloat16().float().numpy())


def _codes(values: Values) -> Codes:
    """The numbers of bf16 in their order, so that neighbours differ by one."""
    bits = torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def _entropy(codes: Codes) -> float:
    """Bytes a value of the best code that knows how often each occurs."""
    share = np.unique(codes, return_counts=True)[1] / codes.size
    return float(-(share * np.log2(share)).sum() / 8)


def _given(codes: Codes, context: Codes) -> float:
    parts = (codes[context == one] for one in np.unique(context))
    return float(sum(part.size * _entropy(part) for part in parts) / codes.size)
