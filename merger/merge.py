"""Rebuilding a checkpoint: plan, read and write, verify, rename; and again where bytes turn out to be damaged.

Changes nothing in its sources.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from merger.blocks import Flaw
from merger.output import Output
from merger.plan import Request, open_request, plan_merge
from merger.produce import produce
from merger.sources.base import Source
from merger.target import Target
from merger.transfer import Progress
from store.certificate import Certificate
from store.names import SaveId


@dataclass(frozen=True)
class MergeResult:
    """A rebuilt checkpoint. problems: what was damaged in the sources, and so was taken from an older version.

    load: lines of Python that load it. notes: what to know before loading it.
    """

    certificate: Certificate
    out: Path
    tag: str
    bytes_written: int
    problems: tuple[str, ...]
    load: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def merge(
    source: Path,
    out: Path,
    *,
    save: SaveId | int | str | None = None,
    target: Target | None = None,
    workers: int | None = None,
    progress: Progress = lambda _: None,
) -> MergeResult:
    """Rebuild the newest state that can be (or ``save``: a commit, step or tag) as a checkpoint of a framework.

    source: a store, or a checkpoint. out: must not exist; it appears when all of it is durable and was read back.
    workers: threads; by default as many as there are processors, up to eight. progress: told, from any of them but
    never two at a time, the stored bytes just read; ``MergePlan.bytes_to_read`` is their sum. Where a version in a
    store turns out to be damaged, writing starts again with the version before, and so does the count.

    Raises NoStoreError, NothingToResumeError, MergeError (a hole; a commit that is not there), DamagedError (a
    foreign checkpoint), UsageError (``out`` is taken), UnsupportedError (no such layout for it), StorageError.
    """
    request = Request(source, save.name if isinstance(save, SaveId) else save, target or Target())
    attempts = _Attempts(open_request(request), request)  # refuses before anything is written
    output = Output(out, source)
    try:
        written = attempts.write(output, workers or default_workers(), progress)
        output.finish()
    finally:
        output.abandon()
    plan = attempts.plan
    load = tuple(line.format(out=str(output.out)) for line in plan.laid.load)
    return MergeResult(
        plan.checkpoint.certificate, output.out, plan.laid.tag, written, attempts.problems, load, plan.laid.notes
    )


def default_workers() -> int:
    """Threads that a merge uses unless told otherwise."""
    return min(8, len(os.sched_getaffinity(0)))


class _Attempts:
    """Plans, one after another, until one finds all of its versions whole."""

    def __init__(self, source: Source, request: Request) -> None:
        self._source, self._request = source, request
        self._flaws: set[Flaw] = set()
        self._damage: list[str] = []
        self.plan = plan_merge(source, request)

    def write(self, output: Output, workers: int, progress: Progress) -> int:
        """Write the output, again where versions turn out to be damaged. Returns the bytes written."""
        while True:
            written, found = produce(output.folder, self.plan.files, self.plan.checkpoint.index, workers, progress)
            if not found:
                return written
            # A unit's version is spread over many files: none of them may keep a part of the damaged one.
            self._flaws |= found.keys()
            self._damage += found.values()
            output.clear()
            self.plan = plan_merge(self._source, self._request, self._flaws)

    @property
    def problems(self) -> tuple[str, ...]:
        """What was damaged, each thing once."""
        return tuple(dict.fromkeys((*self._damage, *self.plan.checkpoint.problems)))
