"""Define the interface to a store's files, and implement it for a local or shared filesystem.

All storage access goes through :class:`Files`, so that tests can replace it by a simulated disk and enumerate the
states after a crash. Paths are relative, with ``/`` between names; paths that leave the store (absolute, ``..``, by a
symbolic link) are refused here. The order of operations is in :mod:`store.storage.atomic`."""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from store.errors import DamagedError, ExistsError, MissingError, NoSpaceError, StorageError


class NewFile(Protocol):
    """A file being written. After an error it must be abandoned: a failed fsync is never tried again."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of ``data``."""

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Overwrite written bytes from ``offset``. Raises ValueError beyond the end."""

    def sync(self) -> None:
        """Make the bytes durable against a power loss."""

    def close(self) -> None:
        """Close the file."""


class Files(Protocol):
    """File operations below one root. Raises :class:`StorageError` and its children only."""

    def create(self, path: str) -> NewFile:
        """Open a new file for writing. Raises ExistsError if the name is taken."""

    def link(self, source: str, target: str) -> None:
        """Give the file a second name, without replacing. Raises ExistsError if it is taken."""

    def rename(self, source: str, target: str) -> None:
        """Move a file, replacing the target."""

    def unlink(self, path: str) -> None:
        """Remove one name of a file. Raises MissingError."""

    def make_dir(self, path: str) -> bool:
        """Make one directory. Return False if it exists."""

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory."""

    def sync_dir(self, path: str) -> None:
        """Make the names in the directory durable against a power loss. ``""`` is the root."""

    def list_dir(self, path: str) -> list[str]:
        """Return the names in the directory, sorted. Raises MissingError."""

    def size(self, path: str) -> int:
        """Return the size of a regular file in bytes. Raises MissingError."""

    def read(self, path: str, limit: int) -> bytes:
        """Return a whole small file. Raises DamagedError if it is larger than ``limit`` bytes."""

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``. Raises DamagedError if the file ends early."""

    def below(self, path: str) -> "Files":
        """Return the files below a directory, which need not exist."""


@runtime_checkable
class OpensFiles(Protocol):
    """Storage with files on filesystems of this machine."""

    def open_file(self, path: str) -> int | None:
        """Return a descriptor to read from, None if the bytes are elsewhere. Raises as :meth:`Files.read_into`."""


@runtime_checkable
class WholeFiles(Protocol):
    """Additional operations of storage that shows files only when they are whole, without temporary names."""

    def put_new(self, path: str, fill: Callable[[NewFile], None], *, patched: bool, most: int) -> None:
        """Write a file durably under a free name, as :func:`store.storage.atomic.write_new` does."""

    def replace(self, path: str, data: bytes) -> None:
        """Write or replace a small file; durable on return."""

    def unlink_all(self, paths: Sequence[str]) -> None:
        """Remove the files that exist, in any order."""


class LocalFiles:
    """Files below a directory of a local or shared filesystem."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()

    def create(self, path: str) -> NewFile:
        with _translate_errors("create", self.root, path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return _LocalNewFile(os.open(self._at(path), flags, 0o644), str(self.root / path))

    def link(self, source: str, target: str) -> None:
        with _translate_errors("link", self.root, target):
            os.link(self._at(source), self._at(target), follow_symlinks=False)

    def rename(self, source: str, target: str) -> None:
        with _translate_errors("rename", self.root, target):
            os.replace(self._at(source), self._at(target))  # noqa: PTH105 - a string: this runs by the ten thousand

    def unlink(self, path: str) -> None:
        with _translate_errors("unlink", self.root, path):
            os.unlink(self._at(path))  # noqa: PTH108

    def make_dir(self, path: str) -> bool:
        """Make one directory. For the root, ``""``, its missing parents are made and synced too."""
        if path == "":
            return self._make_root()
        with _translate_errors("mkdir", self.root, path):
            try:
                os.mkdir(self._at(path))  # noqa: PTH102
            except FileExistsError:
                return False
            return True

    def remove_dir(self, path: str) -> None:
        with _translate_errors("rmdir", self.root, path):
            os.rmdir(self._directory_at(path))  # noqa: PTH106

    def sync_dir(self, path: str) -> None:
        with _translate_errors("fsync directory", self.root, path):
            sync_directory(self._directory_at(path))

    def list_dir(self, path: str) -> list[str]:
        with _translate_errors("list", self.root, path):
            return sorted(os.listdir(self._directory_at(path)))  # noqa: PTH208 - names, not paths

    def size(self, path: str) -> int:
        with _translate_errors("stat", self.root, path):
            status = os.lstat(self._at(path))
        self._require_regular(status, path)
        return status.st_size

    def read(self, path: str, limit: int) -> bytes:
        with self._opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > limit:
                raise DamagedError(f"{self.root / path} has {size} bytes, more than the {limit} such a file can have")
            data = bytearray(size)
            fill(descriptor, 0, memoryview(data), self.root / path)
            return bytes(data)

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        with self._opened(path) as descriptor:
            fill(descriptor, offset, target, self.root / path)

    def below(self, path: str) -> "LocalFiles":
        return LocalFiles(self.root / path)

    def open_file(self, path: str) -> int:
        with _translate_errors("read", self.root, path):
            descriptor = os.open(self._at(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                self._require_regular(os.fstat(descriptor), path)
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor

    def expect(self, path: str, offset: int, nbytes: int) -> None:
        with suppress(StorageError, DamagedError), self._opened(path) as descriptor:
            os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def _make_root(self) -> bool:
        with _translate_errors("mkdir", self.root, ""):
            missing = [p for p in (self.root, *self.root.parents) if not p.exists()]
            # The deepest existing directory may have been made by a process that was killed before it synced.
            # One that this user cannot read was made, and synced, by another user.
            with suppress(PermissionError):
                sync_directory((missing[-1].parent if missing else self.root).parent)
            for directory in reversed(missing):
                directory.mkdir(exist_ok=True)
                sync_directory(directory.parent)
            return bool(missing)

    def _at(self, path: str) -> str:
        names, place = checked_names(path, self.root), str(self.root)
        for name in names[:-1]:
            place = f"{place}/{name}"
            _require_no_link(place)
        return f"{place}/{names[-1]}" if names else place

    def _directory_at(self, path: str) -> str:
        place = self._at(path)
        if path:
            _require_no_link(place)
        return place

    @contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        descriptor = self.open_file(path)
        with _translate_errors("read", self.root, path):
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def _require_regular(self, status: os.stat_result, path: str) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{self.root / path} is not a regular file")


_WRITE_BACK = 1 << 24


class _LocalNewFile:
    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor, self._path = descriptor, path
        self._written = 0
        self._write_back_from = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        rest, descriptor = as_bytes(data), self._opened("write")
        with _translate_errors("write", self._path):
            while len(rest):
                done = os.write(descriptor, rest[: 1 << 24])
                if done == 0:  # does not happen on a working filesystem; retrying would hang the save
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                rest = rest[done:]
                self._written += done
                # The kernel would begin to write only when fsync asks: the device would idle while we copy and hash.
                # The advice starts write-back; errors of it still reach fsync.
                ready = self._written - self._write_back_from
                if ready >= _WRITE_BACK:
                    os.posix_fadvise(descriptor, self._write_back_from, ready, os.POSIX_FADV_DONTNEED)
                    self._write_back_from = self._written

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        rest = as_bytes(data)
        if offset < 0 or offset + len(rest) > self._written:
            raise ValueError(f"bytes {offset} to {offset + len(rest)} of {self._path} were never written")
        descriptor = self._opened("write")
        with _translate_errors("write", self._path):
            while len(rest):
                done = os.pwrite(descriptor, rest[: 1 << 24], offset)
                if done == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                rest, offset = rest[done:], offset + done

    def sync(self) -> None:
        descriptor = self._opened("fsync")
        with _translate_errors("fsync", self._path):
            os.fsync(descriptor)
            found = os.fstat(descriptor).st_size
        if found != self._written:
            raise StorageError(f"{self._path} has {found} bytes after {self._written} were written: check the device")

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        with _translate_errors("close", self._path):
            os.close(descriptor)

    def _opened(self, verb: str) -> int:
        if self._descriptor < 0:
            raise StorageError(f"cannot {verb} {self._path}: it is closed")
        return self._descriptor


def sync_directory(path: str | Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_no_link(place: str) -> None:
    if stat.S_ISLNK(os.lstat(place).st_mode):
        raise DamagedError(f"{place} leads out of the store through a symbolic link; put the directory itself there")


def checked_names(path: str, root: Path) -> list[str]:
    """Return the names of a relative path. Raises DamagedError for one that may lead out of the store."""
    names = path.split("/") if path else []
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        raise DamagedError(f"{path!r} is no name inside the store {root}")
    return names


def as_bytes(data: bytes | bytearray | memoryview) -> memoryview:
    """Return a flat view of the bytes; an empty view of several dimensions has no cast."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def read_at(descriptor: int, offset: int, target: memoryview) -> int:
    """Fill ``target`` from ``offset``; return the number of bytes read, fewer only at the end. Raises OSError."""
    rest = as_bytes(target)
    while len(rest):
        got = os.preadv(descriptor, [rest[: 1 << 26]], offset)
        if got == 0:
            break
        rest, offset = rest[got:], offset + got
    return target.nbytes - len(rest)


def fill(descriptor: int, offset: int, target: memoryview, path: str | Path) -> None:
    """Fill ``target`` from ``offset`` of the file ``path``. Raises DamagedError if it ends early, StorageError."""
    with _translate_errors("read", path):
        got = read_at(descriptor, offset, target)
    if got < target.nbytes:
        raise DamagedError(f"{path} ends at byte {offset + got}, {target.nbytes - got} bytes too early")


_ADVICE = {
    errno.ENOSPC: "the filesystem is full: free space on it",
    errno.EDQUOT: "the disk quota is used up: free space in it",
    errno.EROFS: "the filesystem is read-only: check the mount",
    errno.EACCES: "permission denied: check the owner and mode",
    errno.EPERM: "not permitted: check the owner, and that the filesystem has hard links",
    errno.EFBIG: "the file-size limit is reached: raise `ulimit -f`",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
    errno.EIO: "the device reported an I/O error: check `dmesg`",
    errno.ELOOP: "it is a symbolic link, and the store follows none",
}

_KINDS = {errno.ENOENT: MissingError, errno.EEXIST: ExistsError, errno.ENOSPC: NoSpaceError, errno.EDQUOT: NoSpaceError}


@contextmanager
def _translate_errors(verb: str, root: str | Path, path: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        reason = _ADVICE.get(number, os.strerror(number) if number else str(error))
        kind = _KINDS.get(number, StorageError)
        raise kind(f"cannot {verb} {Path(root, path)}: {reason}") from error


def list_or_empty(files: Files, folder: str) -> list[str]:
    """Return the names in a directory, none if it does not exist."""
    try:
        return files.list_dir(folder)
    except MissingError:
        return []
