"""The plan of a merge: what would be read, what written, before a byte of either moves.

Reads records, pickles' structure and run state only, no tensors. What a plan says stands as long as the bytes are
whole; where a version of a store turns out not to be, another plan is made with that version among the flaws.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from merger.blocks import Flaw
from merger.checkpoint import Checkpoint
from merger.containers.base import Hole, OutFile
from merger.layouts.base import Laid
from merger.layouts.select import layout_for
from merger.report import certificate_file
from merger.sources.base import Source
from merger.sources.select import open_source
from merger.target import Target
from merger.transfer import CHUNK, plan_transfer


@dataclass(frozen=True)
class Request:
    """What the user asks for.

    source: a store or a checkpoint. step: a step, a save's name or a tag; None: the newest.
    """

    source: Path
    step: int | str | None = None
    target: Target = field(default_factory=Target)


@dataclass(frozen=True)
class MergePlan:
    """What a merge does.

    files: all of the output, the certificate among them. bytes_to_read: each block once. bytes_to_write: about.
    """

    checkpoint: Checkpoint
    laid: Laid
    files: tuple[OutFile, ...]
    bytes_to_read: int
    bytes_to_write: int

    def memory(self, workers: int) -> int:
        """Bytes that moving the tensors takes at most, on top of the program itself."""
        return 2 * CHUNK * workers


def open_request(request: Request) -> Source:
    """The source that a request names. UsageError, NoStoreError where it is none."""
    return open_source(request.source)


def plan_merge(source: Source, request: Request, flaws: Set[Flaw] = frozenset()) -> MergePlan:
    """The plan. Raises what sources and layouts raise: NothingToResumeError, MergeError, UnsupportedError."""
    checkpoint = source.checkpoint(request.step, flaws)
    if request.target.files is not None:
        checkpoint = replace(checkpoint, files=request.target.files)
    laid = layout_for(checkpoint, request.target).lay_out(checkpoint, request.target)
    certificate = certificate_file(checkpoint.certificate, laid.tag, laid.notes)
    files = (*laid.files, certificate)
    holes = [Hole(0, stored) for file in files for stored in file.container.tensors()]
    transfer = plan_transfer(checkpoint.index, ((0, hole) for hole in holes))
    return MergePlan(checkpoint, laid, files, transfer.bytes_to_read, sum(file.container.nbytes for file in files))
