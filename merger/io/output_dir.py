"""Create the output directory of a merge or an import and give it its name when all of it is durable.

An interrupted merge leaves only a directory with a temporary name, which the next one to the same place removes. A lock
on the directory tells interrupted merges from running ones: the kernel drops it with the process."""

import fcntl
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from merger.io.output_file import storage_errors
from store.errors import StorageError, UsageError
from store.storage.local import LocalFiles, sync_directory

_PREFIX = ".driftpoint-merge-"
CERTIFICATE = "driftpoint-certificate.json"
PAUSE_SECONDS = 0.01  # seconds between two rounds of syncs, so that files that do not grow cost almost nothing
EARLY_SYNC_BYTES = 1 << 24  # smallest file, in bytes, that is synced early: some layouts have many small ones


class OutputDir:
    """A checkpoint being written. One process, one thread."""

    def __init__(self, out: Path, sources: Sequence[Path]) -> None:
        self.out = out.absolute()
        if self.out.exists() or self.out.is_symlink():
            raise _exists_error(self.out)
        for source in sources:
            if self.out.resolve().is_relative_to(source.resolve()):
                raise UsageError(
                    f"{self.out} lies inside the source {source}, which a merge never changes: name a directory "
                    "outside of it"
                )
        with storage_errors(self.out):
            LocalFiles(self.out.parent).make_dir("")
            leftover = re.compile(re.escape(_PREFIX) + r"[0-9a-f]{12}-" + re.escape(self.out.name) + r"\Z")
            for path in self.out.parent.iterdir():
                if leftover.match(path.name) and path.is_dir() and not path.is_symlink():
                    _remove_unless_locked(path)
            self.folder = self.out.parent / f"{_PREFIX}{secrets.token_hex(6)}-{self.out.name}"
            self.folder.mkdir()
            self._lock: int | None = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def clear(self) -> None:
        with storage_errors(self.folder):
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def finish(self) -> None:
        """Give the directory its final name; durable on return. Its files must be durable already."""
        with storage_errors(self.out):
            for folder, _, _ in os.walk(self.folder):
                sync_directory(folder)
            if self.out.exists() or self.out.is_symlink():
                raise _exists_error(self.out)
            self.folder.rename(self.out)
            sync_directory(self.out.parent)
        self._unlock()

    def close(self) -> None:
        """Remove everything, unless :meth:`finish` gave it its name."""
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_unless_locked(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(f"another merge or import is writing to {path}: wait, or name another directory") from error
    else:
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Return the free space at a path, or at its nearest existing parent."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def require_space(what: str, path: Path, needed: int, other: str = "another output directory") -> None:
    """Raise StorageError if fewer than ``needed`` bytes are free at a path. ``other``: what to name instead."""
    free = free_bytes(path)
    if needed > free:
        raise StorageError(f"{what} needs {needed} bytes in {path}, but {free} are free; free space or name {other}")


def _exists_error(out: Path) -> UsageError:
    return UsageError(f"{out} already exists, and is never overwritten: name a new directory, or remove it first")


@dataclass(frozen=True)
class SourceUse:
    """One source of a merge."""

    name: str  # name in the recipe
    kind: str
    path: str  # absolute path
    origin: str  # the checkpoint taken from it, in words
    step: int
    save: str


@contextmanager
def early_writeback(paths: Sequence[Path]) -> Iterator[None]:
    """Sync large files from a thread while the block runs. Raises OSError at its end if a sync failed.

    Syncing alongside keeps the device busy: measured on a local disk, it takes a quarter off a merge. After an error no
    file is synced again, since the merge has failed."""
    files = [path for path in paths if path.stat().st_size >= EARLY_SYNC_BYTES]
    done = threading.Event()
    with ThreadPoolExecutor(1, "driftpoint-writeback") as pool:
        syncing = pool.submit(_sync_repeatedly, files, done)
        try:
            yield
        finally:
            done.set()
    syncing.result()


def _sync_repeatedly(files: Sequence[Path], done: threading.Event) -> None:
    while not done.wait(PAUSE_SECONDS):
        for path in files:
            with path.open("r+b", buffering=0) as file:
                os.fdatasync(file.fileno())
            if done.is_set():
                return
