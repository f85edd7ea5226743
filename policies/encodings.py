"""List the encodings open to a unit, with the expected size and error of each.

Sizes and errors are those of the unit's newest version if it has the same encoding, compression included. Otherwise the
size follows from the format (uncompressed), and the error is that on ordinary values."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from policies.base import UnitStats
from store.encoding import (
    ENCODINGS,
    INT8_BLOCK,
    INT8_LOG2,
    INT8_SHARED_EXPONENT,
    INT8_SHARED_EXPONENT_128,
    INT16_SHARED_EXPONENT,
    WRITABLE,
    encoding_named,
)
from store.encoding.bfloat16 import BF16, BF16_INT8
from store.names import RAW

FINER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    dict.fromkeys((BF16, INT16_SHARED_EXPONENT), (BF16_INT8,))
    | dict.fromkeys((INT8_SHARED_EXPONENT_128, INT8_SHARED_EXPONENT), (INT8_BLOCK,))
)
"""Finer lossy encodings of the same slot."""

TYPICAL_ERROR: Mapping[str, float] = MappingProxyType(
    {RAW: 0.0, BF16: 1.7e-3, BF16_INT8: 6.6e-6, INT16_SHARED_EXPONENT: 1.5e-3, INT8_BLOCK: 6e-3}
    | {INT8_LOG2: 0.1, INT8_SHARED_EXPONENT: 0.19, INT8_SHARED_EXPONENT_128: 0.23}
)
"""Relative error of decoding 250,000 normal values (second moments: their squares), used until a unit has its own."""

_F32 = 4  # bytes of a float32, the only type that lossy encodings apply to


@dataclass(frozen=True)
class Option:
    """An encoding for a unit, with its expected size over all ranks (>= 1) and relative error."""

    encoding: str
    nbytes: float
    error: float


def options(one: UnitStats, coarsest: str) -> tuple[Option, ...]:
    """Return a unit's options, from encoding ``coarsest`` to raw; only raw for units that are frozen or not float32."""
    lossy = () if encoding_named(coarsest).lossless else (coarsest, *FINER.get(coarsest, ()))
    names = (*lossy, RAW) if one.moving and _is_f32(one) else (RAW,)
    return tuple(Option(name, max(1.0, expected_bytes(one, name)), expected_error(one, name)) for name in names)


def expected_bytes(one: UnitStats, encoding: str) -> float:
    """Return the expected stored size in bytes, over all ranks."""
    if one.stored_bytes and one.encoding == encoding and not one.changed_shape:
        return one.stored_bytes
    known = encoding_named(encoding)
    return one.nbytes if known.lossless or not _is_f32(one) else known.stored_bytes(one.nbytes // _F32, "F32")


def expected_error(one: UnitStats, encoding: str) -> float:
    """Return the expected relative error of the decoded unit right after storing it in ``encoding``."""
    if one.encoding == encoding and not one.changed_shape:
        return one.error
    return TYPICAL_ERROR.get(encoding, encoding_named(encoding).relative_bound)


def _is_f32(one: UnitStats) -> bool:
    # No supported framework mixes dtypes in a unit such that their mean is four bytes.
    return one.nbytes == _F32 * (one.numel or one.nbytes // _F32)


DIVISORS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf", "v"})
"""Slots that updates are divided by, in the optimizers of torch and DeepSpeed."""


ROUNDING_TO_ZERO = (INT8_BLOCK, INT8_SHARED_EXPONENT_128, INT8_SHARED_EXPONENT, INT16_SHARED_EXPONENT)


def explosive(slot: str, encoding: str) -> str | None:
    """Return why the slot must not be stored in this encoding, and an alternative; None if it may."""
    if encoding in ENCODINGS and encoding not in WRITABLE:
        return f"{encoding} can only be read: take {INT8_LOG2}"
    if slot not in DIVISORS or encoding not in ROUNDING_TO_ZERO:
        return None
    return (
        f"{slot} divides the updates, and {encoding} rounds its small values to zero: take {INT8_LOG2}, which keeps "
        "their ratio"
    )
