"""What each encoding of a unit costs and loses.

What can be done with a unit besides skipping it: the encodings open to it, with what each costs and loses.

Sizes and errors are those of the unit's newest version where that was stored in the same encoding, packing
included; else what the encoding's format says (size, unpacked) and what it loses on ordinary values (error).

Slots that updates are divided by, and the encoding that would make them explode. Pure names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from policies.base import UnitStats
from store.encoding import BF16, BF16_INT8, INT8_BLOCK, INT8_SQRT_BLOCK, encoding_named
from store.names import RAW

FINER: Mapping[str, tuple[str, ...]] = MappingProxyType({BF16: (BF16_INT8,)})
"""Encodings of the same slot that lose less, besides raw."""

TYPICAL_ERROR: Mapping[str, float] = MappingProxyType(
    {RAW: 0.0, BF16: 1.7e-3, BF16_INT8: 6.6e-6, INT8_BLOCK: 6e-3, INT8_SQRT_BLOCK: 6.6e-3}
)
"""Relative distance between values and what decoding gives: measured on a quarter million normal values (second
moments: on their squares). It serves until a unit has been stored in that encoding once."""

_F32 = 4
"""Bytes of the values that lossy encodings apply to."""


@dataclass(frozen=True)
class Option:
    """One way to save a unit. nbytes: expected, over all ranks, at least 1. error: relative, expected."""

    encoding: str
    nbytes: float
    error: float


def options(one: UnitStats, coarsest: str) -> tuple[Option, ...]:
    """The ways to save a unit whose slot may be stored as ``coarsest`` or finer; from the coarsest to raw.

    What does not move, or is not float32, has one: raw."""
    lossy = () if encoding_named(coarsest).lossless else (coarsest, *FINER.get(coarsest, ()))
    names = (*lossy, RAW) if one.moving and _is_f32(one) else (RAW,)
    return tuple(Option(name, max(1.0, expected_bytes(one, name)), expected_error(one, name)) for name in names)


def expected_bytes(one: UnitStats, encoding: str) -> float:
    """Bytes that storing the unit in ``encoding`` will take, over all ranks."""
    if one.stored_bytes and one.encoding == encoding and not one.changed_shape:
        return one.stored_bytes
    known = encoding_named(encoding)
    if known.lossless or not _is_f32(one):
        return one.nbytes
    return known.stored_bytes(one.nbytes // _F32, "F32")


def expected_error(one: UnitStats, encoding: str) -> float:
    """Relative distance of the unit to what a resume would give back, right after storing it in ``encoding``."""
    if one.encoding == encoding and not one.changed_shape:
        return one.error
    known = encoding_named(encoding)
    return TYPICAL_ERROR.get(encoding, known.relative_bound)


def _is_f32(one: UnitStats) -> bool:
    # Parameters of several dtypes in one unit do not occur with a mean of four bytes in any framework handled.
    return one.nbytes == _F32 * (one.numel or one.nbytes // _F32)


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
