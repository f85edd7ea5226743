"""Checking a stored fragment together with all those that are stored as differences to it.

Their chunks go side by side, so every stored byte is read once, the base's too, and memory is a few chunks however
many there are. Checked: the stored bytes' hash; that they unpack to what was packed; that they can be decoded.
It does not know which of them a commit needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from store.coverage import Source
from store.encoding import encoding_named
from store.encoding.base import Bytes, chunk_sizes
from store.encoding.stream import next_chunk, require_end
from store.errors import DamagedError, StorageError
from store.fragments import Readable, StoredBytes, check_encoded


@dataclass(frozen=True)
class Finding:
    """A stored fragment whose own bytes are wrong, are refused, or do not give what was stored."""

    source: Source
    error: DamagedError | StorageError


def check_family(files: Readable, base: Source, differences: Sequence[Source]) -> list[Finding]:
    """What is wrong. Nothing is said of differences to a wrong base, but where their own bytes are wrong as well."""
    first, others = _Member(files, base), [_Member(files, source) for source in differences]
    for size in chunk_sizes(base.entry.numel):
        chunk = first.chunk(size)
        if chunk is None:
            break
        for one in others:
            one.chunk(size, chunk)
    findings = [_found(first, well_based=True)]
    findings += [_found(one, well_based=findings[0] is None) for one in others]
    return [finding for finding in findings if finding is not None]


def check_stored(files: Readable, source: Source) -> Finding | None:
    """The hash of the stored bytes alone: of a difference whose base is gone, because no commit needs it any more."""
    try:
        StoredBytes(files, source).check()
    except (DamagedError, StorageError) as error:
        return Finding(source, error)
    return None


class _Member:
    """One fragment, as far as it was read. Holds no chunk of it."""

    def __init__(self, files: Readable, source: Source) -> None:
        self.source = source
        self._bytes = StoredBytes(files, source)
        self._hash = xxhash.xxh3_128()
        self._encoding = encoding_named(source.entry.encoding)
        self._error: DamagedError | StorageError | None = None

    def chunk(self, size: int, base: Bytes | None = None) -> Bytes | None:
        """The next encoded chunk, of ``size`` elements, decoded to see that it can be. None after an error."""
        if self._error is not None:
            return None
        lanes = self._encoding.lanes(size, self.source.dtype)
        try:
            chunk = next_chunk(self._bytes.read, lanes, self._bytes.packed, base)
            if self._bytes.packed:
                self._hash.update(chunk.data)
            self._encoding.decode(chunk, size, self.source.dtype)
        except (DamagedError, StorageError) as error:
            self._error = error
            return None
        return chunk

    def check(self, well_based: bool) -> None:
        """Raise what is wrong, once all chunks were asked for. well_based: whether its base is right, or it has none.

        The stored bytes come first: what they unpack to says nothing where they are wrong themselves."""
        if well_based and self._error is None:
            self._error = self._left_over()
        self._bytes.check()
        if not well_based:
            return
        if self._error is not None:
            raise self._error
        if self._bytes.packed:
            check_encoded(self.source, self._hash.hexdigest())

    def _left_over(self) -> DamagedError | StorageError | None:
        try:
            require_end(self._bytes.read)
        except (DamagedError, StorageError) as error:
            return error
        return None


def _found(member: _Member, well_based: bool) -> Finding | None:
    try:
        member.check(well_based)
    except (DamagedError, StorageError) as error:
        return Finding(member.source, error)
    return None
