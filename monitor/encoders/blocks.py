"""``int8-block`` and ``int8-sqrt-block`` in torch. Defined, to the bit, in store/encoding/int8_block.py and
int8_sqrt_block.py.

Two passes over a chunk: the largest value of each block, from which all scales come at once, then the codes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from monitor.encoders.base import Scratch, block_pieces, held, pieces
from store.encoding import int8_block, int8_sqrt_block
from store.encoding.base import BLOCK
from store.encoding.blocks import GRID, block_count

_INFINITE = 0x7F800000
_INT_MIN = -(1 << 31)
_STEP = GRID + 1
_LEAST_SQRT_BITS = (127 - 62) << 23
"""Of int8_sqrt_block.LEAST_SCALE, 2**-62."""


class Int8BlockEncoder:
    """Signed codes."""

    unsigned = False

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See :class:`monitor.encoders.base.Encoder`."""
        if not values.numel():
            return held(values.device)
        scratch, largest = Scratch(values, 1), _per_block(values)
        for _, blocks, block in block_pieces(values):
            (work,) = scratch.like(block)
            torch.amax(torch.abs(block, out=work).view(torch.int32), 1, out=largest[blocks])
        scales = _divided(largest.view(torch.float32), 127).bitwise_and_(~GRID).view(torch.float32)
        scales.masked_fill_(scales < int8_block.LEAST_SCALE, 0)
        by = scales.masked_fill(scales == 0, torch.inf).unsqueeze(1)
        codes = _put(scales, out, values.numel()).view(torch.int8)
        for elements, blocks, block in block_pieces(values):
            (work,) = scratch.like(block)
            torch.div(block, by[blocks], out=work).round_()
            codes[elements] = work.view(-1)[: elements.stop - elements.start]
        return largest.amax() < _INFINITE

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
        if not values.numel():
            return good
        scratch, largest = Scratch(values, 3), _per_block(values)
        for _, blocks, block in block_pieces(values):
            whole = block.view(torch.int32)
            if not _unsigned(whole):
                # With the sign flipped, -0.0 is 0, other negative values lie above it and all others below.
                flipped = scratch.like(block)[0].view(torch.int32)
                good &= torch.bitwise_xor(whole, _INT_MIN, out=flipped).amax() <= 0
            torch.amax(whole, 1, out=largest[blocks])
        bits = _sqrt_scales(largest.clamp_(min=0))
        by = bits.view(torch.float32).unsqueeze(1)
        scales = (bits * largest.clamp(max=1)).view(torch.float32)  # 0 for blocks of zeros
        good &= (largest.amax() < _INFINITE) & (scales.amax() <= int8_sqrt_block.MOST_SCALE)
        # A little short of the root in scales, whatever is rounded on the way: 255 * 2**-20 is far less than one code.
        inverse = torch.full((1,), 1 - 2.0**-20, device=values.device) / by
        codes = _put(scales, out, values.numel())
        for elements, blocks, block in block_pieces(values):
            root, square, whole = scratch.like(block)
            torch.sqrt(block, out=root).mul_(inverse[blocks]).ceil_()
            torch.mul(root, by[blocks], out=square)
            square.mul_(square)
            # One more where the square is below the value; -0.0, the least integer, has code 0 and stays.
            below = torch.sub(block.view(torch.int32), square.view(torch.int32), out=square.view(torch.int32))
            code = whole.view(torch.int32).copy_(root).add_(below.clamp_(0, 1))
            codes[elements] = code.view(-1)[: elements.stop - elements.start]
        return good

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """See :class:`monitor.encoders.base.Encoder`."""
        for roots in _multiplied(data, torch.uint8, out):
            roots.mul_(roots)


def _unsigned(bits: torch.Tensor) -> bool:
    """Whether it is known that no sign is set. Not asked of a device, whose answer would have to be waited for."""
    return bits.device.type == "cpu" and int(bits.amin()) >= 0


def _per_block(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(block_count(values.numel()), dtype=torch.int32, device=values.device)


def _divided(values: torch.Tensor, levels: float) -> torch.Tensor:
    """The bits of float32 quotients, by a tensor of the device so that they are true ones."""
    return (values / torch.full((1,), levels, device=values.device)).view(torch.int32)


def _sqrt_scales(largest: torch.Tensor) -> torch.Tensor:
    """Their bits, never 0, from the bits of the largest value of each block, none negative."""
    bits = _divided(torch.sqrt(largest.view(torch.float32)), 255).bitwise_and_(~GRID).clamp_(min=_LEAST_SQRT_BITS)
    for _ in range(2):
        root = bits.view(torch.float32) * 255
        # One step up where the square is below the largest value; both are bits of values >= 0, so none overflows.
        bits += (largest - root.mul_(root).view(torch.int32)).clamp_(0, 1).mul_(_STEP)
    return bits


def _put(scales: torch.Tensor, out: torch.Tensor, numel: int) -> torch.Tensor:
    """Fill the lane of the scales, which may not begin at a multiple of 4; the lane of the codes is returned."""
    out[numel:] = scales.view(torch.uint8)
    return out[:numel]


def _multiplied(data: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> Iterator[torch.Tensor]:
    """Codes times scales, into the pieces of ``out``; yields each piece."""
    numel = out.numel()
    codes, scales = data[:numel].view(dtype), data[numel:].clone().view(torch.float32)
    whole = numel - numel % BLOCK
    for piece in pieces(whole, out.device):
        scale = scales[piece.start // BLOCK : piece.stop // BLOCK].unsqueeze(1)
        torch.mul(codes[piece].view(-1, BLOCK), scale, out=out[piece].view(-1, BLOCK))
        yield out[piece]
    if whole < numel:
        torch.mul(codes[whole:], scales[-1], out=out[whole:])
        yield out[whole:]
