"""Share the writing of what several ranks hold: each saves a part of it. Nothing is a collective."""

import zlib
from collections.abc import Iterable
from typing import NamedTuple

from monitor.adapters.base import Piece
from monitor.adapters.module_tensors import slice_piece
from store.names import BUFFER, Fragment

SMALL = 16_384  # tensors with fewer elements are written by one rank: slices would cost more than they save


class Replica(NamedTuple):
    """A piece that ``copies`` ranks hold; this rank is number ``number`` of them."""

    piece: Piece
    number: int
    copies: int


def even_slice(numel: int, rank: int, world_size: int, row: int = 1) -> tuple[int, int]:
    """Return (start, numel) of a rank's part of ``numel`` elements, in slices of ceil(rows / world size) rows each.

    The last ranks may get fewer elements or none."""
    part = -(-numel // (world_size * row)) * row
    start = min(rank * part, numel)
    return start, min(part, numel - start)


def partition_replicated(pieces: Iterable[Piece], rank: int, world_size: int) -> list[Piece]:
    """Return the parts that this rank saves of pieces that all ranks hold."""
    return partition_replicas(Replica(piece, rank, world_size) for piece in pieces)


def partition_replicas(replicas: Iterable[Replica]) -> list[Piece]:
    """Return the parts of replicated pieces that this rank saves. Over the ranks they cover each piece exactly once.

    Computed without a collective. A small tensor's writer follows from its name alone, so state that an optimizer keeps
    only on ranks with elements to update does not change the writers of other tensors. Buffers are all saved by the
    first rank, whose buffers DistributedDataParallel broadcasts: where ranks disagree (running statistics that are not
    synchronized), the others keep theirs in their run state (:class:`monitor.adapters.module_tensors.RankBuffers`)."""
    out: list[Piece] = []
    for replica in replicas:
        fragment = replica.piece.fragment
        if fragment.slot == BUFFER:
            start, numel = (0, fragment.numel) if replica.number == 0 else (0, 0)
        elif fragment.numel < SMALL:
            writer = zlib.crc32(f"{fragment.fqn}/{fragment.slot}".encode()) % replica.copies
            start, numel = (0, fragment.numel) if replica.number == writer else (0, 0)
        else:
            start, numel = even_slice(fragment.numel, replica.number, replica.copies, _row(fragment, replica.copies))
        if numel:
            out += slice_piece(replica.piece, start, numel)
    return out


def _row(fragment: Fragment, copies: int) -> int:
    """Return the elements of a row of a box, if its rows suffice for all: a slice of whole rows is one fragment."""
    rows = 1 if fragment.box is None else fragment.box.sizes[0]
    return fragment.numel // rows if rows >= copies else 1
