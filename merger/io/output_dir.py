"""Output directory, write-back, certificate file.

The directory of a rebuilt checkpoint: made beside its final name, and given that name when all of it is durable.

An interrupted merge leaves a directory with a temporary name only; the next merge to the same place removes
it. A lock on the directory tells a merge that was interrupted from one that is at work: the kernel drops it
with the process. It does not know what is in the files.

What a merge tells: the certificate as a file beside the checkpoint.

Keeping the device busy while bytes are still being put together: output files are synced as they grow.

A merge ends with everything on the device. Left to the end, that wait is as long as the work before it; measured
on a local disk, syncing alongside took a quarter off a merge. One thread; it only ever syncs. What it was told of
an error is raised when it ends, and such a file is never synced again: the merge is over.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from merger.io.output_file import OutFile, Verbatim, advice
from store.certificate import Certificate
from store.errors import StorageError, UsageError

_PREFIX = ".driftpoint-merge-"

CERTIFICATE = "driftpoint-certificate.json"

PAUSE = 0.01
"""Seconds between two rounds, so that files which do not grow cost nothing to speak of."""

WORTHWHILE = 1 << 24
"""Size in bytes from which a file is synced early: the many small ones of some layouts are not."""


class Output:
    """A checkpoint in the making. One process, one thread."""

    def __init__(self, out: Path, source: Path) -> None:
        self.out = out.absolute()
        _require_free(self.out, source.absolute())
        with _told(self.out):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self.folder = self.out.parent / f"{_PREFIX}{secrets.token_hex(6)}-{self.out.name}"
            self.folder.mkdir()
            self._lock: int | None = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def clear(self) -> None:
        """Remove what was written so far: begin again."""
        with _told(self.folder):
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def finish(self) -> None:
        """Give the directory its final name; durable on return. Files in it must be durable already."""
        with _told(self.out):
            for folder, _, _ in os.walk(self.folder):
                _sync(Path(folder))
            if self.out.exists() or self.out.is_symlink():
                raise UsageError(_taken(self.out))
            self.folder.rename(self.out)
            _sync(self.out.parent)
        self._unlock()

    def abandon(self) -> None:
        """Remove everything. Harmless after :meth:`finish`."""
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _remove_leftovers(self) -> None:
        leftover = re.compile(re.escape(_PREFIX) + r"[0-9a-f]{12}-" + re.escape(self.out.name) + r"\Z")
        for path in self.out.parent.iterdir():
            if leftover.match(path.name) and path.is_dir() and not path.is_symlink():
                _remove_unless_locked(path)


def _remove_unless_locked(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"another merge is writing to the same place now ({path}): wait for it, or name another output directory"
        ) from error
    else:
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
    finally:
        os.close(descriptor)


def _require_free(out: Path, source: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UsageError(_taken(out))
    if out.resolve().is_relative_to(source.resolve()):
        raise UsageError(
            f"{out} lies inside the source {source}, which a merge never changes: name a directory outside of it"
        )


def _taken(out: Path) -> str:
    return f"{out} exists already, and a merge replaces nothing: name a new directory, or remove that one first"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}; {advice(error)}") from error


@dataclass(frozen=True)
class SourceUse:
    """One source of a merge. name: as the recipe has it. path: absolute. origin: what exactly was taken, in words."""

    name: str
    kind: str
    path: str
    origin: str
    step: int
    save: str


def certificate_file(
    certificate: Certificate, tag: str, notes: Sequence[str], sources: Sequence[SourceUse] = ()
) -> OutFile:
    """The certificate as a file of the output. tag: the checkpoint's name inside of it. sources: what it is made of."""
    document = {
        "tag": tag,
        **certificate.as_json(),
        "sources": [asdict(source) for source in sources],
        "notes": list(notes),
    }
    return OutFile(CERTIFICATE, Verbatim((json.dumps(document, indent=1) + "\n").encode()))


@contextmanager
def early_writeback(paths: Sequence[Path]) -> Iterator[None]:
    """Sync large files while the block runs. OSError at its end where one could not be."""
    files = [path for path in paths if path.stat().st_size >= WORTHWHILE]
    errors: list[OSError] = []
    over = threading.Event()
    thread = threading.Thread(target=_sync_in_turn, args=(files, over, errors), name="driftpoint-writeback")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]


def _sync_in_turn(files: Sequence[Path], over: threading.Event, errors: list[OSError]) -> None:
    try:
        while not over.wait(PAUSE):
            for path in files:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    os.fdatasync(descriptor)
                finally:
                    os.close(descriptor)
                if over.is_set():
                    return
    except OSError as error:
        errors.append(error)
