"""Project many units on a CUDA device at once: to launch kernels for each unit takes longer than to read it.

A program of the first kernel holds part of a unit's board in registers and goes over its chunks, so each value is read
once, in the order of :class:`~monitor.observe.sketch_meter.Projection`. One of the second sums some buckets' slots.
Groups of boards stay in the device's cache. Sum order is fixed, so equal values have equal signatures. Needs Triton."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from operator import is_

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_CHUNKS = ((1 << 28, 1 << 22), (1 << 26, 1 << 20), (1 << 22, 1 << 18), (1 << 20, 1 << 16), (0, 1 << 14))
"""Least number of values, and their chunk length. Few chunks make large boards, many let programs run long."""

_BOARDS = 40 << 20  # bytes of the boards of one group
_BLOCK, _ROWS, _BUCKETS = 1024, 16, 64  # slots of a program; slots and buckets of a step of the second kernel


def chunk_length(numel: int) -> int:
    """Return the chunk length of a unit."""
    return next(length for least, length in _CHUNKS if numel >= least)


@triton.jit(do_not_specialize=("first", "slots"))
def _fill(  # noqa: PLR0917
    pointers, numels, offsets, signs, starts, table, board, first, slots, dtype: tl.constexpr, size: tl.constexpr
):
    unit = first + tl.program_id(1)
    slot = tl.program_id(0) * size + tl.arange(0, size)
    last = tl.load(starts + unit + 1)
    total = tl.zeros((size,), tl.float64)
    for begin in range(tl.load(starts + unit), last, 64):
        part = tl.zeros((size,), tl.float32)
        for chunk in range(begin, tl.minimum(begin + 64, last)):
            values = tl.load(pointers + chunk).to(tl.pointer_type(dtype))
            place = slot - tl.load(offsets + chunk)
            inside = (place >= 0) & (place < tl.load(numels + chunk))
            sign = tl.load(table + place, mask=inside, other=0).to(tl.float32) * tl.load(signs + chunk)
            part += tl.load(values + place, mask=inside, other=0.0).to(tl.float32) * sign
        total += part.to(tl.float64)
    row = tl.program_id(1).to(tl.int64) * slots
    tl.store(board + row + slot, total.to(tl.float32), mask=slot < slots)


@triton.jit(do_not_specialize=("first", "slots", "rows", "width"))
def _sum(board, order, out, first, slots, rows, width, step: tl.constexpr, size: tl.constexpr):  # noqa: PLR0917
    bucket = tl.program_id(0) * size + tl.arange(0, size)
    total = tl.zeros((step, size), tl.float64)
    for begin in range(0, rows, step):
        row = begin + tl.arange(0, step)
        inside = (row < rows)[:, None] & (bucket < width)[None, :]
        slot = tl.load(order + row[:, None] * width + bucket[None, :], mask=inside, other=0)
        values = board + tl.program_id(1).to(tl.int64) * slots + slot
        total += tl.load(values, mask=inside, other=0.0).to(tl.float64)
    place = (first + tl.program_id(1)).to(tl.int64) * width + bucket
    tl.store(out + place, tl.sum(total, 0).to(tl.float32), mask=bucket < width)


@dataclass(frozen=True)
class Tables:
    """Random tables of one chunk length, on a device: a sign for each value, and the slots of the buckets."""

    width: int
    offsets: int
    signs: torch.Tensor  # int8
    order: torch.Tensor  # int32, slots by bucket


class Batch:
    """Units of one device, dtype and chunk length, at fixed addresses.

    draws: for each unit, returns 64 random bits a chunk."""

    def __init__(
        self, units: Sequence[Sequence[torch.Tensor]], draws: Sequence[Callable[[int], list[int]]], tables: Tables
    ) -> None:
        device, length = units[0][0].device, tables.signs.numel()
        self._dtype, self.tables, self._count = _DTYPES[units[0][0].dtype], tables, len(units)
        begins, numels, bits, counts = [], [], [], []
        for unit, draw in zip(units, draws, strict=True):
            firsts = [np.arange(0, piece.numel(), length) for piece in unit]
            for piece, first in zip(unit, firsts, strict=True):
                begins.append(piece.data_ptr() + first * piece.element_size())
                numels.append(np.minimum(length, piece.numel() - first))
            counts.append(sum(map(len, firsts)))
            bits += draw(counts[-1])
        drawn = np.array(bits, np.uint64)

        def to_device(values: npt.ArrayLike, dtype: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(np.asarray(values).astype(np.int64)).to(dtype).to(device)

        self._pointers = to_device(np.concatenate(begins), torch.int64)
        self._numels = to_device(np.concatenate(numels), torch.int32)
        self._offsets = to_device((drawn >> np.uint64(1)) % np.uint64(tables.offsets), torch.int32)
        self._signs = to_device((drawn & np.uint64(1)).astype(np.int64) * 2 - 1, torch.float32)
        self._starts = to_device(list(accumulate(counts, initial=0)), torch.int32)
        slots = tables.order.numel()
        self._group = min(self._count, max(1, _BOARDS // (4 * slots)))
        self._board = torch.empty(self._group * slots, dtype=torch.float32, device=device)
        self._known: Sequence[torch.Tensor | None] = ()
        self._references = self._board[:0]

    def run(self) -> torch.Tensor:
        """Queue the projection. Return the signatures of the units, row by row."""
        tables, slots = self.tables, self.tables.order.numel()
        chunks = self._pointers, self._numels, self._offsets, self._signs, self._starts
        with torch.cuda.device(self._board.device) if self._board.is_cuda else nullcontext():
            out = torch.empty(self._count, tables.width, dtype=torch.float32, device=self._board.device)
            for first in range(0, self._count, self._group):
                count, rows = min(self._group, self._count - first), slots // tables.width
                grid = triton.cdiv(slots, _BLOCK), count
                _fill[grid](*chunks, tables.signs, self._board, first, slots, dtype=self._dtype, size=_BLOCK)
                grid = triton.cdiv(tables.width, _BUCKETS), count
                _sum[grid](self._board, tables.order, out, first, slots, rows, tables.width, step=_ROWS, size=_BUCKETS)
        return out

    def distances(self, signatures: torch.Tensor, references: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Queue the squared distances of all rows to ``references``, which are on the host (None: 0), in float64."""
        if len(self._known) != len(references) or not all(map(is_, self._known, references)):
            nothing = torch.zeros(self.tables.width, dtype=torch.float32, device="cpu")
            rows = [nothing if one is None else one for one in references]
            pinned = signatures.is_cuda  # from other memory, the copy would wait for the device
            stacked = torch.empty(signatures.shape, dtype=torch.float32, device="cpu", pin_memory=pinned)
            torch.stack(rows, out=stacked)
            self._known, self._references = references, stacked.to(signatures.device, non_blocking=True)
        return (signatures.double() - self._references).square_().sum(1)


def fits(pieces: Sequence[torch.Tensor]) -> bool:
    """Return whether a unit can be projected here: all of it on one device, contiguous and of one dtype."""
    kinds = {(piece.device, piece.dtype, piece.is_contiguous()) for piece in pieces}
    return len(kinds) == 1 and pieces[0].is_contiguous() and pieces[0].dtype in _DTYPES
