"""From planned files to an output directory: made, filled, sealed, durable and read back, in this order.

Nothing here has the output's final name; that is :mod:`merger.output`'s. Files are made one after another, in the
calling thread, because ``torch.save`` is told by a process-wide switch to leave the tensors out.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from merger.blocks import Extent, Flaw, Progress
from merger.containers.base import Hole, OutFile
from merger.outfiles import OutputError, advice
from merger.parallel import in_parallel
from merger.transfer import Transferred, check_hole, checksums, plan_transfer, transfer
from merger.writeback import early_writeback
from store.coverage import FragmentIndex
from store.errors import MergeError, StorageError


@dataclass(frozen=True)
class _Made:
    file: OutFile
    path: Path
    holes: tuple[Hole, ...]


def produce(
    folder: Path, files: Sequence[OutFile], index: FragmentIndex[Extent], workers: int, progress: Progress
) -> tuple[int, dict[Flaw, str]]:
    """Write all files below an empty directory. Returns (bytes written, versions of a store that are not whole).

    Where any version is not whole the files are not complete and must be thrown away. Everything is durable on
    return, names of files and directories excepted. MergeError, StorageError.
    """
    with _told(folder):
        _require_places(folder, files)
        _require_room(folder, files)
        made = [_make(folder, file) for file in files]
        plan = plan_transfer(index, ((i, hole) for i, one in enumerate(made) for hole in one.holes))
        paths = [one.path for one in made]
        with early_writeback(paths):
            moved = transfer(plan, paths, workers, progress)
        if moved.flaws:
            return 0, moved.flaws
        _finish(made, moved, workers)
    return sum(one.path.stat().st_size for one in made), {}


def _make(folder: Path, file: OutFile) -> _Made:
    path = folder / file.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _Made(file, path, file.container.make(path))
    except OSError as error:
        raise OutputError(path, error) from error


def _finish(made: Sequence[_Made], moved: Transferred, workers: int) -> None:
    """Seal and sync every file, then read every byte of it back."""
    checks: list[tuple[_Made, Hole | None, int]] = []
    for i, one in enumerate(made):
        crcs = checksums(moved.pieces.get(i, ()), one.holes)
        one.file.container.seal(one.path, crcs)
        checks += [(one, hole, crcs[hole.offset]) for hole in one.holes]
        checks.append((one, None, 0))
    in_parallel(_sync, made, workers)
    in_parallel(_check, checks, workers)


def _check(what: tuple[_Made, Hole | None, int], stop: threading.Event) -> None:
    one, hole, crc = what
    try:
        if hole is None:
            one.file.container.check(one.path)
        else:
            check_hole(one.path, hole, crc, stop)
    except OSError as error:
        raise OutputError(one.path, error, "read back") from error


def _sync(one: _Made, _: threading.Event) -> None:
    try:
        descriptor = os.open(one.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fchmod(descriptor, one.file.mode)  # only now: it may forbid to write
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OutputError(one.path, error) from error


def _require_places(folder: Path, files: Sequence[OutFile]) -> None:
    """Names may come from a foreign checkpoint: they must not leave the directory, nor meet."""
    taken: set[str] = set()
    for file in files:
        if any(name in ("", ".", "..") or "\0" in name for name in file.path.split("/")):
            raise MergeError(f"{file.path!r} is no place in the output {folder}: the source names a file wrongly")
        if file.path in taken:
            raise MergeError(f"two files of the output are called {file.path}")
        taken.add(file.path)


def _require_room(folder: Path, files: Sequence[OutFile]) -> None:
    wanted, free = sum(file.container.nbytes for file in files), shutil.disk_usage(folder).free
    if wanted > free:
        raise StorageError(
            f"cannot write {folder}: {wanted} bytes are needed and {free} are free; free space or name another output "
            "directory"
        )


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OutputError as error:
        raise StorageError(f"{error}; {error.advice}") from error
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}; {advice(error)}") from error
