"""Encode and decode tensors on their device, as :mod:`store.encoding` defines to the bit.

``tests/contract/test_encodings.py`` compares the encoded bytes with those of numpy encoders
(``tests/support/reference_encodings.py``), and the decoded values with those of :mod:`store.encoding`. Functions keep
no state. They do not raise if values cannot be held, since that would wait for the device: they return it as a tensor.

Three rules keep bytes equal on all devices. Comparisons are of integers, so threads and devices that flush subnormals
agree. Divisors are tensors on the device: torch divides CUDA tensors by a number, or a scalar on the host, by
multiplying with its rounded inverse. Each operation is its own kernel, so no multiply and add are fused."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch

from store.encoding import CHUNK, bfloat16, chunk_sizes, encoding_named, int8, log2, shared_exponent
from store.encoding.base import BLOCK, PIECE, Bytes, lanes_bytes
from store.encoding.shared_exponent import SharedExponent
from store.errors import DamagedError

MOST_CHUNKS = 64  # encoded at once on a device, where launching kernels for each chunk would take longer
_WORK = 40  # bytes of a device's memory for each element that is encoded at once

_INFINITE = 0x7F800000
_INT_MIN = -(1 << 31)


def encoder_named(name: str) -> "Encoder":
    """Return the encoder of a lossy encoding. Raises DamagedError if there is none of that name."""
    if name not in _ENCODERS:
        raise DamagedError(f"no encoder {name!r}; known are {', '.join(sorted(_ENCODERS))}")
    return _ENCODERS[name]


def encoded_chunks(numel: int, name: str, at_once: int = 1) -> Iterator[tuple[slice, slice]]:
    """Yield the elements and the encoded bytes of each chunk of a float32 fragment, or of each run of whole ones."""
    encoding, start, at = encoding_named(name), 0, 0
    for _, run in groupby(enumerate(chunk_sizes(numel)), lambda chunk: (chunk[0] // at_once, chunk[1])):
        sizes = [size for _, size in run]
        stop = at + len(sizes) * lanes_bytes(encoding.lanes(sizes[0], "F32"))
        yield slice(start, start + sum(sizes)), slice(at, stop)
        start, at = start + sum(sizes), stop


def chunks_at_once(values: torch.Tensor) -> int:
    """Return how many chunks to encode at once: on a host one, for its cache; on a device as memory allows."""
    if values.device.type == "cpu" or values.numel() <= CHUNK:
        return 1
    free = torch.cuda.mem_get_info(values.device)[0] if values.is_cuda else math.inf
    return int(max(1, min(MOST_CHUNKS, free // (4 * _WORK * CHUNK))))


def chunk_after_chunk(data: torch.Tensor, name: str, count: int) -> torch.Tensor:
    """Reorder the bytes of ``count`` whole chunks that were encoded as one, with long lanes, to chunk after chunk."""
    lanes = torch.split(data, [count * lane.nbytes for lane in encoding_named(name).lanes(CHUNK, "F32")])
    return torch.cat([lane.view(count, -1) for lane in lanes], 1).view(-1)


class Encoder(ABC):
    """Encodes and decodes chunks of one lossy encoding."""

    limits = -3.3e38, 3.3e38  # beyond them, values may round to infinity
    """Smallest value that it can hold, and the next larger value that it cannot. -0.0 counts as 0."""

    @abstractmethod
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Fill ``out`` (1-d uint8) with one encoded chunk of ``values`` (1-d float32, contiguous).

        Return whether all values can be held, as a 0-d bool tensor; if not, ``out`` is undefined. Both tensors are on
        one device, which is not waited for."""

    @abstractmethod
    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out`` (1-d float32) with the values of one chunk that ``encode`` wrote."""


def pieces(numel: int, device: torch.device) -> Iterator[slice]:
    """Yield the pieces of a chunk; any multiple of BLOCK gives the same bytes."""
    step = PIECE if device.type == "cpu" else max(1, numel)
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


def block_pieces(values: torch.Tensor, size: int = BLOCK) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield elements, their blocks, and the values as (blocks, size); a shorter last block is alone, padded with 0."""
    numel = values.numel()
    whole = numel - numel % size
    for piece in pieces(whole, values.device):
        yield piece, slice(piece.start // size, piece.stop // size), values[piece].view(-1, size)
    if whole < numel:
        last = torch.zeros(1, size, dtype=torch.float32, device=values.device)
        last[0, : numel - whole] = values[whole:]
        yield slice(whole, numel), slice(whole // size, whole // size + 1), last


class Scratch:
    """Buffers for intermediate results of one piece, allocated once for a chunk: new memory costs page faults."""

    def __init__(self, values: torch.Tensor, count: int, block: int = BLOCK) -> None:
        size = max(block, min(PIECE, values.numel()) if values.device.type == "cpu" else values.numel())
        self._made = [torch.empty(size, dtype=torch.float32, device=values.device) for _ in range(count)]
        self._shape, self._like = torch.Size((size,)), self._made

    def like(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Return float32 tensors of the piece's shape, contents undefined; the same for pieces of one shape."""
        if piece.shape != self._shape:
            self._shape = piece.shape
            self._like = [made[: piece.numel()].view(piece.shape) for made in self._made]
        return self._like


def true_on(device: torch.device) -> torch.Tensor:
    """Return True as a tensor on the device."""
    return torch.ones((), dtype=torch.bool, device=device)


def aligned(data: torch.Tensor) -> torch.Tensor:
    """Return the bytes aligned to four bytes; a copy if they are not."""
    return data if data.storage_offset() % 4 == 0 else data.clone()


class Int8BlockEncoder(Encoder):
    """``int8-block``, defined in :mod:`store.encoding.int8`.

    Two passes over a chunk: the largest value of each block, from which all scales come at once, then the codes."""

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if not values.numel():
            return true_on(values.device)
        scratch = Scratch(values, 1)
        largest = torch.empty(int8.block_count(values.numel()), dtype=torch.int32, device=values.device)
        for _, blocks, block in block_pieces(values):
            (work,) = scratch.like(block)
            torch.amax(torch.abs(block, out=work).view(torch.int32), 1, out=largest[blocks])
        levels = torch.full((1,), 127.0, dtype=torch.float32, device=values.device)  # on the device: a true division
        scales = (largest.view(torch.float32) / levels).view(torch.int32).bitwise_and_(~int8.GRID).view(torch.float32)
        scales.masked_fill_(scales < int8.LEAST_SCALE, 0)
        by = scales.masked_fill(scales == 0, torch.inf).unsqueeze(1)
        out[values.numel() :] = scales.view(torch.uint8)  # this lane may begin at any byte
        codes = out[: values.numel()].view(torch.int8)
        for elements, blocks, block in block_pieces(values):
            (work,) = scratch.like(block)
            torch.div(block, by[blocks], out=work).round_()
            codes[elements] = work.view(-1)[: elements.stop - elements.start]
        return largest.amax() < _INFINITE

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        numel = out.numel()
        codes, scales = data[:numel].view(torch.int8), data[numel:].clone().view(torch.float32)
        whole = numel - numel % BLOCK
        for piece in pieces(whole, out.device):
            scale = scales[piece.start // BLOCK : piece.stop // BLOCK].unsqueeze(1)
            torch.mul(codes[piece].view(-1, BLOCK), scale, out=out[piece].view(-1, BLOCK))
        if whole < numel:
            torch.mul(codes[whole:], scales[-1], out=out[whole:])


class Int8Log2Encoder(Encoder):
    """``int8-log2``, defined in :mod:`store.encoding.log2`, in integer operations."""

    limits = 0.0, 1.1875 * 2.0**32

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        good, scratch = true_on(values.device), Scratch(values, 2)
        for piece in pieces(values.numel(), values.device):
            bits = values[piece].view(torch.int32)
            code, least = (made.view(torch.int32) for made in scratch.like(values[piece]))
            # With the sign flipped, -0.0 is 0, other negative values lie above it and all others below.
            good &= torch.bitwise_xor(bits, _INT_MIN, out=least).amax() <= 0
            good &= bits.amax() < log2.TOO_LARGE
            torch.add(bits, log2.ROUNDING, out=code).bitwise_right_shift_(log2.SHIFT).sub_(log2.OFFSET)
            out[piece] = torch.maximum(code, torch.clamp(bits, 0, 1, out=least), out=code)
        return good

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        scratch = Scratch(out, 2)
        for piece in pieces(out.numel(), out.device):
            bits = out[piece].view(torch.int32).copy_(data[piece])
            odd, some = (made.view(torch.int32) for made in scratch.like(out[piece]))
            torch.clamp(bits, max=1, out=some)  # 0 for code 0
            torch.bitwise_and(bits.add_(log2.OFFSET), 1, out=odd)
            bits.bitwise_right_shift_(1).bitwise_left_shift_(23).add_(odd, alpha=log2.ROOT_2).mul_(some)


class SharedExponentEncoder(Encoder):
    """The encodings of :mod:`store.encoding.shared_exponent`.

    Scales come from minima and maxima of integers; multiplying by a power of two is exact."""

    limits = -2.55e38, 2.55e38

    def __init__(self, form: SharedExponent) -> None:
        self._form, self._dtype = form, torch.uint8 if form.width == 1 else torch.int16

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if not values.numel():
            return true_on(values.device)
        size, numel = self._form.block, values.numel()
        scratch = Scratch(values, 2, size)
        usual = torch.empty(self._form.blocks(numel), dtype=torch.int32, device=values.device)
        large = torch.empty_like(usual)
        for _, blocks, block in block_pieces(values, size):
            magnitude = torch.abs(block, out=scratch.like(block)[0]).view(torch.int32)
            largest = magnitude
            while (half := largest.shape[1] // 2) >= self._form.groups:
                largest = torch.maximum(largest[:, :half], largest[:, half:], out=largest[:, :half])
            torch.amin(largest, 1, out=usual[blocks])
            torch.amax(largest, 1, out=large[blocks])
        exponents = self._exponents(usual, large, self._form.finest(numel))
        # 0, not a power of two, where the exponent is 0: those blocks are zero.
        inverse = (254 - exponents).mul_(exponents.clamp(max=1)).bitwise_left_shift_(shared_exponent.FRACTION)
        by = inverse.view(torch.float32).unsqueeze(1)
        stored, out[self._form.width * numel :] = out[: self._form.width * numel], exponents
        for elements, blocks, block in block_pieces(values, size):
            work, code = scratch.like(block)
            code = code.view(torch.int32).copy_(torch.mul(block, by[blocks], out=work).round_())
            if self._form.width == 1:  # zigzag
                code = torch.bitwise_right_shift(code, 31, out=work.view(torch.int32)).bitwise_xor_(code.mul_(2))
            at = slice(self._form.width * elements.start, self._form.width * elements.stop)
            stored[at] = code.view(-1)[: elements.stop - elements.start].to(self._dtype).view(torch.uint8)
        return large.amax() < shared_exponent.TOO_LARGE

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        size, numel, scratch = self._form.block, out.numel(), Scratch(out, 1)
        stored, exponents = data[: self._form.width * numel], data[self._form.width * numel :]
        scales = exponents.int().bitwise_left_shift_(shared_exponent.FRACTION).view(torch.float32)
        for piece in pieces(numel, out.device):
            code = stored[self._form.width * piece.start : self._form.width * piece.stop]
            code = out[piece].view(torch.int32).copy_(aligned(code).view(self._dtype))
            if self._form.width == 1:
                sign = torch.bitwise_and(code, 1, out=scratch.like(code)[0].view(torch.int32)).neg_()
                code.bitwise_right_shift_(1).bitwise_xor_(sign)
            by = scales[piece.start // size : self._form.blocks(piece.stop)].repeat_interleave(size)
            torch.mul(code, by[: code.numel()], out=out[piece])

    def _exponents(self, usual: torch.Tensor, large: torch.Tensor, below_usual: int) -> torch.Tensor:
        """Return the exponents of the scales, plus 127, or 0, from the bits of two magnitudes of each block."""
        made = []
        for bits, below in ((usual, below_usual), (large, self._form.below_large)):
            rounded = (bits + self._form.rounding(below)).bitwise_right_shift_(shared_exponent.FRACTION)
            made.append(rounded.sub_(below))
        least = shared_exponent.LEAST
        return torch.maximum(*made).clamp_(min=least).mul_(large > (least - 1) << shared_exponent.FRACTION)


class Bf16Encoder(Encoder):
    """``bf16``, defined in :mod:`store.encoding.bfloat16`: torch's conversion, with a check."""

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        good, scratch = true_on(values.device), Scratch(values, 1)
        for piece in pieces(values.numel(), values.device):
            x = values[piece]
            (work,) = scratch.like(x)
            good &= _rounds_finite(x, work)
            _put_bfloat16(x, out[2 * piece.start : 2 * piece.stop])
        return good

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        for piece in pieces(out.numel(), out.device):
            out[piece] = aligned(data[2 * piece.start : 2 * piece.stop]).view(torch.bfloat16)


class Bf16Int8Encoder(Encoder):
    """``bf16+int8``, defined in :mod:`store.encoding.bfloat16`; the residual is a difference of bit patterns."""

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        good, scratch = true_on(values.device), Scratch(values, 2)
        lows = out[2 * values.numel() :].view(torch.int8)
        for piece in pieces(values.numel(), values.device):
            x = values[piece]
            work, rest = scratch.like(x)
            good &= _rounds_finite(x, work)
            work.copy_(_put_bfloat16(x, out[2 * piece.start : 2 * piece.stop]))
            torch.sub(x.view(torch.int32), work.view(torch.int32), out=rest.view(torch.int32))
            # At most 2**15, so float32 holds it, and 2**-8 of it, exactly.
            work.copy_(rest.view(torch.int32))
            lows[piece] = work.mul_(2.0**-8).round_().clamp_(-127, 127)
        return good

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        scratch, lows = Scratch(out, 1), data[2 * out.numel() :].view(torch.int8)
        for piece in pieces(out.numel(), out.device):
            out[piece] = aligned(data[2 * piece.start : 2 * piece.stop]).view(torch.bfloat16)
            low = scratch.like(out[piece])[0].view(torch.int32)
            out[piece].view(torch.int32).add_(low.copy_(lows[piece]), alpha=1 << 8)


def _rounds_finite(values: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
    return torch.abs(values, out=work).view(torch.int32).amax() < bfloat16.TOO_LARGE


def _put_bfloat16(values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the values as bfloat16, after writing them to ``out`` (uint8, any alignment)."""
    if out.storage_offset() % 2 == 0:
        return out.view(torch.bfloat16).copy_(values)
    halves = values.to(torch.bfloat16)
    out.copy_(halves.view(torch.uint8))
    return halves


_ENCODERS: dict[str, Encoder] = {
    bfloat16.BF16: Bf16Encoder(),
    bfloat16.BF16_INT8: Bf16Int8Encoder(),
    int8.INT8_BLOCK: Int8BlockEncoder(),
    log2.INT8_LOG2: Int8Log2Encoder(),
    **{
        form.name: SharedExponentEncoder(form)
        for form in (
            shared_exponent.Int8SharedExponent(),
            shared_exponent.Int8SharedExponent128(),
            shared_exponent.Int16SharedExponent(),
        )
    },
}


def in_range(values: torch.Tensor, encoder: Encoder) -> torch.Tensor:
    """Return whether the encoder can hold all values, which NaN is not, as a tensor on their device."""
    least, largest = torch.aminmax(values)
    return (least >= encoder.limits[0]) & (largest < encoder.limits[1])


@dataclass
class EncodingLoss:
    """Squared L2 norms over a unit's fragments on this rank: of the encoding error and of the decoded values."""

    error_sq: float = 0.0
    decoded_sq: float = 0.0


@dataclass
class EncodedCopy:
    """Encodes one fragment on its device, and copies the encoded bytes to host memory.

    Values that the encoding cannot hold are copied as they are. The source must not change until :meth:`finish`.
    ``copy`` is for the decoded values, or the values if the encoding cannot hold them; empty if neither is needed."""

    source: torch.Tensor  # 1-d float32, on any device
    encoding: str  # a lossy one
    encoded: torch.Tensor  # 1-d uint8 host memory of the encoded size, pinned if the source is on CUDA
    copy: torch.Tensor  # 1-d float32 host memory
    held: bool = False  # whether the encoding holds all values; set by :meth:`finish`
    no_memory: bool = False  # whether there was no memory to encode them; set by :meth:`begin`
    lost: EncodingLoss = field(default_factory=EncodingLoss)  # set by :meth:`finish`
    _result: torch.Tensor | None = None

    def begin(self) -> None:
        """Encode; on CUDA, queue it in the current stream."""
        try:
            self._encode()
        except (torch.OutOfMemoryError, MemoryError):  # memory for a plain copy is reserved
            self.no_memory = True

    @torch.no_grad()
    def _encode(self) -> None:
        encoder, device, at_once = encoder_named(self.encoding), self.source.device, chunks_at_once(self.source)
        sums, held = torch.zeros(2, dtype=torch.float64, device=device), true_on(device)
        scratch = torch.empty(min(at_once * CHUNK, self.source.numel()), dtype=torch.float32, device=device)
        for values_at, bytes_at in encoded_chunks(self.source.numel(), self.encoding, at_once):
            values, out = self.source[values_at], torch.empty_like(self.encoded[bytes_at], device=device)
            decoded = scratch[: values.numel()]
            held &= encoder.encode(values, out) & in_range(values, encoder)
            encoder.decode(out, decoded)
            sums[1] += decoded.double().square().sum()
            sums[0] += decoded.sub_(values).double().square().sum()
            if values.numel() > CHUNK:
                out = chunk_after_chunk(out, self.encoding, values.numel() // CHUNK)
            self.encoded[bytes_at].copy_(out, non_blocking=True)
        result = torch.cat((held.double().view(1), sums))
        self._result = torch.empty(3, dtype=torch.float64, device="cpu", pin_memory=result.is_cuda)
        self._result.copy_(result, non_blocking=True)

    def finish(self) -> None:
        """Set the outcome, after the work that :meth:`begin` queued is complete. Copy the values if they do not fit."""
        held, error_sq, decoded_sq = (0.0, 0.0, 0.0) if self._result is None else self._result.tolist()
        self.held = held == 1.0
        if self.held:
            self.lost = EncodingLoss(error_sq, decoded_sq)
        elif self.copy.numel():
            self.copy.copy_(self.source)

    def chunks(self) -> Iterator[Bytes]:
        """Yield the encoded chunks and decode each one into ``copy``. Background thread."""
        encoder = encoder_named(self.encoding)
        for values_at, bytes_at in encoded_chunks(self.copy.numel(), self.encoding):
            encoder.decode(self.encoded[bytes_at], self.copy[values_at])
            yield self.encoded[bytes_at].numpy()
