"""What tells one tensor's values from another's, whoever holds which part of it: a sum over elements.

Every element is mixed with its index into 64 bits, and those are added up modulo 2**64; so fingerprints of pieces add
up to that of the whole, at any world size. Values that differ have equal ones once in 2**64. Bits count: 0.0 is not
-0.0. No guard against malice. Reads tensors where they are, in chunks.
"""

from __future__ import annotations

import torch

_CHUNK = 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd 64-bit numbers without pattern: those of splitmix64, signed."""


@torch.no_grad()
def fingerprint(values: torch.Tensor, start: int) -> int:
    """Of a 1-d contiguous tensor that begins at element ``start`` of its parameter; 0 <= it < 2**64."""
    words = values.view(_WORDS[values.element_size()]) if values.element_size() in _WORDS else values.view(torch.int64)
    per_element = words.numel() // max(1, values.numel())
    total = 0
    for at in range(0, words.numel(), _CHUNK):
        chunk = words[at : at + _CHUNK].to(torch.int64)
        first = start * per_element + at
        index = torch.arange(first, first + chunk.numel(), dtype=torch.int64, device=chunk.device)
        total += int(_mixed(chunk + _mixed(index * _FACTORS[0])).sum())
    return total % (1 << 64)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ (words >> 30)) * _FACTORS[1]
    words = (words ^ (words >> 27)) * _FACTORS[2]
    return words ^ (words >> 31)
