"""The plan of a merge: what would be read, what written, before a byte of either moves.

Reads records, pickles' structure and run state only, no tensors. What a plan says stands as long as the bytes are
whole; where a version of a store turns out not to be, another plan is made with that version among the flaws.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from merger.checkpoint import Checkpoint
from merger.io.blocks import Block, Damage
from merger.io.output_dir import SourceUse, certificate_file
from merger.io.output_file import Hole, OutFile
from merger.io.transfer import TransferPlan, plan_transfer
from merger.layouts import layout_for
from merger.layouts.base import LayoutResult, Target
from merger.recipe.compose import Assembled, assemble
from merger.recipe.model import Recipe, single
from merger.recipe.sources import OpenSources, open_sources, raise_all
from store.errors import DriftpointError, StorageError, UsageError


@dataclass(frozen=True)
class Request:
    """What the user asks for. UsageError where it contradicts itself.

    source: a store or a checkpoint; None where a recipe names all of them. step: a step, a save's name, a tag or a
    bound (``<= 120``); None: the newest, which a directory of DeepSpeed's names itself. recipe: what to put together,
    in place of ``step``.
    """

    source: Path | None
    step: int | str | None = None
    target: Target = field(default_factory=Target)
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        if self.recipe is None:
            if self.source is None:
                raise UsageError("nothing says what to merge: name a SOURCE (a store or a checkpoint), or a recipe")
            return
        if self.step is not None:
            raise UsageError("a recipe has the steps of its sources: give --step or --recipe, not both")
        if self.source is not None and all(ref.path is not None for ref in self.recipe.sources.values()):
            raise UsageError(
                f"{self.recipe.where} names the path of every source, so SOURCE ({self.source}) would not be used; "
                "leave it out"
            )

    def whole_recipe(self) -> Recipe:
        """The recipe; without one, everything from the source."""
        if self.recipe is not None:
            return self.recipe
        assert self.source is not None  # __post_init__
        return single(self.source, self.step)


@dataclass(frozen=True)
class MergePlan:
    """What a merge does.

    files: all of the output, the certificate among them. sources: what it is made of. reads: bytes that are read, by
    the name of the source. bytes_to_read: their sum, each block once, and with each difference its base.
    bytes_to_write: about. worker_bytes: of memory, for tensors. notes: what to know before loading it.
    """

    checkpoint: Checkpoint
    laid: LayoutResult
    files: tuple[OutFile, ...]
    bytes_to_read: int
    bytes_to_write: int
    sources: tuple[SourceUse, ...] = ()
    reads: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    worker_bytes: int = 0

    @property
    def parameters(self) -> int:
        """Parameters of the model, tied ones once, buffers not at all."""
        tensors = self.checkpoint.tensors.values()
        return sum(math.prod(tensor.shape) for tensor in tensors if tensor.kind != "buffer")

    def load(self, out: Path) -> tuple[str, ...]:
        """Lines of Python that load what is written to ``out``."""
        return tuple(line.format(out=_Literal(out)) for line in self.laid.load)

    def memory(self, workers: int) -> int:
        """Bytes that moving the tensors takes at most, on top of the program itself."""
        return self.worker_bytes * workers


@dataclass(frozen=True)
class _Literal:
    """A directory as Python writes it, whatever is in its name; ``{out:model.pt}`` is a file in it."""

    path: Path

    def __format__(self, inside: str) -> str:
        return repr(str(self.path / inside))

    def __repr__(self) -> str:
        return repr(str(self.path))


@dataclass(frozen=True)
class Draft:
    """All that can be said of a merge without doing it.

    sources: those whose checkpoint was found. plan: None where it cannot be made. errors: everything in its way.
    """

    sources: tuple[SourceUse, ...]
    plan: MergePlan | None
    errors: tuple[DriftpointError, ...]


def open_request(request: Request) -> OpenSources:
    """The sources that a request names. UsageError, NoStoreError where one is none."""
    opened = open_sources(request.whole_recipe(), request.source)
    raise_all(opened.errors)
    return opened


def plan_merge(sources: OpenSources, request: Request, flaws: Set[Damage] = frozenset()) -> MergePlan:
    """The plan. Raises what sources, recipes and layouts raise: NothingToResumeError, ConfigError, MergeError,
    UnsupportedError.
    """
    draft = _draft(sources, request, flaws)
    raise_all(draft.errors)
    assert draft.plan is not None  # there is one where there are no errors
    return draft.plan


def draft_merge(request: Request, out: Path | None = None) -> Draft:
    """Everything that a merge would do, and everything that is in its way. Writes nothing.

    out: where it would write, None where that is not known yet.
    """
    draft = _draft(open_sources(request.whole_recipe(), request.source), request)
    return draft if out is None else replace(draft, errors=(*draft.errors, *_no_room(out, draft.plan)))


def free_bytes(out: Path) -> int:
    """Free space where ``out`` would be made."""
    place = out.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def default_workers() -> int:
    """Threads that a merge uses unless told otherwise."""
    return min(8, len(os.sched_getaffinity(0)))


def _draft(sources: OpenSources, request: Request, flaws: Set[Damage] = frozenset()) -> Draft:
    target = _target(request)
    assembled = assemble(sources, flaws, weights_only=target.layout == "hf")
    errors = list(assembled.errors)
    if assembled.checkpoint is None:
        return Draft(assembled.uses, None, tuple(errors))
    try:
        return Draft(assembled.uses, _planned(assembled, assembled.checkpoint, target, request), tuple(errors))
    except DriftpointError as error:
        return Draft(assembled.uses, None, (*errors, error))


def _planned(assembled: Assembled, checkpoint: Checkpoint, target: Target, request: Request) -> MergePlan:
    if target.files is not None:
        if not target.files.is_dir():
            raise UsageError(f"{target.files} is no directory to take configuration and tokenizer files from")
        checkpoint = replace(checkpoint, files=target.files)
    laid = layout_for(checkpoint, target).lay_out(checkpoint, target)
    checkpoint = replace(checkpoint, certificate=laid.certificate or checkpoint.certificate)
    notes = (*assembled.notes, *_dtype_note(request, target, checkpoint), *laid.notes)
    certificate = certificate_file(checkpoint.certificate, laid.tag, notes, assembled.uses)
    files = (*laid.files, certificate)
    holes = [Hole(0, stored) for file in files for stored in file.container.tensors()]
    transfer = plan_transfer(checkpoint.index, ((0, hole) for hole in holes))
    return MergePlan(
        checkpoint,
        laid,
        files,
        transfer.bytes_to_read,
        sum(file.container.nbytes for file in files),
        assembled.uses,
        _reads(transfer, assembled, checkpoint),
        notes,
        transfer.memory,
    )


def _target(request: Request) -> Target:
    """What the user asks for; the recipe's dtype where weights are exported and no other was asked for."""
    recipe, target = request.recipe, request.target
    if recipe is None or recipe.dtype is None or target.dtype is not None or target.layout != "hf":
        return target
    return replace(target, dtype=recipe.dtype)


def _dtype_note(request: Request, target: Target, checkpoint: Checkpoint) -> list[str]:
    dtype = None if request.recipe is None else request.recipe.dtype
    trained = {record.dtype for record in checkpoint.tensors.values() if record.kind == "trainable"}
    if dtype is None or target.layout == "hf" or trained == {dtype}:
        return []
    return [f"the recipe's dtype ({dtype}) is for exported weights (--layout hf): a training state keeps its own"]


def _reads(transfer: TransferPlan, assembled: Assembled, checkpoint: Checkpoint) -> dict[str, int]:
    if len(assembled.uses) == 1:
        return {assembled.uses[0].name: transfer.bytes_to_read}
    name_of: dict[Block, str] = {}
    for (fqn, _), extents in checkpoint.index.names().items():
        name_of |= dict.fromkeys((extent.block for extent in extents), assembled.source_of[fqn])
    reads = dict.fromkeys((use.name for use in assembled.uses), 0)
    for block in transfer.moves:
        reads[name_of[block]] += block.stored_bytes
    return reads


def _no_room(out: Path, plan: MergePlan | None) -> Iterator[DriftpointError]:
    if out.exists() or out.is_symlink():
        yield UsageError(f"{out} exists already, and a merge replaces nothing: name a new directory")
    free = free_bytes(out)
    if plan is not None and plan.bytes_to_write > free:
        yield StorageError(
            f"about {plan.bytes_to_write} bytes would be written to {out}, and {free} are free there; free space or "
            "name another directory"
        )
