"""Implement ``bf16``, ``bf16+int8`` and ``bf16-scaled``, independent of the floating-point mode.

``bf16`` rounds float32 values to the nearest bfloat16, bit for bit as ``tensor.to(torch.bfloat16)`` does. Refused: NaN,
infinities, and finite values above 3.3961e38, which would round to infinity. ``bf16+int8`` adds a signed byte of the
residual; a decoded value rounded to bfloat16 gives the same bfloat16 again. ``bf16-scaled`` stores float32 values that
are bfloat16 values times one float32 factor, as gradients are after they were clipped; it is lossless, and only the
journal writes it. docs/encodings.md has the formulas and the reasons."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from store.encoding.base import Bytes, Float32Encoding, Lane, pieces
from store.errors import DamagedError

BF16 = "bf16"

TOO_LARGE = 0x7F7F8000
"""Magnitude bits of the smallest float32 that rounds to infinity: halfway above the largest bfloat16, a tie to even."""


@dataclass(frozen=True)
class Bf16(Float32Encoding):
    """One lane of two bytes."""

    name: str = BF16
    relative_bound: float = 2.0**-8 * 1.01

    def _lanes(self, numel: int) -> tuple[Lane, ...]:
        return (Lane(numel, 2),)

    def _decode_into(self, values: NDArray[np.float32], data: Bytes) -> None:
        bits, halves = values.view("<u4"), data.view("<u2")
        for piece in pieces(bits.size):
            self._widen(bits[piece], halves[piece])

    def _widen(self, bits: NDArray[np.uint32], halves: NDArray[np.uint16]) -> None:
        """Fill ``bits`` from bfloat16 values, of which none that is not finite is ever written."""
        if int((halves & 0x7FFF).max()) >= 0x7F80:
            raise DamagedError(f"a chunk stored as {self.name} holds a value that is not finite")
        np.left_shift(halves, 16, out=bits, dtype=np.uint32)


BF16_INT8 = "bf16+int8"


@dataclass(frozen=True)
class Bf16Int8(Bf16):
    """A lane of bfloat16 and a lane of residuals."""

    name: str = BF16_INT8
    relative_bound: float = 2.0**-15 * 1.01

    def _lanes(self, numel: int) -> tuple[Lane, ...]:
        return Lane(numel, 2), Lane(numel, 1)

    def _decode_into(self, values: NDArray[np.float32], data: Bytes) -> None:
        bits = values.view("<i4")
        highs, lows = data[: 2 * values.size].view("<u2"), data[2 * values.size :].view(np.int8)
        if values.size and int(lows.min()) < -127:
            raise DamagedError(f"a chunk stored as {self.name} has a residual that was never written")
        for piece in pieces(bits.size):
            self._widen(bits[piece].view("<u4"), highs[piece])
            bits[piece] += lows[piece].astype("<i4") << 8


BF16_SCALED = "bf16-scaled"

LEAST = 2.0**-126  # the smallest float32 that is not subnormal, and the least factor; the largest is its inverse


@dataclass(frozen=True)
class ScaledBf16(Bf16):
    """The factor, and a lane of bfloat16."""

    name: str = BF16_SCALED
    relative_bound: float = 0.0
    lossless: bool = True

    def _lanes(self, numel: int) -> tuple[Lane, ...]:
        return (Lane(1, 4), Lane(numel, 2)) if numel else ()

    def _decode_into(self, values: NDArray[np.float32], data: Bytes) -> None:
        if values.size:
            factor = data[:4].view("<f4")
            if not LEAST <= factor[0] <= 1.0 / LEAST:
                raise DamagedError(f"a chunk stored as {self.name} has a factor that was never written")
            super()._decode_into(values, data[4:])
            np.multiply(values, factor, out=values)
