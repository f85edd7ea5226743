"""``int8-block`` and ``int8-sqrt-block`` in torch. Defined, to the bit, in store/encoding/int8_block.py and
int8_sqrt_block.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from monitor.encoders.base import block_pieces, held, pieces, split_lanes
from store.encoding import int8_block, int8_sqrt_block
from store.encoding.base import BLOCK
from store.encoding.blocks import GRID, block_count

_INFINITE = 0x7F800000
_INT_MIN = -(1 << 31)
_STEP = GRID + 1
_LEAST_SQRT_BITS = (127 - 62) << 23
assert torch.tensor(_LEAST_SQRT_BITS, dtype=torch.int32).view(torch.float32).item() == int8_sqrt_block.LEAST_SCALE


class Int8BlockEncoder:
    """Signed codes."""

    unsigned = False

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See :class:`monitor.encoders.base.Encoder`."""
        good = held(values.device)
        levels = torch.full((1,), 127.0, device=values.device)
        codes, scales = split_lanes(out, values.numel())
        signed = codes.view(torch.int8)
        for elements, blocks, block in block_pieces(values):
            work = block.abs()
            largest = work.view(torch.int32).amax(1)
            good &= largest.amax() < _INFINITE
            scale = (largest.view(torch.float32) / levels).view(torch.int32).bitwise_and_(~GRID).view(torch.float32)
            scale.masked_fill_(scale < int8_block.LEAST_SCALE, 0)
            _put_scales(scales, blocks, scale)
            by = scale.masked_fill(scale == 0, torch.inf).unsqueeze(1)
            torch.div(block, by, out=work).round_()
            signed[elements] = work.view(-1)[: elements.stop - elements.start]
        return good

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """See :class:`monitor.encoders.base.Encoder`."""
        for _ in _multiplied(data, torch.int8, out):
            pass


class Int8SqrtBlockEncoder:
    """Unsigned codes of square roots, settled by products and comparisons and not by how a root is rounded."""

    unsigned = True

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See :class:`monitor.encoders.base.Encoder`."""
        good = held(values.device)
        codes, scales = split_lanes(out, values.numel())
        short = torch.full((1,), 1 + 2.0**-20, device=values.device)
        for elements, blocks, block in block_pieces(values):
            bits = block.view(torch.int32)
            negative = (bits ^ _INT_MIN).amax() > 0  # -0.0, the least of all as an integer, becomes 0
            bits = bits.clamp(min=0)
            largest = bits.amax(1)
            scale = _sqrt_scales(largest)
            good &= ~negative & (largest.amax() < _INFINITE) & (scale.amax() <= int8_sqrt_block.MOST_SCALE)
            _put_scales(scales, blocks, scale)
            by = scale.masked_fill(scale == 0, 1).unsqueeze(1)
            code = torch.sqrt(bits.view(torch.float32))
            code.div_(by * short).ceil_()
            square = code * by
            square.mul_(square)
            below = square.view(torch.int32).sub_(bits).bitwise_right_shift_(31)  # -1 or 0: both are >= 0
            codes[elements] = code.sub_(below).view(-1)[: elements.stop - elements.start]
        return good

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """See :class:`monitor.encoders.base.Encoder`."""
        for roots in _multiplied(data, torch.uint8, out):
            roots.mul_(roots)


def _sqrt_scales(largest: torch.Tensor) -> torch.Tensor:
    """From the bits of the largest value of each block, -0.0 taken as 0."""
    levels = torch.full((1,), 255.0, device=largest.device)
    bits = (torch.sqrt(largest.view(torch.float32)) / levels).view(torch.int32).bitwise_and_(~GRID)
    bits.clamp_(min=_LEAST_SQRT_BITS)
    for _ in range(2):
        root = bits.view(torch.float32) * levels
        bits += ((root * root).view(torch.int32) < largest) * _STEP
    return bits.view(torch.float32).masked_fill_(largest == 0, 0)


def _put_scales(lane: torch.Tensor, blocks: slice, scale: torch.Tensor) -> None:
    lane[4 * blocks.start : 4 * blocks.stop] = scale.view(torch.uint8)


def _multiplied(data: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> Iterator[torch.Tensor]:
    """Codes times scales, into the pieces of ``out``; yields each piece."""
    numel = out.numel()
    codes, scale_bytes = split_lanes(data, numel)
    codes = codes.view(dtype)
    scales = scale_bytes.clone().view(torch.float32)
    whole = numel - numel % BLOCK
    for piece in pieces(whole, out.device):
        scale = scales[piece.start // BLOCK : piece.stop // BLOCK].unsqueeze(1)
        torch.mul(codes[piece].view(-1, BLOCK), scale, out=out[piece].view(-1, BLOCK))
        yield out[piece]
    if whole < numel:
        torch.mul(codes[whole:], scales[block_count(numel) - 1], out=out[whole:])
        yield out[whole:]
