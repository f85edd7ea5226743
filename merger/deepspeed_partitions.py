"""Compute where DeepSpeed's ranks hold the elements of parameters, for reading its files and for writing them.

ZeRO-1/2: each param group is one flat tensor, cut into equal partitions. ZeRO-3: every parameter is cut into
ceil(numel / world size) slices, one per rank, laid flat by sub-group; the last slices hold padding.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened parameter, from ``offset`` of a flat partition."""

    fqn: str
    start: int
    stop: int
    offset: int


def partition_pieces(placed: Iterable[tuple[str, int, int]], size: int, rank: int) -> list[Piece]:
    """Return what a rank's partition of ``size`` elements holds of a flat tensor's (fqn, offset, numel)."""
    first = rank * size
    cut = ((fqn, at, max(at, first), min(at + numel, first + size)) for fqn, at, numel in placed)
    return [Piece(fqn, start - at, stop - at, start - first) for fqn, at, start, stop in cut if start < stop]


def partition_paddings(size: int, end: int, world_size: int) -> tuple[int, ...]:
    """Return the elements of each rank's partition behind the last parameter, which ends at ``end``."""
    return tuple(min(size, max(0, (rank + 1) * size - end)) for rank in range(world_size))


def slice_numel(numel: int, world_size: int) -> int:
    """Return the elements of a rank's slice of a parameter, padding included."""
    return -(-numel // world_size)


def slice_pieces(params: Iterable[tuple[str, int, int]], rank: int) -> list[Piece]:
    """Return a rank's slices of (fqn, numel, elements of a slice) in a row. Slices of padding alone are empty."""
    pieces, offset = [], 0
    for fqn, numel, part in params:
        pieces.append(Piece(fqn, min(rank * part, numel), min((rank + 1) * part, numel), offset))
        offset += part
    return pieces
