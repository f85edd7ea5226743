"""Plan a merge: what is read and written, before any tensor moves.

Reads records, the structure of pickles, and run state. A plan holds as long as the bytes are intact; if a version in a
store proves damaged, a new plan is made without that version."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from merger.checkpoint import Checkpoint, implausible_lines, own_state_notes, with_problems
from merger.io.blocks import Block, Damage
from merger.io.output_dir import CERTIFICATE, SourceUse, require_space
from merger.io.output_file import Hole, OutFile, VerbatimFile
from merger.io.transfer import TransferPlan, plan_transfer
from merger.layouts import layout_for
from merger.layouts.base import LayoutResult, Target, require_folder
from merger.recipe.compose import Assembly, assemble
from merger.recipe.model import Recipe, SourceRef
from merger.recipe.sources import OpenSources, open_sources, raise_all
from merger.tensors import Implausibles
from store.errors import DriftpointError, StorageError, UsageError


@dataclass(frozen=True)
class Request:
    """Parameters of a merge as the user gives them. UsageError if they contradict each other."""

    source: Path | None  # a store or a checkpoint; None if the recipe names all sources
    step: int | str | None = None  # a step, a save's name, a tag or a bound (``<= 120``); None: the newest
    target: Target = field(default_factory=Target)  # layout and its options
    recipe: Recipe | None = None  # which source each parameter comes from, instead of ``step``
    allow_nonfinite: bool = False  # write implausible values (NaN, infinite, negative second moments), do not raise

    def __post_init__(self) -> None:
        if self.recipe is None:
            if self.source is None:
                raise UsageError("neither SOURCE nor a recipe is given: name a store or a checkpoint, or a recipe")
            return
        if self.step is not None:
            raise UsageError("--step and --recipe are both given, but a recipe sets the steps of its sources: give one")
        if self.source is not None and all(ref.path is not None for ref in self.recipe.sources.values()):
            raise UsageError(
                f"{self.recipe.where} names the path of every source, so SOURCE ({self.source}) would be unused; "
                "leave it out"
            )

    def whole_recipe(self) -> Recipe:
        """Return the recipe; without one, a recipe that takes everything from the source."""
        if self.recipe is not None:
            return self.recipe
        assert self.source is not None  # __post_init__
        return Recipe({"source": SourceRef(self.source, self.step)}, rest="source", run_state="source")


@dataclass(frozen=True)
class MergePlan:
    """A merge ready to be executed."""

    checkpoint: Checkpoint
    laid: LayoutResult
    files: tuple[OutFile, ...]  # all files of the output, the certificate included
    bytes_to_read: int  # every block once, and the base of each difference with it
    bytes_to_write: int  # approximate
    sources: tuple[SourceUse, ...] = ()  # checkpoints that the output consists of
    reads: Mapping[str, int] = field(default_factory=dict)  # bytes to read by source name
    notes: tuple[str, ...] = ()  # facts to know before loading the output
    worker_bytes: int = 0  # memory for tensors per thread

    @property
    def parameters(self) -> int:
        """Number of model parameters, tied ones once, without buffers."""
        return sum(math.prod(tensor.shape) for tensor in self.checkpoint.tensors.values() if tensor.kind != "buffer")

    def load(self, out: Path) -> tuple[str, ...]:
        """Return the lines of Python that load the output from ``out``."""
        return tuple(line.format(out=_Literal(out)) for line in self.laid.load)

    def memory(self, workers: int) -> int:
        """Return the most bytes that moving the tensors takes, on top of the program itself."""
        return self.worker_bytes * workers


@dataclass(frozen=True)
class _Literal:
    """A path that formats as a Python literal; ``{out:model.pt}`` is a file in it."""

    path: Path

    def __format__(self, name: str) -> str:
        return repr(str(self.path / name))

    def __repr__(self) -> str:
        return repr(str(self.path))


@dataclass(frozen=True)
class MergeDraft:
    """Everything known about a merge without executing it."""

    sources: tuple[SourceUse, ...]  # those whose checkpoint was found
    plan: MergePlan | None  # None if it cannot be made
    errors: tuple[DriftpointError, ...]  # all problems that prevent the merge


def open_request(request: Request) -> OpenSources:
    """Open the sources of a request. UsageError, NoStoreError if one cannot be opened."""
    opened = open_sources(request.whole_recipe(), request.source)
    raise_all(opened.errors)
    return opened


def plan_merge(
    sources: OpenSources, request: Request, flaws: Set[Damage] = frozenset(), implausible: Implausibles | None = None
) -> MergePlan:
    """Return the plan.

    ``flaws``: damaged versions, not used. ``implausible``: kinds of such values by (fqn, slot), which become problems.
    Raises NothingToResumeError, ConfigError, MergeError, UnsupportedError as sources, recipes and layouts do."""
    draft = _draft(sources, request, flaws, implausible or {})
    raise_all(draft.errors)
    assert draft.plan is not None  # there is one where there are no errors
    return draft.plan


def draft_merge(request: Request, out: Path | None = None) -> MergeDraft:
    """Plan a merge into ``out`` (None if not known yet) and collect all errors. Writes nothing."""
    draft = _draft(open_sources(request.whole_recipe(), request.source), request, frozenset(), {})
    return draft if out is None else replace(draft, errors=(*draft.errors, *_out_errors(out, draft.plan)))


def default_workers() -> int:
    """Return the number of threads that a merge uses by default."""
    return min(8, len(os.sched_getaffinity(0)))


def _draft(sources: OpenSources, request: Request, flaws: Set[Damage], implausible: Implausibles) -> MergeDraft:
    recipe, target = request.recipe, request.target
    if recipe is not None and recipe.dtype is not None and target.dtype is None and target.layout == "hf":
        target = replace(target, dtype=recipe.dtype)
    assembled = assemble(sources, flaws, weights_only=target.layout == "hf")
    if assembled.checkpoint is None:
        return MergeDraft(assembled.uses, None, assembled.errors)
    try:
        checkpoint = with_problems(assembled.checkpoint, implausible_lines(assembled.checkpoint, implausible))
        plan = _make_plan(assembled, checkpoint, target, request)
    except DriftpointError as error:
        return MergeDraft(assembled.uses, None, (*assembled.errors, error))
    return MergeDraft(assembled.uses, plan, assembled.errors)


def _make_plan(assembled: Assembly, checkpoint: Checkpoint, target: Target, request: Request) -> MergePlan:
    if target.files is not None:
        require_folder(target.files)
        checkpoint = replace(checkpoint, files=target.files)
    laid = layout_for(checkpoint, target)(checkpoint, target)
    checkpoint = replace(checkpoint, certificate=laid.certificate or checkpoint.certificate)
    notes = (
        *assembled.notes,
        *(() if target.layout == "hf" else _effective_note(assembled, checkpoint)),
        *_dtype_note(request, target, checkpoint),
        *laid.notes,
        *own_state_notes(checkpoint),
    )
    uses = [asdict(use) for use in assembled.uses]
    document = {"tag": laid.tag, **checkpoint.certificate.as_json(), "sources": uses, "notes": list(notes)}
    files = (*laid.files, OutFile(CERTIFICATE, VerbatimFile((json.dumps(document, indent=1) + "\n").encode())))
    holes = [Hole(0, stored) for file in files for stored in file.container.tensors()]
    transfer = plan_transfer(checkpoint.index, ((0, hole) for hole in holes))
    to_read, to_write = transfer.bytes_to_read, sum(file.container.nbytes for file in files)
    reads = _reads(transfer, assembled, checkpoint)
    return MergePlan(checkpoint, laid, files, to_read, to_write, assembled.uses, reads, notes, transfer.memory)


def _dtype_note(request: Request, target: Target, checkpoint: Checkpoint) -> list[str]:
    dtype = None if request.recipe is None else request.recipe.dtype
    trained = {record.dtype for record in checkpoint.tensors.values() if record.kind == "trainable"}
    if dtype is None or target.layout == "hf" or trained == {dtype}:
        return []
    return [f"the recipe's dtype ({dtype}) is for exported weights (--layout hf): a training state keeps its own"]


def _effective_note(assembled: Assembly, checkpoint: Checkpoint) -> list[str]:
    """Return the note on a composite of one store, which the run itself would resume at another step."""
    certificate = checkpoint.certificate
    effective = certificate.effective_step
    if [use.kind for use in assembled.uses] != ["store"] or effective == certificate.step:
        return []
    text = (
        f"a job that resumes this commit from the store goes on near its effective step, {effective:.1f}, since the "
        f"weights are older than step {certificate.step}; this checkpoint has the counters and the schedule of step "
        f"{certificate.step}, so what the older layers missed is not repeated"
    )
    return [text]


def _reads(transfer: TransferPlan, assembled: Assembly, checkpoint: Checkpoint) -> dict[str, int]:
    if len(assembled.uses) == 1:
        return {assembled.uses[0].name: transfer.bytes_to_read}
    name_of: dict[Block, str] = {}
    for (fqn, _), extents in checkpoint.index.names().items():
        name_of |= dict.fromkeys((extent.block for extent in extents), assembled.source_of[fqn])
    reads = dict.fromkeys((use.name for use in assembled.uses), 0)
    for block in transfer.moves:
        reads[name_of[block]] += block.stored_bytes
    return reads


def _out_errors(out: Path, plan: MergePlan | None) -> Iterator[DriftpointError]:
    if out.exists() or out.is_symlink():
        yield UsageError(f"{out} already exists, and is never overwritten: name a new directory")
    if plan is not None:
        try:
            require_space("the merge", out, plan.bytes_to_write)
        except StorageError as error:
            yield error
