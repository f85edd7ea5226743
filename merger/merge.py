"""Rebuild a checkpoint: plan, write, verify, rename. Starts again without a version of a store that proves damaged.

Files are created, filled, sealed, made durable and read back in this order, under a temporary name. The calling thread
creates them one by one, as leaving tensors out of ``torch.save`` is a process-wide switch. Sources never change."""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from merger.checkpoint import implausible_lines, refuse_implausible
from merger.io.blocks import Damage, Extent, Progress
from merger.io.output_dir import OutputDir, SourceUse, early_writeback, require_space
from merger.io.output_file import Hole, OutFile, OutputError, storage_errors
from merger.io.transfer import TransferResult, check_hole, checksums, plan_transfer, run_parallel, transfer
from merger.layouts.base import Target
from merger.plan import MergePlan, Request, default_workers, open_request, plan_merge
from merger.recipe.model import Recipe
from merger.tensors import Implausibles
from store.certificate import Certificate
from store.errors import MergeError
from store.fragments import FragmentIndex
from store.names import SaveId

Planned = Callable[[MergePlan], None]  # called with each plan before it is executed: a new one after each damage found


@dataclass(frozen=True)
class MergeResult:
    """Result of a merge."""

    certificate: Certificate
    out: Path
    tag: str
    bytes_written: int
    problems: tuple[str, ...]  # damage in the sources; an older version was used instead
    load: tuple[str, ...] = ()  # lines of Python that load the output
    notes: tuple[str, ...] = ()  # facts to know before loading it
    framework: str = ""  # framework of the training
    parameters: int = 0  # number of model parameters, tied ones once
    sources: tuple[SourceUse, ...] = ()  # checkpoints that the output consists of


def merge(
    source: Path | None,
    out: Path,
    *,
    save: SaveId | int | str | None = None,
    target: Target | None = None,
    recipe: Recipe | None = None,
    workers: int | None = None,
    allow_nonfinite: bool = False,
    progress: Progress = lambda _: None,
    planned: Planned = lambda _: None,
) -> MergeResult:
    """Rebuild a training state as a framework's checkpoint.

    Args:
        source: a store or a checkpoint; None if ``recipe`` names its sources.
        out: must not exist; appears when all of it is durable and was read back.
        save: a commit, step, tag or bound; None: the newest that can be rebuilt of a store or a Trainer's directory,
            and the one that ``latest`` names of DeepSpeed's.
        target: layout and its options.
        recipe: which source each parameter comes from.
        workers: threads; by default one per processor, up to eight.
        allow_nonfinite: write values of foreign checkpoints that no healthy training state holds (NaN, infinite
            values, negative second moments), as problems of the result, instead of raising.
        progress: gets stored bytes just read, from any thread, never concurrently; ``MergePlan.bytes_to_read`` in all.
        planned: called with each plan. If a version in a store proves damaged, or values prove implausible and are
            allowed, writing and the count start again.

    Raises:
        NoStoreError, NothingToResumeError: there is nothing to merge.
        MergeError: a hole, a commit that does not exist, sources that do not fit together, or implausible values.
        DamagedError, StorageError: a foreign checkpoint is damaged; reading or writing failed.
        UsageError, ConfigError: ``out`` exists; the recipe is wrong.
        UnsupportedError: the layout cannot hold this state."""
    step = save.name if isinstance(save, SaveId) else save
    request = Request(source, step, target or Target(), recipe, allow_nonfinite)
    sources = open_request(request)
    plan = plan_merge(sources, request)  # raises before anything is written
    flaws: dict[Damage, str] = {}
    implausible: Implausibles = {}
    with closing(OutputDir(out, sources.paths)) as output:
        while True:
            planned(plan)
            index = plan.checkpoint.index
            written, damaged, values = produce(output.folder, plan.files, index, workers or default_workers(), progress)
            if values and not allow_nonfinite:
                refuse_implausible(plan.checkpoint, implausible_lines(plan.checkpoint, values))
            if not damaged and values == implausible:
                break
            # A unit's version is spread over many files: none of them may keep bytes of the damaged one. Certificates
            # are in several files, too, and are written before the values are known.
            flaws |= damaged
            implausible = values
            output.clear()
            plan = plan_merge(sources, request, flaws.keys(), implausible)
        output.finish()
    return MergeResult(
        certificate=plan.checkpoint.certificate,
        out=output.out,
        tag=plan.laid.tag,
        bytes_written=written,
        problems=tuple(dict.fromkeys((*flaws.values(), *plan.checkpoint.problems))),
        load=plan.load(output.out),
        notes=plan.notes,
        framework=plan.checkpoint.framework,
        parameters=plan.parameters,
        sources=plan.sources,
    )


@dataclass(frozen=True)
class _CreatedFile:
    file: OutFile
    path: Path
    holes: tuple[Hole, ...]


def produce(
    folder: Path, files: Sequence[OutFile], index: FragmentIndex[Extent], workers: int, progress: Progress
) -> tuple[int, dict[Damage, str], Implausibles]:
    """Write all files below an empty directory.

    Returns (bytes written, damaged versions with their errors, kinds of implausible values by (fqn, slot)). If any
    version is damaged, the files are incomplete and must be discarded. On return everything is durable except the names
    of files and directories. Raises MergeError, StorageError."""
    with storage_errors(folder):
        _require_paths(folder, files)
        require_space("the merge", folder, sum(file.container.nbytes for file in files))
        created = [_create(folder, file) for file in files]
        plan = plan_transfer(index, ((i, hole) for i, one in enumerate(created) for hole in one.holes))
        paths = [one.path for one in created]
        with early_writeback(paths):
            result = transfer(plan, paths, workers, progress)
        if result.flaws:
            return 0, result.flaws, result.implausible
        _finish(created, result, workers)
    return sum(one.path.stat().st_size for one in created), {}, result.implausible


def _create(folder: Path, file: OutFile) -> _CreatedFile:
    path = folder / file.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _CreatedFile(file, path, file.container.make(path))
    except OSError as error:
        raise OutputError(path, error) from error


def _finish(created: Sequence[_CreatedFile], result: TransferResult, workers: int) -> None:
    checks: list[tuple[_CreatedFile, Hole | None, int]] = []
    for i, one in enumerate(created):
        crcs = checksums(result.pieces.get(i, ()), one.holes)
        one.file.container.seal(one.path, crcs)
        checks += [(one, hole, crcs[hole.offset]) for hole in one.holes]
        checks.append((one, None, 0))
    run_parallel(_sync, created, workers)
    run_parallel(_check, checks, workers)


def _check(item: tuple[_CreatedFile, Hole | None, int], stop: threading.Event) -> None:
    created, hole, crc = item
    try:
        if hole is None:
            created.file.container.check(created.path)
        else:
            check_hole(created.path, hole, crc, stop)
    except OSError as error:
        raise OutputError(created.path, error, "read back") from error


def _sync(created: _CreatedFile, _: threading.Event) -> None:
    try:
        with created.path.open("r+b", buffering=0) as file:
            os.fchmod(file.fileno(), created.file.mode)  # only now: it may forbid writing
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(created.path, error) from error


def _require_paths(out: Path, files: Sequence[OutFile]) -> None:
    """Raise MergeError for paths that leave the directory or collide: they may come from a foreign checkpoint."""
    taken: set[str] = set()
    for file in files:
        if any(name in ("", ".", "..") or "\0" in name for name in file.path.split("/")):
            raise MergeError(f"the source has a file {file.path!r}, which is not a valid path inside the output {out}")
        if file.path in taken:
            raise MergeError(f"two files of the output have the path {file.path}")
        taken.add(file.path)
