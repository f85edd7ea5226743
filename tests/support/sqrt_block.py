"""The encoder of ``int8-sqrt-block``, which releases before int8-log2 stored second moments in, as it was then.

scale = the least float32 whose low 8 bits are zero, of at least 2**-62, for which (255 * scale)**2 >= the largest
        value of the block; 0 if all values are 0
code  = the least whole number for which (code * scale)**2 >= the value
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from store.encoding.base import BLOCK, Bytes, Encoding, Values
from store.encoding.int8 import INT8_SQRT_BLOCK

LEAST_SCALE = 2.0**-62
_STEP = 0x100
_Floats = NDArray[np.float32]


def encode_chunk(encoding: Encoding, values: Values) -> Bytes:
    """One encoded chunk, in any encoding that a store may hold."""
    return sqrt_block(values) if encoding.name == INT8_SQRT_BLOCK else encoding.encode(values)


def sqrt_block(values: Values) -> Bytes:
    """Codes, then scales, of values >= 0."""
    blocks = np.zeros((-(-values.size // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: values.size] = values
    assert (blocks >= 0).all() and (blocks <= 3.37e38).all()
    scales = _scales(blocks.max(axis=1, initial=0))
    by = np.where(scales > 0, scales, np.float32(1))[:, None]
    codes = np.ceil(np.sqrt(blocks) / (by * np.float32(1 + 2.0**-20))).astype(np.uint8)
    codes += _square(np.multiply(codes, by, dtype=np.float32)) < blocks
    return np.concatenate([codes.reshape(-1)[: values.size], scales.view(np.uint8)])


def _scales(largest: _Floats) -> _Floats:
    cut = (np.sqrt(largest) / np.float32(255)).view("<u4") & np.uint32(0xFFFFFFFF - (_STEP - 1))
    bits = np.maximum(cut, np.float32(LEAST_SCALE).view("<u4"))
    for _ in range(2):
        bits += (_square(bits.view("<f4") * np.float32(255)) < largest) * np.uint32(_STEP)
    return np.where(largest > 0, bits.view("<f4"), np.float32(0))


def _square(roots: _Floats) -> _Floats:
    with np.errstate(over="ignore"):
        return np.multiply(roots, roots)
