"""Slots that updates are divided by, and the encoding that would make them explode. Pure names."""

from __future__ import annotations

from store.encoding import INT8_BLOCK, INT8_SQRT_BLOCK

DIVISORS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf", "v"})
"""Slots of torch's and DeepSpeed's optimizers that updates are divided by."""


def explosive(slot: str, encoding: str) -> str | None:
    """Why the slot must not be stored in this encoding, and what to take instead; None where it may."""
    if slot not in DIVISORS or encoding != INT8_BLOCK:
        return None
    return (
        f"{slot} divides the updates, and {INT8_BLOCK} rounds its small values to zero: take {INT8_SQRT_BLOCK}, "
        "which rounds them up"
    )
