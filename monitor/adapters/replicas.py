"""Sharing out the writing of tensors that every rank holds whole.

Pure interval arithmetic: every rank computes the same shares from the same list, without a collective.
"""

from __future__ import annotations

from collections.abc import Iterable

from monitor.adapters.base import Piece
from monitor.adapters.inventory import slice_of
from store.names import BUFFER

SMALL = 16_384
"""Tensors of fewer elements go whole to one rank: a slice of them would cost more than it spares."""


def even_slice(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """(start, numel) of a rank's share of ``numel`` elements in slices of ceil(numel / world size).

    The last ranks may get fewer elements or none.
    """
    part = -(-numel // world_size)
    start = min(rank * part, numel)
    return start, min(part, numel - start)


def share(pieces: Iterable[Piece], rank: int, world_size: int) -> list[Piece]:
    """The parts of replicated pieces that ``rank`` saves; over all ranks they cover each piece exactly once.

    Buffers are all rank 0's: where ranks disagree (running statistics that nothing synchronises), they
    are saved as one rank has them, not as a mixture, and as the rank whose buffers DistributedDataParallel
    broadcasts.
    """
    out: list[Piece] = []
    for index, piece in enumerate(pieces):
        if piece.fragment.slot == BUFFER:
            start, numel = (0, piece.fragment.numel) if rank == 0 else (0, 0)
        elif piece.fragment.numel < SMALL:
            start, numel = (0, piece.fragment.numel) if rank == index % world_size else (0, 0)
        else:
            start, numel = even_slice(piece.fragment.numel, rank, world_size)
        if numel:
            out.append(slice_of(piece, start, numel))
    return out
