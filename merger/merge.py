"""merge(): plan, produce, verify, rename.

From planned files to an output directory: made, filled, sealed, durable and read back, in this order.

Nothing here has the output's final name; that is :mod:`merger.io.output_dir`'s. Files are made one after another, in
the
calling thread, because ``torch.save`` is told by a process-wide switch to leave the tensors out.

Rebuilding a checkpoint: plan, read and write, verify, rename; and again where bytes turn out to be damaged.

Changes nothing in its sources.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from merger.io.blocks import Damage, Extent, Progress
from merger.io.output_dir import Output, SourceUse, early_writeback
from merger.io.output_file import Hole, OutFile, OutputError, advice
from merger.io.transfer import Transferred, check_hole, checksums, plan_transfer, run_parallel, transfer
from merger.layouts.base import Target
from merger.plan import MergePlan, Request, default_workers, open_request, plan_merge
from merger.recipe.model import Recipe
from merger.recipe.sources import OpenSources
from store.certificate import Certificate
from store.errors import MergeError, StorageError, UsageError
from store.fragments import FragmentIndex
from store.names import SaveId

Planned = Callable[[MergePlan], None]
"""Told each plan before it is carried out: the first one, and again after each finding of damage."""


@dataclass(frozen=True)
class _Made:
    file: OutFile
    path: Path
    holes: tuple[Hole, ...]


def produce(
    folder: Path, files: Sequence[OutFile], index: FragmentIndex[Extent], workers: int, progress: Progress
) -> tuple[int, dict[Damage, str]]:
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
    run_parallel(_sync, made, workers)
    run_parallel(_check, checks, workers)


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


@dataclass(frozen=True)
class MergeResult:
    """A rebuilt checkpoint. problems: what was damaged in the sources, and so was taken from an older version.

    load: lines of Python that load it. notes: what to know before loading it. framework: what was training.
    parameters: of the model, tied ones once. sources: what it is made of.
    """

    certificate: Certificate
    out: Path
    tag: str
    bytes_written: int
    problems: tuple[str, ...]
    load: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    framework: str = ""
    parameters: int = 0
    sources: tuple[SourceUse, ...] = ()


def merge(
    source: Path | None,
    out: Path,
    *,
    save: SaveId | int | str | None = None,
    target: Target | None = None,
    recipe: Recipe | None = None,
    workers: int | None = None,
    progress: Progress = lambda _: None,
    planned: Planned = lambda _: None,
) -> MergeResult:
    """Rebuild a state as a framework's checkpoint: ``save`` (a commit, step, tag or bound), or without it the newest
    that can be rebuilt of a store or a Trainer's directory, and what ``latest`` names in one of DeepSpeed's.

    source: a store, or a checkpoint; None where ``recipe`` names its sources. out: must not exist; it appears when all
    of it is durable and was read back. workers: threads; by default as many as there are processors, up to eight.
    progress: told, from any of them but never two at a time, the stored bytes just read; ``MergePlan.bytes_to_read`` is
    their sum. planned: see :data:`Planned`; where a version in a store turns out to be damaged, writing starts again
    with the version before, and so does the count.

    Raises NoStoreError, NothingToResumeError, MergeError (a hole; a commit that is not there; sources that do not fit
    together), DamagedError (a foreign checkpoint), UsageError (``out`` is taken), ConfigError (the recipe),
    UnsupportedError (no such layout for it), StorageError.
    """
    request = Request(source, save.name if isinstance(save, SaveId) else save, target or Target(), recipe)
    sources = open_request(request)
    attempts = _Attempts(sources, request)  # refuses before anything is written
    output = _output(out, sources)
    try:
        written = attempts.write(output, workers or default_workers(), progress, planned)
        output.finish()
    finally:
        output.abandon()
    plan = attempts.plan
    return MergeResult(
        certificate=plan.checkpoint.certificate,
        out=output.out,
        tag=plan.laid.tag,
        bytes_written=written,
        problems=attempts.problems,
        load=plan.load(output.out),
        notes=plan.notes,
        framework=plan.checkpoint.framework,
        parameters=plan.parameters,
        sources=plan.sources,
    )


def _output(out: Path, sources: OpenSources) -> Output:
    first, *others = sources.paths
    for path in others:
        if out.resolve().is_relative_to(path.resolve()):
            raise UsageError(
                f"{out} lies inside the source {path}, which a merge never changes: name another directory"
            )
    return Output(out, first)


class _Attempts:
    """Plans, one after another, until one finds all of its versions whole."""

    def __init__(self, sources: OpenSources, request: Request) -> None:
        self._sources, self._request = sources, request
        self._flaws: set[Damage] = set()
        self._damage: list[str] = []
        self.plan = plan_merge(sources, request)

    def write(self, output: Output, workers: int, progress: Progress, planned: Planned) -> int:
        """Write the output, again where versions turn out to be damaged. Returns the bytes written."""
        while True:
            planned(self.plan)
            written, found = produce(output.folder, self.plan.files, self.plan.checkpoint.index, workers, progress)
            if not found:
                return written
            # A unit's version is spread over many files: none of them may keep a part of the damaged one.
            self._flaws |= found.keys()
            self._damage += found.values()
            output.clear()
            self.plan = plan_merge(self._sources, self._request, self._flaws)

    @property
    def problems(self) -> tuple[str, ...]:
        """What was damaged, each thing once."""
        return tuple(dict.fromkeys((*self._damage, *self.plan.checkpoint.problems)))
