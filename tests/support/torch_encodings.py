"""Whole fragments encoded and decoded with torch, chunk after chunk."""

from __future__ import annotations

import torch

from monitor.save.torch_codecs import encoded_chunks, encoder_named, true_on
from store.encoding import encoding_named


def encode(values: torch.Tensor, name: str, out: torch.Tensor | None = None) -> tuple[torch.Tensor, bool]:
    """Return the bytes of 1-d float32, in ``out`` if that is given, and whether the encoding can hold the values."""
    if out is None:
        size = encoding_named(name).stored_bytes(values.numel(), "F32")
        out = torch.empty(size, dtype=torch.uint8, device=values.device)
    good = true_on(values.device)
    for values_at, bytes_at in encoded_chunks(values.numel(), name):
        good &= encoder_named(name).encode(values[values_at], out[bytes_at])
    return out, bool(good)


def decode(data: torch.Tensor, name: str, numel: int) -> torch.Tensor:
    """Return the values that :func:`encode` wrote."""
    out = torch.empty(numel, dtype=torch.float32, device=data.device)
    for values_at, bytes_at in encoded_chunks(numel, name):
        encoder_named(name).decode(data[bytes_at], out[values_at])
    return out
