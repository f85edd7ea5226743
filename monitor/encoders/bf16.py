"""``bf16`` and ``bf16+int8`` in torch. Defined, to the bit, in store/encoding/bf16.py and bf16_int8.py."""

from __future__ import annotations

import torch

from monitor.encoders.base import held, pieces
from store.encoding.bf16 import MAGNITUDE, TOO_LARGE


class Bf16Encoder:
    """torch's own conversion, and a check beside it."""

    unsigned = False

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See :class:`monitor.encoders.base.Encoder`."""
        good = held(values.device)
        for piece in pieces(values.numel(), values.device):
            x = values[piece]
            good &= _rounds(x)
            out[2 * piece.start : 2 * piece.stop] = x.to(torch.bfloat16).view(torch.uint8)
        return good

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """See :class:`monitor.encoders.base.Encoder`."""
        for piece in pieces(out.numel(), out.device):
            out[piece] = _aligned(data[2 * piece.start : 2 * piece.stop]).view(torch.bfloat16)


class Bf16Int8Encoder:
    """The residual is taken between the bits of a value and of its bfloat16."""

    unsigned = False

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See :class:`monitor.encoders.base.Encoder`."""
        good = held(values.device)
        lows = out[2 * values.numel() :].view(torch.int8)
        for piece in pieces(values.numel(), values.device):
            x = values[piece]
            good &= _rounds(x)
            high = x.to(torch.bfloat16)
            out[2 * piece.start : 2 * piece.stop] = high.view(torch.uint8)
            rest = x.view(torch.int32) - high.to(torch.float32).view(torch.int32)
            half = rest >> 8
            half.bitwise_and_(1).add_(127)
            lows[piece] = rest.add_(half).bitwise_right_shift_(8).clamp_(-127, 127)
        return good

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """See :class:`monitor.encoders.base.Encoder`."""
        lows = data[2 * out.numel() :].view(torch.int8)
        for piece in pieces(out.numel(), out.device):
            high = _aligned(data[2 * piece.start : 2 * piece.stop]).view(torch.bfloat16)
            bits = high.to(torch.float32).view(torch.int32)
            low = lows[piece].to(torch.int32).bitwise_left_shift_(8)
            torch.add(bits, low, out=out[piece].view(torch.int32))


def _rounds(values: torch.Tensor) -> torch.Tensor:
    """Whether every value rounds to a finite bfloat16."""
    return (values.view(torch.int32) & MAGNITUDE).amax() < TOO_LARGE


def _aligned(data: torch.Tensor) -> torch.Tensor:
    """The bytes where values of more than one byte may begin; a copy if they lie elsewhere."""
    return data if data.storage_offset() % 4 == 0 else data.clone()
