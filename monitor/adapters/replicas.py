"""Sharing out the writing of tensors that several ranks hold alike.

Pure interval arithmetic, without a collective: every rank computes the same shares of what it holds. Whose turn it is
to write a small tensor follows from the tensor's name alone: what some ranks hold besides, such as state that an
optimizer keeps only where it has elements to update, moves nobody's turn.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from monitor.adapters.base import Piece
from monitor.adapters.inventory import slice_of
from store.names import BUFFER, Fragment

SMALL = 16_384
"""Tensors of fewer elements go whole to one rank: a slice of them would cost more than it spares."""


@dataclass(frozen=True)
class Replica:
    """A piece that ``count`` ranks hold alike; this rank is number ``number`` of them."""

    piece: Piece
    number: int
    count: int


def even_slice(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """(start, numel) of a rank's share of ``numel`` elements in slices of ceil(numel / world size).

    The last ranks may get fewer elements or none.
    """
    part = -(-numel // world_size)
    start = min(rank * part, numel)
    return start, min(part, numel - start)


def share(pieces: Iterable[Piece], rank: int, world_size: int) -> list[Piece]:
    """:func:`share_out` of pieces that all ranks hold alike."""
    return share_out(Replica(piece, rank, world_size) for piece in pieces)


def share_out(replicas: Iterable[Replica]) -> list[Piece]:
    """The parts of replicated pieces that this rank saves; over all ranks that hold one they cover it exactly once.

    Buffers are all the first one's: where ranks disagree (running statistics that nothing synchronises), they are saved
    as one rank has them, not as a mixture, and as the rank whose buffers DistributedDataParallel broadcasts.
    """
    out: list[Piece] = []
    for replica in replicas:
        fragment = replica.piece.fragment
        if fragment.slot == BUFFER:
            start, numel = (0, fragment.numel) if replica.number == 0 else (0, 0)
        elif fragment.numel < SMALL:
            start, numel = (0, fragment.numel) if replica.number == _turn(fragment) % replica.count else (0, 0)
        else:
            start, numel = even_slice(fragment.numel, replica.number, replica.count)
        if numel:
            out.append(slice_of(replica.piece, start, numel))
    return out


def _turn(fragment: Fragment) -> int:
    return zlib.crc32(f"{fragment.fqn}/{fragment.slot}".encode())
