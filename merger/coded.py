"""Fragments of a store that were encoded, packed, or stored as differences, as blocks: decoded while they are read.

Chunk by chunk, each stored byte once, so memory does not grow with a fragment. It does not know where the bytes go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from merger.blocks import Flaw, Progress, Readable
from store.coverage import Source
from store.encoding import CHUNK, itemsize
from store.errors import DamagedError, MissingError, StorageError, UnreachableError
from store.fragments import FragmentReader
from store.versions import Bad

_LARGEST = 14
"""Chunks that a pass takes at most, measured: stored, unpacked and decoded ones, the base's, and what malloc keeps."""


@dataclass(frozen=True)
class StoredFragment:
    """A :class:`merger.blocks.Coded`. root: of the store, for its flaws."""

    files: Readable
    source: Source
    root: Path

    @property
    def nbytes(self) -> int:
        """Its own bytes, and those of its base: that is read again for each fragment that is a difference to it."""
        base = self.source.base
        return self.source.entry.nbytes + (0 if base is None else base.entry.nbytes)

    @property
    def memory(self) -> int:
        """See :class:`merger.blocks.Coded`."""
        entry = self.source.entry
        return _LARGEST * min(CHUNK, entry.numel) * itemsize(entry.dtype)

    def decoding(self, progress: Progress) -> FragmentPass:
        """See :class:`merger.blocks.Coded`."""
        return FragmentPass(self, progress)


class FragmentPass:
    """A :class:`merger.blocks.Decoding`."""

    def __init__(self, fragment: StoredFragment, progress: Progress) -> None:
        self._fragment = fragment
        self._reader = FragmentReader(_Told(fragment.files, progress), fragment.source)

    @property
    def flaw(self) -> Flaw:
        """The fragment's version, or that of its base where the base's bytes are wrong."""
        return Flaw(self._fragment.root, Bad(self._reader.at_fault, self._fragment.source.entry.unit))

    def pieces(self) -> Iterator[memoryview]:
        """See :class:`merger.blocks.Decoding`."""
        try:
            for values in self._reader.chunks():
                yield values.view(np.uint8).data
        except DamagedError as error:
            raise DamagedError(f"{self._what('which is damaged')}: {error}") from error
        except UnreachableError:
            raise
        except MissingError as error:
            raise MissingError(f"{self._what('which is gone')}: {error}") from error
        except StorageError as error:
            raise StorageError(f"{self._what('which cannot be read')}: {error}") from error

    def _what(self, fate: str) -> str:
        """Which fragment, and which save's bytes are to blame: a base's wrong bytes show in what depends on it."""
        source, fault = self._fragment.source, self._reader.at_fault
        entry = source.entry
        where = f"{entry.unit} of save {source.part.save}, elements {entry.start} to {entry.stop} of {entry.fqn}"
        return where if fault == source.part.save else f"{where}, the difference to save {fault}, {fate}"


class _Told:
    """Files that tell what is read."""

    def __init__(self, files: Readable, progress: Progress) -> None:
        self._files, self._progress = files, progress

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """See :class:`merger.blocks.Readable`."""
        self._files.read_into(path, offset, target)
        self._progress(len(target))
