"""Encodings in torch, bit-identical to store.encoding.

What an encoder on a device is: one chunk of float32 values to bytes in a given place, and back.

Chunks, lanes, scales and bounds are defined in :mod:`store.encoding`, in numpy; these give the same bytes. They do
not raise where values cannot be held, for finding out would wait for the device: they return it as a tensor.

Three things keep them equal on every device. What is compared is compared as integers, so a thread or device that
flushes subnormals sees the same. Divisors are tensors of the device: torch divides CUDA tensors by a plain number,
or by a scalar of the host, by multiplying with its rounded inverse. And each step is a kernel of its own, so no
multiplication and addition are fused.

``int8-block`` and ``int8-sqrt-block`` in torch. Defined, to the bit, in store/encoding/int8.py and
int8_sqrt_block.py.

Two passes over a chunk: the largest value of each block, from which all scales come at once, then the codes.

``bf16`` and ``bf16+int8`` in torch. Defined, to the bit, in store/encoding/bfloat16.py and bf16_int8.py.

The encodings of :mod:`store.encoding` in torch, on the device where the values are; bit for bit the same.

The numpy definition is the one that counts; ``tests/contract/test_encodings.py`` holds these to it. It does not
know packing, files or threads. No function here keeps anything between calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from store.encoding import (
    BF16,
    BF16_INT8,
    CHUNK,
    INT8_BLOCK,
    INT8_SQRT_BLOCK,
    RAW,
    chunk_sizes,
    encoding_named,
    int8,
)
from store.encoding.base import BLOCK, PIECE, lanes_bytes
from store.encoding.bfloat16 import TOO_LARGE
from store.encoding.int8 import GRID, block_count
from store.errors import DamagedError

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


_INFINITE = 0x7F800000
_INT_MIN = -(1 << 31)
_STEP = GRID + 1
_LEAST_SQRT_BITS = (127 - 62) << 23
"""Of int8.LEAST_SCALE, 2**-62."""


class Int8BlockEncoder:
    """Signed codes."""

    unsigned = False

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See :class:`monitor.save.torch_codecs.Encoder`."""
        if not values.numel():
            return held(values.device)
        scratch, largest = Scratch(values, 1), _per_block(values)
        for _, blocks, block in block_pieces(values):
            (work,) = scratch.like(block)
            torch.amax(torch.abs(block, out=work).view(torch.int32), 1, out=largest[blocks])
        scales = _divided(largest.view(torch.float32), 127).bitwise_and_(~GRID).view(torch.float32)
        scales.masked_fill_(scales < int8.LEAST_SCALE, 0)
        by = scales.masked_fill(scales == 0, torch.inf).unsqueeze(1)
        codes = _put(scales, out, values.numel()).view(torch.int8)
        for elements, blocks, block in block_pieces(values):
            (work,) = scratch.like(block)
            torch.div(block, by[blocks], out=work).round_()
            codes[elements] = work.view(-1)[: elements.stop - elements.start]
        return largest.amax() < _INFINITE

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """See :class:`monitor.save.torch_codecs.Encoder`."""
        for _ in _multiplied(data, torch.int8, out):
            pass


class Int8SqrtBlockEncoder:
    """Unsigned codes of square roots, settled by products and comparisons and not by how a root is rounded."""

    unsigned = True

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See :class:`monitor.save.torch_codecs.Encoder`."""
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
        good &= (largest.amax() < _INFINITE) & (scales.amax() <= int8.MOST_SQRT_SCALE)
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
        """See :class:`monitor.save.torch_codecs.Encoder`."""
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


class Bf16Encoder:
    """torch's own conversion, and a check beside it."""

    unsigned = False

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See :class:`monitor.save.torch_codecs.Encoder`."""
        good, scratch = held(values.device), Scratch(values, 1)
        for piece in pieces(values.numel(), values.device):
            x = values[piece]
            (work,) = scratch.like(x)
            good &= _rounds(x, work)
            _halves(x, out[2 * piece.start : 2 * piece.stop])
        return good

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """See :class:`monitor.save.torch_codecs.Encoder`."""
        for piece in pieces(out.numel(), out.device):
            out[piece] = aligned(data[2 * piece.start : 2 * piece.stop]).view(torch.bfloat16)


class Bf16Int8Encoder:
    """The residual is what lies between the bits of a value and of its bfloat16."""

    unsigned = False

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See :class:`monitor.save.torch_codecs.Encoder`."""
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
        """See :class:`monitor.save.torch_codecs.Encoder`."""
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


__all__ = ["Encoder", "decode", "encode", "encode_into", "encoder_named", "stored_bytes"]

_ENCODERS: dict[str, Encoder] = {
    BF16: Bf16Encoder(),
    BF16_INT8: Bf16Int8Encoder(),
    INT8_BLOCK: Int8BlockEncoder(),
    INT8_SQRT_BLOCK: Int8SqrtBlockEncoder(),
}


def encoder_named(name: str) -> Encoder:
    """The encoder of one chunk, for a lossy encoding. DamagedError where this release knows none of that name."""
    if name not in _ENCODERS:
        raise DamagedError(f"no encoder {name!r}; there are {', '.join(sorted(_ENCODERS))}")
    return _ENCODERS[name]


def encode(values: torch.Tensor, name: str, out: torch.Tensor | None = None) -> tuple[torch.Tensor, bool]:
    """The encoded fragment (1-d uint8, on the values' device), and whether the encoding can hold the values.

    values: float32 of any shape, contiguous; for raw any dtype. out: 1-d uint8 of the right size, filled and
    returned. Where the second is False, the bytes mean nothing: store the fragment raw. Waits for the device once;
    ``encode_into`` does not.
    """
    if out is None:
        out = torch.empty(stored_bytes(values, name), dtype=torch.uint8, device=values.device)
    return out, bool(encode_into(values, name, out))


@torch.no_grad()
def encode_into(values: torch.Tensor, name: str, out: torch.Tensor) -> torch.Tensor:
    """As ``encode``, without waiting: whether the values can be held comes as a bool tensor on the device."""
    _check(values, out, stored_bytes(values, name))
    flat = _flat(values)
    good = torch.ones((), dtype=torch.bool, device=values.device)
    if name == RAW:
        out.copy_(flat.view(torch.uint8))
        return good
    encoding, encoder, at = encoding_named(name), encoder_named(name), 0
    for index, size in enumerate(chunk_sizes(flat.numel())):
        stop = at + lanes_bytes(encoding.lanes(size, "F32"))
        start = index * CHUNK
        good &= encoder.encode(flat[start : start + size], out[at:stop])
        at = stop
    return good


@torch.no_grad()
def decode(data: torch.Tensor, name: str, out: torch.Tensor) -> torch.Tensor:
    """Fill ``out`` (contiguous; float32, or anything for raw) with the values of an encoded fragment; returns it.

    ``data`` is 1-d uint8 on the same device, as ``encode`` wrote it with True: bytes from a store are not checked
    here but in :mod:`store.encoding`.
    """
    _check(out, data, stored_bytes(out, name))
    flat = _flat(out)
    if name == RAW:
        flat.view(torch.uint8).copy_(data)
        return out
    encoding, encoder, at = encoding_named(name), encoder_named(name), 0
    for index, size in enumerate(chunk_sizes(flat.numel())):
        stop = at + lanes_bytes(encoding.lanes(size, "F32"))
        start = index * CHUNK
        encoder.decode(data[at:stop], flat[start : start + size])
        at = stop
    return out


def stored_bytes(values: torch.Tensor, name: str) -> int:
    """Bytes that a fragment of these values takes. ValueError for a dtype that the encoding does not apply to."""
    if name == RAW:
        return values.numel() * values.element_size()
    if values.dtype != torch.float32:
        raise ValueError(f"{name} takes float32, not {values.dtype}; store this one {RAW}")
    return encoding_named(name).stored_bytes(values.numel(), "F32")


def _flat(values: torch.Tensor) -> torch.Tensor:
    """In one dimension, of stride 1 even where torch counts another one as contiguous: no elements, or one."""
    return values.detach().as_strided((values.numel(),), (1,))


def _check(values: torch.Tensor, data: torch.Tensor, nbytes: int) -> None:
    if not values.is_contiguous():
        raise ValueError("values to encode or decode must be contiguous")
    if data.dtype != torch.uint8 or data.ndim != 1 or data.numel() != nbytes or not data.is_contiguous():
        raise ValueError(f"{nbytes} bytes (1-d, contiguous uint8) are needed, not {tuple(data.shape)} {data.dtype}")
    if data.device != values.device:
        raise ValueError(f"values on {values.device} and bytes on {data.device}: both must be on one device")
