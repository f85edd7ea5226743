"""Container protocol, file handles, verbatim files.

Output files that bytes are put into at their places, and the one error for what the system refuses there.

It does not know what the bytes are.

What a container is: one kind of output file, made with holes where tensors go, filled by others, then sealed.

Small files whose bytes are known beforehand: configuration, tokenizers, ``latest``, certificates.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from merger.checkpoint import Stored
from store.errors import MergeError

OPEN_FILES = 64
"""Files that one thread keeps open at a time."""

_PROBE = 1 << 16
"""Bytes put at the end of a file to hear why no more go there: more than a block that is taken already has left."""

_ELSEWHERE = "name another output directory"
_ADVICE = {
    errno.EFBIG: f"raise `ulimit -f`, or {_ELSEWHERE} (not every filesystem takes files of this size)",
    errno.EROFS: f"check the mount, or {_ELSEWHERE}",
    errno.EACCES: f"check its owner and mode, or {_ELSEWHERE}",
    errno.EPERM: f"check its owner and mode, or {_ELSEWHERE}",
}


def advice(error: OSError) -> str:
    """What to do where the system refuses to write."""
    return _ADVICE.get(error.errno or 0, f"free space or {_ELSEWHERE}")


def refusal(path: Path, nbytes: int, told: Exception) -> OSError:
    """Why the system takes no more of a file, asked of the system: what a library told need not be its words.

    nbytes: how large the file was to be. Changes the file, which is of no use any more.
    """
    try:
        with path.open("r+b", buffering=0) as file:
            for place in (path.stat().st_size, nbytes):
                file.seek(place)
                left = _PROBE
                while left:
                    left -= file.write(bytes(left)) or 0
    except OSError as error:
        return error
    return OSError(f"torch could not write it: {told}")


class OutputError(Exception):
    """The system refused to write or to read back an output file. Not a StorageError: that is about sources.

    advice: what to do.
    """

    def __init__(self, path: Path, error: OSError, verb: str = "write") -> None:
        super().__init__(f"cannot {verb} {path}: {error.strerror or error}")
        self.advice = advice(error)


class OutFiles:
    """Output files that one block is written to, a bounded number of them open at a time. One thread."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open: dict[int, int] = {}

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Put all of ``data`` at byte ``offset`` of the file of that number, which exists. OutputError."""
        try:
            if file not in self._open:
                if len(self._open) >= OPEN_FILES:
                    self.close()
                self._open[file] = os.open(self._paths[file], os.O_WRONLY | os.O_CLOEXEC)
            written = 0
            while written < len(data):
                written += os.pwrite(self._open[file], data[written:], offset + written)
        except OSError as error:
            raise OutputError(self._paths[file], error) from error

    def close(self) -> None:
        """Close all; they open again when they are written to."""
        while self._open:
            os.close(self._open.popitem()[1])


@dataclass(frozen=True)
class Hole:
    """Where a planned tensor's bytes go: ``stored.nbytes`` bytes from ``offset`` of the file."""

    offset: int
    stored: Stored


class Container(Protocol):
    """The content of one output file."""

    def make(self, path: Path) -> tuple[Hole, ...]:
        """Create the file at its full size, everything but the holes written. OSError passes through."""
        ...

    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        """Write what depends on the tensors' bytes: checksums has the CRC-32 of each hole, by its offset."""
        ...

    def check(self, path: Path) -> None:
        """Read back what :meth:`make` wrote and MergeError where it is not as meant. Tensors are checked elsewhere."""
        ...

    def tensors(self) -> Iterable[Stored]:
        """Every planned tensor of the file, once."""
        ...

    @property
    def nbytes(self) -> int:
        """About how large the file will be, in bytes, for planning."""
        ...


@dataclass(frozen=True)
class OutFile:
    """A file of the output. path: relative to the output's directory, ``/`` between names."""

    path: str
    container: Container
    mode: int = 0o644


@dataclass(frozen=True)
class Verbatim:
    """A file that holds just ``data``."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def tensors(self) -> tuple[Stored, ...]:
        """None."""
        return ()

    def make(self, path: Path) -> tuple[Hole, ...]:
        with path.open("xb") as file:
            file.write(self.data)
        return ()

    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        """Nothing to do."""

    def check(self, path: Path) -> None:
        if path.read_bytes() != self.data:
            raise MergeError(f"{path} does not read back as it was written: the storage under it is not to be trusted")
