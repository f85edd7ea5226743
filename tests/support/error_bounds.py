"""Upper bounds of what each encoding loses, derived from its definition and not from its code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from store.encoding.base import Encoding
from store.encoding.int8 import BLOCK, LEAST_SCALE
from tests.support.reference_encodings import SQRT_LEAST_SCALE

_Floats = NDArray[np.float64]


def error_bound(encoding: Encoding, values: NDArray[Any]) -> _Floats:
    """Upper bounds of the distance of each decoded value to the value of one chunk."""
    if encoding.lossless:
        return np.zeros(values.size)
    return _BOUNDS[encoding.name](values.astype(np.float64))


def _in_blocks(bound: Callable[[_Floats], _Floats], size: int = BLOCK) -> Callable[[_Floats], _Floats]:
    def bounds(values: _Floats) -> _Floats:
        blocks = np.zeros((-(-values.size // size), size))
        blocks.reshape(-1)[: values.size] = values
        return bound(blocks).reshape(-1)[: values.size]

    return bounds


def _int8_block(blocks: _Floats) -> _Floats:
    """Half a scale: largest of the block / 254 * (1 + 2**-14), at most 127 * 2**-124 in tiny blocks."""
    largest = np.abs(blocks).max(axis=1)
    half = np.where(largest < 128 * LEAST_SCALE, largest, largest / 254 * (1 + 2.0**-14))
    return np.repeat(half, BLOCK)


def _int8_sqrt_block(blocks: _Floats) -> _Floats:
    """(root + scale)**2 - value, with the largest scale that the block can get."""
    roots = np.sqrt(blocks)
    scale = np.maximum(roots.max(axis=1, keepdims=True) / 255 * (1 + 2.0**-13), SQRT_LEAST_SCALE)
    return np.where(blocks == 0, 0, (roots + scale) ** 2 * (1 + 2.0**-22) - blocks)


def _int8_log2(values: _Floats) -> _Floats:
    """Up by a factor of 1.1910, down by one of 1.1933, the least level below it; zero is exact."""
    least = 2.0**-95
    near = np.maximum(values * (2**0.5 / 1.1875 - 1), values * (1 - 2**0.5 / 1.6875)) * (1 + 2.0**-22)
    return np.where(values == 0, 0, np.maximum(near, np.where(values < least, least - values, 0)))


def _shared_exponent(groups: int, by_usual: float, by_large: float) -> Callable[[_Floats], _Floats]:
    """No more than the value itself, nor than half a scale as large as the block can get."""

    def bounds(blocks: _Floats) -> _Floats:
        magnitudes = np.abs(blocks)
        usual = magnitudes.reshape(len(blocks), -1, groups).max(axis=1).min(axis=1, keepdims=True)
        large = magnitudes.max(axis=1, keepdims=True)
        return np.minimum(magnitudes, np.maximum(np.maximum(usual / by_usual, large / by_large), LEAST_SCALE) / 2)

    return bounds


_BOUNDS: Mapping[str, Callable[[_Floats], _Floats]] = {
    # Half a unit in the last of eight places; subnormals.
    "bf16": lambda values: np.maximum(np.abs(values) * 2.0**-8, 2.0**-134),
    # One residual if clipped, otherwise half of one; subnormals.
    "bf16+int8": lambda values: np.maximum(np.abs(values) * 2.0**-15, 2.0**-141),
    "int8-block": _in_blocks(_int8_block),
    "int8-log2": _int8_log2,
    "int8-shared-exponent": _in_blocks(_shared_exponent(4, 1.75, 63.75)),
    "int8-shared-exponent-128": _in_blocks(_shared_exponent(4, 1.75, 63.75), 2 * BLOCK),
    "int16-shared-exponent": _in_blocks(_shared_exponent(64, 255.75, 16383.75), 64 * BLOCK),
    "int8-sqrt-block": _in_blocks(_int8_sqrt_block),
}
