"""CRC-32 of a run of bytes put together from the CRC-32s of its pieces, in whatever order they were written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from isal import isal_zlib

from store.errors import MergeError


@dataclass(frozen=True, order=True)
class Piece:
    """``nbytes`` bytes from ``offset`` of a file have the CRC-32 ``crc``."""

    offset: int
    nbytes: int
    crc: int


def combined(offset: int, nbytes: int, pieces: Iterable[Piece]) -> int:
    """CRC-32 of the ``nbytes`` bytes from ``offset``; what no piece covers is zeros. Pieces must not overlap."""
    crc, position = 0, offset
    for piece in sorted(pieces):
        if piece.offset < position or piece.offset + piece.nbytes > offset + nbytes:
            raise MergeError(
                f"bytes {piece.offset} to {piece.offset + piece.nbytes} were written twice or in a wrong place"
            )
        crc = isal_zlib.crc32_combine(crc, crc_of_zeros(piece.offset - position), piece.offset - position)
        crc = isal_zlib.crc32_combine(crc, piece.crc, piece.nbytes)
        position = piece.offset + piece.nbytes
    rest = offset + nbytes - position
    return isal_zlib.crc32_combine(crc, crc_of_zeros(rest), rest)


def crc_of_zeros(nbytes: int) -> int:
    """CRC-32 of ``nbytes`` zero bytes, in a number of steps that grows with the logarithm."""
    crc, power, size = 0, isal_zlib.crc32(b"\0"), 1
    while nbytes:
        if nbytes & 1:
            crc = isal_zlib.crc32_combine(crc, power, size)
        power = isal_zlib.crc32_combine(power, power, size)
        nbytes >>= 1
        size <<= 1
    return crc
