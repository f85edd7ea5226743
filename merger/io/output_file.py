"""Define output files: containers with holes for tensors, positioned writes, and the errors of both.

A container creates its file with holes where tensors go; the holes are filled in parallel, then the file is sealed."""

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from merger.checkpoint import PlannedTensor
from store.errors import MergeError, StorageError

OPEN_FILES = 64  # most files that one thread keeps open
_PROBE = 1 << 16  # bytes appended to a file to learn why it cannot grow: more than an allocated block has left
_ELSEWHERE = "name another output directory"
_ADVICE = {
    errno.EFBIG: f"raise `ulimit -f`, or {_ELSEWHERE} (not every filesystem takes files of this size)",
    errno.EROFS: f"check the mount, or {_ELSEWHERE}",
    errno.EACCES: f"check its owner and mode, or {_ELSEWHERE}",
    errno.EPERM: f"check its owner and mode, or {_ELSEWHERE}",
}


def write_remedy(error: OSError) -> str:
    """Return the remedy for a refused write."""
    return _ADVICE.get(error.errno or 0, f"free space or {_ELSEWHERE}")


def write_error(path: Path, nbytes: int, error: Exception) -> OSError:
    """Return why the system refuses to write a file, by writing to it again: libraries do not always pass it on.

    The file is changed and must be discarded. ``nbytes``: its planned size. ``error``: the library's."""
    try:
        with path.open("r+b", buffering=0) as file:
            for place in (path.stat().st_size, nbytes):
                file.seek(place)
                left = _PROBE
                while left:
                    left -= file.write(bytes(left)) or 0
    except OSError as reason:
        return reason
    return OSError(f"torch could not write it: {error}")


class OutputError(Exception):
    """The system refused to write or read back an output file. Not a StorageError, which is about sources."""

    def __init__(self, path: Path, error: OSError, verb: str = "write") -> None:
        super().__init__(f"cannot {verb} {path}: {error.strerror or error}")
        self.advice = write_remedy(error)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn errors of the system while writing below ``path`` into StorageErrors with a remedy."""
    try:
        yield
    except OutputError as error:
        raise StorageError(f"{error}; {error.advice}") from error
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}; {write_remedy(error)}") from error


def read_back_error(path: Path) -> MergeError:
    """Return the error for a file whose bytes are not those written."""
    return MergeError(
        f"{path} reads back different bytes than were written; check `dmesg` for disk errors, or name an output "
        "directory elsewhere"
    )


class OutFiles:
    """Output files that one block is written to, a bounded number of them open at a time. One thread."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open: dict[int, int] = {}

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Write all of ``data`` at byte ``offset`` of an existing file, given by number. OutputError."""
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
        """Close all files; they reopen on the next write."""
        while self._open:
            os.close(self._open.popitem()[1])


@dataclass(frozen=True)
class Hole:
    """A planned tensor's bytes: ``stored.nbytes`` bytes from ``offset`` of the file."""

    offset: int
    stored: PlannedTensor


class Container(Protocol):
    """The content of one output file."""

    def make(self, path: Path) -> tuple[Hole, ...]:
        """Create the file at its full size with everything but the holes. OSError passes through."""

    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        """Write the bytes that depend on the tensors. ``checksums``: CRC-32 of each hole by offset."""

    def check(self, path: Path) -> None:
        """Read back what :meth:`make` wrote; MergeError if it differs. Tensors are checked elsewhere."""

    def tensors(self) -> Iterable[PlannedTensor]:
        """Return every planned tensor of the file, once."""

    @property
    def nbytes(self) -> int:
        """Approximate size of the file in bytes, for planning."""


@dataclass(frozen=True)
class OutFile:
    """A file of the output. ``path`` is relative to the output directory, with ``/`` between names."""

    path: str
    container: Container
    mode: int = 0o644


@dataclass
class VerbatimFile:
    """A file of known bytes, such as configuration, tokenizers, ``latest`` and certificates."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def tensors(self) -> tuple[PlannedTensor, ...]:
        return ()

    def make(self, path: Path) -> tuple[Hole, ...]:
        with path.open("xb") as file:
            file.write(self.data)
        return ()

    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        """Nothing to do."""

    def check(self, path: Path) -> None:
        if path.read_bytes() != self.data:
            raise read_back_error(path)
