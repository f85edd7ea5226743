"""Rebuilding a checkpoint: plan, read and write, verify, rename; and again where bytes turn out to be damaged.

Changes nothing in its sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from merger.blocks import Flaw, Progress
from merger.output import Output
from merger.plan import MergePlan, Request, default_workers, open_request, plan_merge
from merger.produce import produce
from merger.recipe.opened import OpenSources
from merger.recipe.recipe import Recipe
from merger.report import SourceUse
from merger.target import Target
from store.certificate import Certificate
from store.errors import UsageError
from store.names import SaveId

Planned = Callable[[MergePlan], None]
"""Told each plan before it is carried out: the first one, and again after each finding of damage."""


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
        self._flaws: set[Flaw] = set()
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
