"""``bf16`` and ``bf16+int8`` in torch. Defined, to the bit, in store/encoding/bf16.py and bf16_int8.py."""

from __future__ import annotations

import torch

from monitor.encoders.base import Scratch, aligned, held, pieces
from store.encoding.bf16 import TOO_LARGE


class Bf16Encoder:
    """torch's own conversion, and a check beside it."""

    unsigned = False

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See :class:`monitor.encoders.base.Encoder`."""
        good, scratch = held(values.device), Scratch(values, 1)
        for piece in pieces(values.numel(), values.device):
            x = values[piece]
            (work,) = scratch.like(x)
            good &= _rounds(x, work)
            _halves(x, out[2 * piece.start : 2 * piece.stop])
        return good

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """See :class:`monitor.encoders.base.Encoder`."""
        for piece in pieces(out.numel(), out.device):
            out[piece] = aligned(data[2 * piece.start : 2 * piece.stop]).view(torch.bfloat16)


class Bf16Int8Encoder:
    """The residual is what lies between the bits of a value and of its bfloat16."""

    unsigned = False

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See :class:`monitor.encoders.base.Encoder`."""
        good, scratch = held(values.device), Scratch(values, 2)
        lows = out[2 * values.numel() :].view(torch.int8)
        for piece in pieces(values.numel(), values.device):
            x = values[piece]
            work, rest = scratch.like(x)
            good &= _rounds(x, work)
            work.copy_(_halves(x, out[2 * piece.start : 2 * piece.stop]))
            torch.sub(x.view(torch.int32), work.view(torch.int32), out=rest.view(torch.int32))
            # At most 2**15, so float32 holds it, and 2**-8 of it, exactly.
            work.copy_(rest.view(torch.int32))
            lows[piece] = work.mul_(2.0**-8).round_().clamp_(-127, 127)
        return good

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """See :class:`monitor.encoders.base.Encoder`."""
        scratch = Scratch(out, 1)
        lows = data[2 * out.numel() :].view(torch.int8)
        for piece in pieces(out.numel(), out.device):
            out[piece] = aligned(data[2 * piece.start : 2 * piece.stop]).view(torch.bfloat16)
            low = scratch.like(out[piece])[0].view(torch.int32)
            out[piece].view(torch.int32).add_(low.copy_(lows[piece]), alpha=1 << 8)


def _rounds(values: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
    """Whether every value rounds to a finite bfloat16."""
    return torch.abs(values, out=work).view(torch.int32).amax() < TOO_LARGE


def _halves(values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The values as bfloat16, put into ``out`` (uint8), wherever that begins."""
    if out.storage_offset() % 2 == 0:
        return out.view(torch.bfloat16).copy_(values)
    halves = values.to(torch.bfloat16)
    out.copy_(halves.view(torch.uint8))
    return halves
