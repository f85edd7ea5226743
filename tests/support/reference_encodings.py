"""Reference encoders in numpy, which define the bytes of every encoding; the formulas are in ``store/encoding``.

The product encodes with :mod:`monitor.save.torch_codecs`, whose bytes the contract tests compare with these."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from store.encoding import (
    BF16,
    BF16_INT8,
    BLOCK,
    CHUNK,
    INT8_BLOCK,
    INT8_LOG2,
    INT8_SHARED_EXPONENT,
    INT8_SHARED_EXPONENT_128,
    INT8_SQRT_BLOCK,
    INT16_SHARED_EXPONENT,
    Encoding,
    bfloat16,
    int8,
    log2,
    shared_exponent,
)
from store.encoding.base import Bytes, Values, lanes_bytes
from store.encoding.shared_exponent import (
    Int8SharedExponent,
    Int8SharedExponent128,
    Int16SharedExponent,
    SharedExponent,
)

Floats = NDArray[np.float32]


class ValuesError(ValueError):
    """Values that an encoding cannot hold within its bound."""


def encode_chunk(encoding: Encoding, values: Values) -> Bytes:
    """Encode one chunk, in any encoding that a store may hold. Raises ValuesError for values that it cannot hold."""
    if encoding.lossless:
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    if values.dtype != np.dtype("<f4") or values.ndim != 1 or values.size > CHUNK:
        raise ValueError(f"{encoding.name} takes a chunk of float32, not {values.dtype} of shape {values.shape}")
    if not values.size:
        return np.zeros(0, np.uint8)
    data = np.concatenate([lane.view(np.uint8) for lane in _ENCODERS[encoding.name](np.ascontiguousarray(values))])
    assert data.size == lanes_bytes(encoding.lanes(values.size, "F32"))
    return data


def _bf16(values: Floats) -> tuple[NDArray[np.uint16]]:
    return (_rounded(values.view("<u4")).astype("<u2"),)


def _bf16_int8(values: Floats) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    bits = values.view("<u4")
    high = _rounded(bits)
    # Taking high * 2**16 off first or last is the same: it is an even multiple of 2**8.
    rest = (bits - (high << 16)).view("<i4")
    low = (rest + (((rest >> 8) & 1) + 127)) >> 8
    return high.astype("<u2"), np.clip(low, -127, 127).astype(np.int8)


def _rounded(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The upper 16 bits after rounding to nearest, ties to even, right-aligned."""
    if int((bits & 0x7FFFFFFF).max()) >= bfloat16.TOO_LARGE:
        raise ValuesError("bfloat16 holds no NaN, no infinity and nothing above 3.3961e38")
    return (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)


def _int8_block(values: Floats) -> tuple[NDArray[np.int8], Floats]:
    blocks = _blocks(values)
    largest = np.abs(blocks).max(axis=1)
    if not bool(np.isfinite(largest).all()):
        raise ValuesError("int8-block holds neither NaN nor infinities")
    scales = ((largest / np.float32(127)).view("<u4") & np.uint32(0xFFFFFFFF - int8.GRID)).view("<f4")
    scales = np.where(scales < int8.LEAST_SCALE, np.float32(0), scales)
    by = np.where(scales > 0, scales, np.float32(np.inf))[:, None]
    # No clipping: |value / scale| <= 127 * (1 + 2**-14), which rounds to 127.
    return np.rint(blocks / by).astype(np.int8).reshape(-1)[: values.size], scales


def _int8_log2(values: Floats) -> tuple[NDArray[np.uint8]]:
    bits = values.view("<i4")
    # With the sign flipped, -0.0 is 0, other negative values lie above it and all others below.
    if int((bits.view("<u4") ^ np.uint32(1 << 31)).view("<i4").max()) > 0 or int(bits.max()) >= log2.TOO_LARGE:
        raise ValuesError("int8-log2 holds no negative values, no NaN and nothing from 5.1e9 on")
    code = ((bits + log2.ROUNDING) >> log2.SHIFT) - log2.OFFSET
    return (np.maximum(code, np.clip(bits, 0, 1)).astype(np.uint8),)


def _int8_shared_exponent(values: Floats) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return _zigzag(values, Int8SharedExponent())


def _int8_shared_exponent_128(values: Floats) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return _zigzag(values, Int8SharedExponent128())


def _zigzag(values: Floats, form: SharedExponent) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    code, exponents = _shared_exponent(values, form)
    code = code.astype(np.int8)
    return ((code << 1) ^ (code >> 7)).view(np.uint8), exponents


def _int16_shared_exponent(values: Floats) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    code, exponents = _shared_exponent(values, Int16SharedExponent())
    return code.astype("<i2"), exponents


def _shared_exponent(values: Floats, form: SharedExponent) -> tuple[Floats, NDArray[np.uint8]]:
    blocks = _blocks(values, form.block)
    exponents = _shared_exponents(blocks, form, form.finest(values.size))
    inverse = np.where(exponents > 0, 254 - exponents << shared_exponent.FRACTION, 0).astype("<u4").view("<f4")
    return np.rint(blocks * inverse[:, None]).reshape(-1)[: values.size], exponents.astype(np.uint8)


def _shared_exponents(blocks: Floats, form: SharedExponent, below: int) -> NDArray[np.int32]:
    """The exponent of each block's scale, plus 127, or 0."""
    largest = blocks.view("<i4") & 0x7FFFFFFF
    while largest.shape[1] > form.groups:
        largest = np.maximum(largest[:, : largest.shape[1] // 2], largest[:, largest.shape[1] // 2 :])
    usual, large = largest.min(axis=1), largest.max(axis=1)
    if int(large.max()) >= shared_exponent.TOO_LARGE:
        raise ValuesError("a shared exponent holds no NaN, no infinity and nothing above 2.55e38")
    fraction, least = shared_exponent.FRACTION, shared_exponent.LEAST
    by_usual = (usual + form.rounding(below) >> fraction) - below
    by_large = (large + form.rounding(form.below_large) >> fraction) - form.below_large
    return np.where(large > least - 1 << fraction, np.maximum(np.maximum(by_usual, by_large), least), 0)


def _blocks(values: Floats, size: int = BLOCK) -> Floats:
    """The values of shape (blocks, size), the last block padded with zeros."""
    blocks = np.zeros((-(-values.size // size), size), np.float32)
    blocks.reshape(-1)[: values.size] = values
    return blocks


SQRT_LEAST_SCALE = 2.0**-62
_STEP = 0x100


def sqrt_block(values: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Encode values >= 0 in ``int8-sqrt-block``, in which releases before int8-log2 stored second moments.

    scale = the least float32 whose low 8 bits are zero, of at least 2**-62, for which (255 * scale)**2 >= the largest
            value of the block; 0 if all values are 0
    code  = the least whole number for which (code * scale)**2 >= the value"""
    blocks = _blocks(values)
    assert (blocks >= 0).all() and (blocks <= 3.37e38).all()
    scales = _sqrt_scales(blocks.max(axis=1, initial=0))
    by = np.where(scales > 0, scales, np.float32(1))[:, None]
    codes = np.ceil(np.sqrt(blocks) / (by * np.float32(1 + 2.0**-20))).astype(np.uint8)
    codes += _square(np.multiply(codes, by, dtype=np.float32)) < blocks
    return codes.reshape(-1)[: values.size], scales


def _sqrt_scales(largest: Floats) -> Floats:
    cut = (np.sqrt(largest) / np.float32(255)).view("<u4") & np.uint32(0xFFFFFFFF - (_STEP - 1))
    bits = np.maximum(cut, np.float32(SQRT_LEAST_SCALE).view("<u4"))
    for _ in range(2):
        bits += (_square(bits.view("<f4") * np.float32(255)) < largest) * np.uint32(_STEP)
    return np.where(largest > 0, bits.view("<f4"), np.float32(0))


def _square(roots: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.multiply(roots, roots)


_ENCODERS = {
    BF16: _bf16,
    BF16_INT8: _bf16_int8,
    INT8_BLOCK: _int8_block,
    INT8_LOG2: _int8_log2,
    INT8_SHARED_EXPONENT_128: _int8_shared_exponent_128,
    INT8_SHARED_EXPONENT: _int8_shared_exponent,
    INT8_SQRT_BLOCK: sqrt_block,
    INT16_SHARED_EXPONENT: _int16_shared_exponent,
}
