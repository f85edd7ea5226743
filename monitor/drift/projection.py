"""A random linear map from any number of values to a few thousand that keeps distances.

Knows tensors only: no unit, no reference, no step. Owned by one meter in the training thread.

The map
=======

Write x for the values of a unit, cut into chunks x_1, x_2, ... of at most C values; no chunk crosses pieces.
Fixed by the seed: a table t of C random signs, and a random assignment of L >= C + O slots to k buckets,
the same number of slots each. Drawn per chunk: a sign s_c and an offset o_c in [0, O). Then

    board[o_c + j] += s_c * t[j] * x_c[j]          one fused pass over the data: addcmul
    signature[b]    = sum of board over the slots of bucket b

Claim: E |signature|^2 = |x|^2, and its variance is at most 2 (1/k + 2/O) |x|^4 up to terms of order 1/k^2,
*whatever x is*. Being linear, the same holds for the difference of two signatures and a distance.

Sketch of a proof. Let y_c be what chunk c alone gives, so signature = sum s_c y_c and

    |signature|^2 = sum |y_c|^2 + 2 sum_{c<d} s_c s_d <y_c, y_d>.

*Mean.* The s_c are independent of all else, so the second sum has mean 0. Within a chunk all slots differ
and so do the signs t[j]: E |y_c|^2 = |x_c|^2.
*Within a chunk.* Two positions share a bucket with probability < 1/k, so the variance of |y_c|^2 is at most
(2/k) |x_c|^4; chunks share these deviations only as far as their offsets agree.
*Across chunks.* The terms s_c s_d are uncorrelated, so the variance is 4 sum E <y_c, y_d>^2. Positions j of c
and i of d meet in a slot with probability <= 1/O (over the offsets), else in a bucket with probability 1/k.
For i != j their signs t[i] t[j] are independent of those of other pairs, which gives (1/k + 1/O) |x_c|^2
|x_d|^2. Pairs i = j have the sign +1 throughout. They meet all at once if o_c = o_d, with probability 1/O;
if not, each meets with probability 1/k, which adds <x_c, x_d>^2 / k^2. Summed up: the claim.

Each part is needed. Without the offsets, a column of a matrix whose width divides C piles up in one slot.
Without the assignment at random (bucket = slot mod k) one of width k does, and the estimate has a relative
variance of 2. Signs per row only (a random row vector times the values as rows of width k) fail when rows
are alike: for a constant update, or all-positive ones such as second moments, all rows are parallel, and the
estimate is a single random number squared.

Precision
=========

The board is float32 and is emptied into a float64 total every 64 chunks. The rounding noise of a measured
relative distance is then about 2e-7, added in squares: 1e-5 is measured within the statistical error, 1e-6
within some percent more, below that the noise shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from store.errors import ConfigError

_OFFSETS_PER_BUCKET = 8
"""O = 8 k or a little more: the 2/O of the variance is then a quarter of its 1/k."""

_EMPTY_EVERY = 64
"""Chunks between two roundings to float64."""

_CPU_CHUNKS = (1 << 14, 1 << 16, 1 << 17, 1 << 18)
_OTHER_CHUNKS = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""C. On a CPU, table and board should stay in the cache, and emptying the board takes time as C does: at least
32 chunks a unit. Elsewhere each chunk is a kernel launch: few long ones."""

_MASK = (1 << 64) - 1


class Projection:
    """The map, for any device; the same seed gives the same map on all of them.

    width: k, number of float32 values in a signature. The relative standard deviation of a distance is about
    sqrt(0.6 / k): 1.2 % for 4099. Raises ConfigError if it is below 64.
    """

    def __init__(self, width: int, seed: int) -> None:
        if width < 64:
            raise ConfigError(f"a sketch of width {width} tells nothing; use at least 64, best about 4099")
        self.width = width
        self.seed = seed
        self._boards: dict[tuple[torch.device, int], _Board] = {}

    @property
    def scratch_bytes(self) -> int:
        """Bytes of tables and boards: a few MiB a device, whatever the number of values."""
        return sum(board.nbytes for board in self._boards.values())

    @staticmethod
    def chunk_length(numel: int, device: torch.device) -> int:
        """C for that many values. Signatures compare only if taken with the same one."""
        lengths, chunks = (_CPU_CHUNKS, 32) if device.type == "cpu" else (_OTHER_CHUNKS, 4)
        return max((length for length in lengths if chunks * length <= numel), default=lengths[0])

    def project(self, pieces: Sequence[torch.Tensor], chunk_length: int, key: int) -> torch.Tensor:
        """The signature: 1-d float32 of length ``width``, on the host. Not finite if any value is not.

        pieces: 1-d, any real dtype and device. key: which sequence of signs and offsets to draw; signatures
        compare only if taken with the same key.
        """
        total = torch.zeros(self.width, dtype=torch.float64)
        draws = _draws(self.seed, key)
        with torch.inference_mode():
            for board, run in self._runs(pieces, chunk_length):
                for piece in run:
                    for chunk in torch.split(piece, chunk_length):
                        board.add(chunk, next(draws))
                total += board.take()
            return total.to(torch.float32)

    def _runs(self, pieces: Sequence[torch.Tensor], chunk_length: int) -> Iterator[tuple[_Board, list[torch.Tensor]]]:
        """Neighbouring pieces of one device, with its board. Empty pieces are left out."""
        run: list[torch.Tensor] = []
        for piece in pieces:
            if run and piece.device != run[-1].device:
                yield self._board(run[-1].device, chunk_length), run
                run = []
            if piece.numel():
                run.append(piece.detach())
        if run:
            yield self._board(run[-1].device, chunk_length), run

    def _board(self, device: torch.device, chunk_length: int) -> _Board:
        board = self._boards.get((device, chunk_length))
        if board is None:
            board = _Board(self.width, chunk_length, self.seed, device)
            self._boards[device, chunk_length] = board
        return board


class _Board:
    """Tables and accumulators of one chunk length on one device. Empty between two projections."""

    def __init__(self, width: int, chunk_length: int, seed: int, device: torch.device) -> None:
        self.width = width
        self.offsets = 1 << (_OFFSETS_PER_BUCKET * width - 1).bit_length()
        per_bucket = -(-(chunk_length + self.offsets) // width)
        slots = per_bucket * width
        # Drawn on the host whatever the device: generators of other devices give other numbers.
        generator = torch.Generator().manual_seed(_mixed(seed, chunk_length) >> 1)
        signs = torch.randint(0, 2, (chunk_length,), generator=generator, dtype=torch.float32) * 2 - 1
        order = torch.randperm(slots, generator=generator)
        self.signs = signs.to(device)
        self.order = order.to(device)
        self.slots = torch.zeros(slots, device=device)
        self.sorted = torch.empty(slots, device=device)
        self.upcast = torch.empty(0, device=device)
        self.total = torch.zeros(width, dtype=torch.float64, device=device)
        self.waiting = 0

    @property
    def nbytes(self) -> int:
        held = (self.signs, self.order, self.slots, self.sorted, self.upcast, self.total)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def add(self, chunk: torch.Tensor, draw: int) -> None:
        """Add up to C values; ``draw`` decides on sign and offset."""
        numel = chunk.numel()
        if chunk.dtype != torch.float32:
            if not self.upcast.numel():
                self.upcast = torch.empty_like(self.signs)
            chunk = self.upcast[:numel].copy_(chunk)
        offset = (draw >> 1) % self.offsets
        sign = 1 if draw & 1 else -1
        signs = self.signs if numel == self.signs.numel() else self.signs[:numel]
        self.slots[offset : offset + numel].addcmul_(chunk, signs, value=sign)
        self.waiting += 1
        if self.waiting == _EMPTY_EVERY:
            self._empty()

    def take(self) -> torch.Tensor:
        """What was added up, per bucket, on the host; the board is empty afterwards."""
        self._empty()
        taken = self.total.to("cpu", copy=True)
        self.total.zero_()
        return taken

    def _empty(self) -> None:
        if self.waiting:
            torch.index_select(self.slots, 0, self.order, out=self.sorted)
            self.total += self.sorted.view(-1, self.width).sum(0)
            self.slots.zero_()
            self.waiting = 0


def _draws(seed: int, key: int) -> Iterator[int]:
    """64 random bits a chunk, without state to keep."""
    start = _mixed(seed, key)
    index = 0
    while True:
        yield _mixed(start, index)
        index += 1


def _mixed(a: int, b: int) -> int:
    """splitmix64 of the b-th state after a (Steele, Lea, Flood: Fast splittable pseudorandom generators)."""
    z = (a + (b + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
