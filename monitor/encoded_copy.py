"""Encoding while staging: where state lies on a device its encoded bytes are made there, and only they are copied.

One fragment each. The values stand still until the copy is finished, like those of any copy; what the encoding cannot
hold is copied as it is after all. The encoded bytes and what was lost are known once it is finished; decoding them
into host memory is left to the background thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from monitor.encoders import encoder_named
from store.encoding import CHUNK, chunk_sizes, encoding_named
from store.encoding.base import Bytes

_HUGE = 3.3e38
"""What is larger may round to infinity; rather store it raw."""


def within_reach(values: torch.Tensor, unsigned: bool) -> torch.Tensor:
    """Whether no encoding rounds any of the values to infinity, and, if it is ``unsigned``, none is negative; False for
    NaN. On their device."""
    least, largest = torch.aminmax(values)
    return ((least >= 0) if unsigned else (least > -_HUGE)) & (largest < _HUGE)


@dataclass
class Lost:
    """Squared L2 norms over a unit's fragments on this rank: of what encoding lost, and of what decoding gives."""

    error_sq: float = 0.0
    decoded_sq: float = 0.0


@dataclass
class EncodedCopy:
    """A fragment on its way to host memory.

    source: 1-d float32, on any device. encoded: 1-d uint8 host memory of the encoded size, pinned where the source is
    on CUDA. copy: 1-d float32 host memory: the values, where they cannot be held; else for what decoding gives. Empty:
    neither is wanted.
    held, lost: once :meth:`finish` has returned."""

    source: torch.Tensor
    encoding: str
    encoded: torch.Tensor
    copy: torch.Tensor
    held: bool = False
    lost: Lost = field(default_factory=Lost)
    _told: torch.Tensor | None = None

    def begin(self) -> None:
        """Queue the work, on CUDA in the current stream; elsewhere it is done on return."""
        try:
            self._encode()
        except (torch.OutOfMemoryError, MemoryError):  # there is room for a plain copy, and that was reserved
            self._told = None

    @torch.no_grad()
    def _encode(self) -> None:
        encoding, encoder, device = encoding_named(self.encoding), encoder_named(self.encoding), self.source.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        held, at = torch.ones((), dtype=torch.bool, device=device), 0
        scratch = torch.empty(min(CHUNK, self.source.numel()), dtype=torch.float32, device=device)
        for values in torch.split(self.source, CHUNK):
            stop = at + encoding.stored_bytes(values.numel(), "F32")
            out = torch.empty(stop - at, dtype=torch.uint8, device=device)
            decoded = scratch[: values.numel()]
            held &= encoder.encode(values, out) & within_reach(values, encoder.unsigned)
            encoder.decode(out, decoded)
            sums[1] += decoded.double().square().sum()
            sums[0] += decoded.sub_(values).double().square().sum()
            self.encoded[at:stop].copy_(out, non_blocking=True)
            at = stop
        told = torch.cat((held.double().view(1), sums))
        self._told = torch.empty(3, dtype=torch.float64, pin_memory=told.is_cuda).copy_(told, non_blocking=True)

    def finish(self) -> None:
        """After whatever ran :meth:`begin` is through with it."""
        held, error_sq, decoded_sq = (0.0, 0.0, 0.0) if self._told is None else self._told.tolist()
        self.held = held == 1.0
        if self.held:
            self.lost = Lost(error_sq, decoded_sq)
        elif self.copy.numel():
            self.copy.copy_(self.source)

    def chunks(self) -> Iterator[Bytes]:
        """The encoded chunks, each decoded into ``copy`` as it comes. Background thread."""
        encoding, encoder, at, start = encoding_named(self.encoding), encoder_named(self.encoding), 0, 0
        for size in chunk_sizes(self.copy.numel()):
            stop = at + encoding.stored_bytes(size, "F32")
            encoder.decode(self.encoded[at:stop], self.copy[start : start + size])
            yield self.encoded[at:stop].numpy()
            at, start = stop, start + size
