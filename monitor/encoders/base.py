"""What an encoder on a device is: one chunk of float32 values to bytes in a given place, and back.

Chunks, lanes, scales and bounds are defined in :mod:`store.encoding`, in numpy; these give the same bytes. They do
not raise where values cannot be held, for finding out would wait for the device: they return it as a tensor.

Three things keep them equal on every device. What is compared is compared as integers, so a thread or device that
flushes subnormals sees the same. Divisors are tensors of the device: torch divides CUDA tensors by a plain number,
or by a scalar of the host, by multiplying with its rounded inverse. And each step is a kernel of its own, so no
multiplication and addition are fused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from store.encoding.base import BLOCK, PIECE

CUDA_PIECE = 1 << 20
"""Elements worked on at a time on CUDA: a whole chunk, for there a launch costs more than a cache miss."""


class Encoder(Protocol):
    """One encoding, on torch tensors."""

    @property
    def unsigned(self) -> bool:
        """Whether it holds no negative values (-0.0 counts as 0)."""

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Fill ``out`` (1-d uint8) with one encoded chunk of ``values`` (1-d float32, contiguous).

        Returns whether all values can be held, a bool tensor of no dimensions, on the device. ``out`` is undefined
        where it is False. Both are on one device; nothing waits for it.
        """

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out`` (1-d float32) with the values of one encoded chunk, taken to be what ``encode`` wrote."""


def pieces(numel: int, device: torch.device) -> Iterator[slice]:
    """The pieces of a chunk; any multiple of BLOCK gives the same bytes."""
    step = CUDA_PIECE if device.type == "cuda" else PIECE
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


def block_pieces(values: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """The elements, their blocks, and the values as (blocks, 64); a shorter last block by itself, filled with 0."""
    numel = values.numel()
    whole = numel - numel % BLOCK
    for piece in pieces(whole, values.device):
        yield piece, slice(piece.start // BLOCK, piece.stop // BLOCK), values[piece].view(-1, BLOCK)
    if whole < numel:
        last = torch.zeros(1, BLOCK, dtype=torch.float32, device=values.device)
        last[0, : numel - whole] = values[whole:]
        yield slice(whole, numel), slice(whole // BLOCK, whole // BLOCK + 1), last


class Scratch:
    """Room for the intermediate results of one piece, made once for a chunk: fresh memory costs page faults."""

    def __init__(self, values: torch.Tensor, count: int) -> None:
        step = CUDA_PIECE if values.device.type == "cuda" else PIECE
        size = max(BLOCK, min(step, values.numel()))
        self._made = [torch.empty(size, dtype=torch.float32, device=values.device) for _ in range(count)]
        self._shape, self._like = torch.Size((size,)), self._made

    def like(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """float32 tensors of the piece's shape, with anything in them. The same ones for pieces of one shape."""
        if piece.shape != self._shape:
            self._shape = piece.shape
            self._like = [made[: piece.numel()].view(piece.shape) for made in self._made]
        return self._like


def held(device: torch.device) -> torch.Tensor:
    """True, as a tensor."""
    return torch.ones((), dtype=torch.bool, device=device)


def aligned(data: torch.Tensor) -> torch.Tensor:
    """The bytes, where values of up to four bytes may begin; a copy if they lie elsewhere."""
    return data if data.storage_offset() % 4 == 0 else data.clone()
