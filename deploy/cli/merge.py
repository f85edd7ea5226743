"""``driftpoint merge`` and ``merge --plan``: rebuild a checkpoint from a store, a framework checkpoint or a recipe.

``DamagedError`` has the exit code of a store that is damaged but resumable. A merge or an import that can work around
damage succeeds; one that fails because of damage has no result, so its error becomes a NothingToResumeError.

The merger is imported when the command runs, because it imports torch. Libraries (DeepSpeed) log to stdout."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Exit, Option

from deploy import console as output
from deploy import tables
from deploy.console import DebugOption, JsonOption, StorePath, byte_progress
from deploy.exit_codes import OK
from deploy.format import drift_text, kind_text, plural, printable, size_text, span_text
from store.certificate import Certificate
from store.errors import DamagedError, DriftpointError, NothingToResumeError, StorageError, UnsupportedError, UsageError
from store.location import is_url, place_of
from store.text import listed

if TYPE_CHECKING:
    from merger.io.output_dir import SourceUse
    from merger.merge import MergeResult
    from merger.plan import MergeDraft, MergePlan, Request

_NAMED = 6  # layers named before the rest are counted
_RATE = 500_000_000  # bytes a second assumed for a plan's time: an ordinary disk
_FILES = 20  # files and problems listed one by one in the text


@contextmanager
def damage_as_no_result() -> Iterator[None]:
    """Convert a DamagedError of the block into a NothingToResumeError."""
    try:
        yield
    except DamagedError as error:
        raise damage_error(error) from error


def damage_error(error: DriftpointError) -> DriftpointError:
    """Return the error as reported by the command."""
    if not isinstance(error, DamagedError):
        return error
    return NothingToResumeError(
        f"{error}; there is no other copy in the source: choose another checkpoint (--step), or restore the file from "
        "a backup"
    )


_SOURCE = (
    "A store (a directory, s3://, az:// or gs:// URL), or a checkpoint of a framework (or the directory of several). "
    "Not needed with a recipe that names its sources."
)
_STEP = (
    "A step, also of the journal, a save such as 00000120-000003, a tag, or a bound such as '<= 120'. Default: the "
    "newest that can be rebuilt of a store, `latest` of a DeepSpeed directory, the newest complete Trainer checkpoint."
)
_NONFINITE = (
    "Take NaN, infinite values and negative second moments of a foreign checkpoint as they are, instead of refusing "
    "them."
)
NonfiniteOption = Annotated[bool, Option("--allow-nonfinite", help=_NONFINITE)]


def merge(
    source: Annotated[StorePath | None, Argument(metavar="SOURCE", parser=place_of, help=_SOURCE)] = None,
    *,
    out: Annotated[Path | None, Option(metavar="DIR", help="Directory to write; it must not exist yet.")] = None,
    step: Annotated[str | None, Option(metavar="STEP", help=_STEP)] = None,
    layout: Annotated[
        str, Option(metavar="LAYOUT", help="native, deepspeed, universal, hf, dcp, trainer or torch.")
    ] = "native",
    zero_stage: Annotated[
        int | None, Option(metavar="N", help="ZeRO stage to write, 1 to 3 (deepspeed).", show_default="the source's")
    ] = None,
    world_size: Annotated[
        int | None, Option(metavar="N", help="Ranks to write for (deepspeed, trainer).", show_default="the source's")
    ] = None,
    dtype: Annotated[
        str | None,
        Option(metavar="DTYPE", help="Of hf weights: float32, bfloat16, float16.", show_default="as trained"),
    ] = None,
    shard_size: Annotated[str | None, Option(metavar="SIZE", help="File size (hf, dcp).", show_default="5GB")] = None,
    files: Annotated[
        Path | None, Option(metavar="DIR", help="Configuration, tokenizer (hf, trainer).", show_default="the source's")
    ] = None,
    recipe: Annotated[Path | None, Option(metavar="FILE", help="Recipe that combines several checkpoints.")] = None,
    workers: Annotated[
        int | None, Option(metavar="N", min=1, help="Number of threads.", show_default="processors, up to 8")
    ] = None,
    allow_nonfinite: NonfiniteOption = False,
    plan: Annotated[bool, Option("--plan", help="Only list what would be read and written, and is missing.")] = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Rebuild a complete checkpoint that the training framework loads by itself. Sources are not changed."""
    if out is None and not plan:
        raise UsageError("missing option '--out': a new directory to write to; see `driftpoint merge --help`")
    if out is not None and is_url(place_of(out)):
        raise UsageError(f"--out {place_of(out)}: a merge writes directories only; copy the result to the bucket")
    from merger.layouts.base import Target
    from merger.plan import Request
    from merger.recipe.model import parse_dtype
    from merger.recipe.parse import read_recipe

    given = None if dtype is None else parse_dtype(dtype)
    size = None if shard_size is None else size_from(shard_size)
    target = Target(layout, zero_stage, world_size, given, size, files)
    wanted = int(step) if step is not None and step.isascii() and step.isdigit() else step
    rules = None if recipe is None else read_recipe(recipe)
    if plan:
        raise Exit(print_plan(Request(source, wanted, target, rules, allow_nonfinite), out, workers, as_json=json))
    assert out is not None  # checked above
    from merger.merge import merge as run

    with redirect_stdout(sys.stderr), damage_as_no_result(), byte_progress("Rebuilding") as progress:
        result = run(
            source,
            out,
            save=wanted,
            target=target,
            recipe=rules,
            workers=workers,
            allow_nonfinite=allow_nonfinite,
            progress=progress,
            planned=lambda plan: progress.begin(plan.bytes_to_read),
        )
    output.answer(_as_json(result), lambda console: _draw(console, result), as_json=json)


def export(
    source: Annotated[StorePath, Argument(metavar="SOURCE", parser=place_of, help="As that of `merge`.")],
    repo: Annotated[str, Argument(metavar="REPO", help="Repository on the hub; made if there is none.")],
    *,
    step: Annotated[str | None, Option(metavar="STEP", help="As that of `merge`.")] = None,
    files: Annotated[Path | None, Option(metavar="DIR", help="Directory with config.json, tokenizer, card.")] = None,
    dtype: Annotated[str | None, Option(metavar="DTYPE", help="float32, bfloat16 or float16.")] = None,
    revision: Annotated[str | None, Option(metavar="BRANCH", help="Branch, if not main.")] = None,
    private: Annotated[bool, Option("--private", help="Make a new repository private.")] = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Push the weights of a commit to the Hugging Face hub, in one commit there. Sources are not changed."""
    from merger.layouts.base import Target
    from merger.merge import merge as run
    from merger.plan import Request, open_request, plan_merge
    from merger.recipe.model import parse_dtype

    target = Target("hf", dtype=None if dtype is None else parse_dtype(dtype), files=files)
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr), damage_as_no_result(), _hub(repo) as hub:
        api = hub.HfApi(library_name="driftpoint")
        request = Request(source, step, target)
        plan_merge(open_request(request), request)
        api.whoami()  # what cannot succeed fails before the part that may take long
        result = run(source, Path(folder, "model"), save=step, target=target)
        told = f"{result.certificate.save}, step {result.certificate.step}: {kind_of(result.certificate).plain}"
        _label(result.out / "README.md", told, result.problems)
        api.create_repo(repo, private=private or None, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        # upload_folder may make several commits. With one, a reader never sees files of two pushes together.
        new = {path.relative_to(result.out).as_posix(): path for path in result.out.rglob("*") if path.is_file()}
        old = {name for name in api.list_repo_files(repo, revision=revision) if ".safetensors" in name} - new.keys()
        operations = [*(hub.CommitOperationDelete(name) for name in sorted(old))]
        operations += [hub.CommitOperationAdd(name, str(path)) for name, path in sorted(new.items())]
        pushed = api.create_commit(repo, operations, commit_message=told, revision=revision)
    rows = {"Pushed": told, "To": pushed.commit_url, "Notes": "; ".join((*result.problems, *result.notes)) or "none"}
    body = {**_as_json(result), "out": pushed.commit_url, "load": [], "repo": repo}
    output.answer(body, lambda console: console.print(output.facts(rows)), as_json=json)


@contextmanager
def _hub(repo: str) -> Iterator[Any]:
    """Yield the hub's library, with StorageErrors. Raises UnsupportedError if it is not installed."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise UnsupportedError(f"{error.name} is not installed: run `pip install 'driftpoint[hf]'`") from error
    try:
        yield huggingface_hub
    except (errors.HTTPError, errors.HFValidationError, errors.LocalTokenNotFoundError) as error:  # type: ignore[attr-defined]
        raise StorageError(f"{repo} was not pushed: {error}; check that name, and `hf auth whoami`") from error


def _label(card: Path, told: str, problems: Sequence[str]) -> None:
    """Write above the text of a model card which commit the weights are of, and what is wrong with them."""
    lines = (f"Commit {told}. driftpoint-certificate.json lists the layers.", *problems)
    label = "".join(f"\n> {printable(line)}\n" for line in lines)
    text = card.read_text() if card.exists() else ""
    card.write_text(re.sub(r"\A(---\n.*?\n---\n)?", lambda head: f"{head[0]}{label}\n", text, count=1, flags=re.DOTALL))


def _as_json(result: "MergeResult") -> dict[str, Any]:
    return {
        "out": str(result.out),
        "tag": result.tag,
        "framework": result.framework,
        "parameters": result.parameters,
        "bytes_written": result.bytes_written,
        "load": list(result.load),
        "notes": list(result.notes),
        "sources": [asdict(source) for source in result.sources],
        "certificate": result.certificate.as_json(),
        "problems": list(result.problems),
    }


def _draw(console: Console, result: "MergeResult") -> None:
    certificate = result.certificate
    print_certificate(console, certificate, result.parameters)
    if len(result.sources) > 1:
        output.spaced(console, source_table(result.sources))
    rows: dict[str, Text | str] = {
        "Rebuilt": f"{certificate.save}: step {certificate.step}",
        "Kind": kind_of(certificate),
        "Wrote": f"{size_text(result.bytes_written)} to {result.out}",
    }
    console.print(output.facts(rows))
    output.problems(console, result.problems)
    _print_notes(console, result.notes)
    print_load(console, result.load)


def print_certificate(console: Console, certificate: Certificate, parameters: int) -> None:
    """Print tables per layer and per slot, and the optimizer steps that had to be changed."""
    tables.print_layers(console, certificate.units)
    console.print()
    output.spaced(console, tables.slot_table(certificate.units, parameters))
    from merger.checkpoint import changed_steps

    if steps := changed_steps(certificate):
        table = output.table(output.number("Param group"), output.number("Optimizer step"), output.wide("Layers had"))
        for step in steps:  # of a param group, or those of it with one step
            had = "; ".join(f"{one.step:g}: {listed(one.layers, _NAMED)}" for one in step.had)
            table.add_row(str(step.param_group), f"{step.chosen:g}", output.cell(had))
        output.spaced(console, table)


def kind_of(certificate: Certificate) -> Text:
    """Describe the result: exact, as found, or its staleness and drift."""
    from merger.checkpoint import changed_steps
    from merger.layouts.huggingface import working_dtypes

    if certificate.whole and (dtypes := working_dtypes(certificate)):
        # Bit for bit the weights that the run computes with, but not its master weights.
        text = f"working weights ({', '.join(dtypes)}), not the master weights"
        if certificate.exact:
            return Text(f"exact {text}", style="green")
        return Text(f"{text}; {as_found_text(certificate)}", style="yellow")
    if certificate.as_found:
        return Text(as_found_text(certificate), style="yellow")

    drift = certificate.max_drift
    ages = [unit.staleness for unit in certificate.units if unit.moving]
    newest, oldest = min(ages, default=0), max(ages, default=0)
    fresh = newest == oldest == 0 and not certificate.lossy
    if not certificate.exact and fresh and certificate.problems and not changed_steps(certificate):
        text = f"not exact: {plural(len(certificate.problems), 'problem')}, listed below"
    elif certificate.exact or newest >= 0:
        text = kind_text(exact=certificate.exact, max_staleness=oldest, max_drift=drift, lossy=certificate.lossy)
    else:
        old = f"up to {plural(oldest, 'step')} old and " if oldest > 0 else ""
        new = f"up to {plural(-newest, 'step')} newer than the run state"
        text = f"composite: layers {old}{new}, drift up to {drift_text(drift)}"
    if changed_steps(certificate):
        text += ", one optimizer step for layers that had different ones"
    if certificate.unvouched:
        text += f"; {_origin_text(certificate.unvouched)}"
    return Text(text, style="green" if certificate.exact else "yellow")


def as_found_text(certificate: Certificate) -> str:
    """Describe files that nothing contradicts, and of which no hash proves that they are of one save."""
    if not certificate.unvouched:
        return "as found: the files hold no hashes of their contents"
    return f"as found: {_origin_text(certificate.unvouched)}"


def _origin_text(unvouched: int) -> str:
    return f"nothing vouches for the origin of {plural(unvouched, 'tensor')}"


def source_table(sources: "Sequence[SourceUse]", reads: dict[str, int] | None = None) -> Table:
    """Return a table with one row per source; ``reads`` are the bytes read from each."""
    numbers = ("Step",) if reads is None else ("Step", "Read")
    table = output.table(output.fold("Source"), *map(output.number, numbers), output.wide("Taken from"))
    for source in sources:
        read = [] if reads is None else [size_text(reads.get(source.name, 0))]
        what = f"{source.kind}: {source.origin}"
        table.add_row(output.cell(source.name), str(source.step), *read, output.cell(what))
    return table


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print()
        console.print(output.facts({"Note": note}))


def print_load(console: Console, lines: Sequence[str]) -> None:
    """Print lines of Python unwrapped, so that they can be copied."""
    if not lines:
        return
    console.print("\nLoad it with:\n")
    for line in lines:
        console.print(Text(f"    {line}", style="bold"), soft_wrap=True)


def size_from(text: str) -> int:
    """Parse a size such as ``5GB``, ``500 MiB`` or ``1000000``. Raises UsageError."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise UsageError(f"{text!r} is not a size; write 5GB, 500MB or 4GiB") from error


def print_plan(request: "Request", out: Path | None, workers: int | None, *, as_json: bool) -> int:
    """Print the plan, write nothing, and return the exit code that the merge would have."""
    from merger.io.output_dir import free_bytes
    from merger.plan import default_workers, draft_merge

    with redirect_stdout(sys.stderr):
        draft = draft_merge(request, out)
    draft = replace(draft, errors=tuple(damage_error(error) for error in draft.errors))
    if request.recipe is None and not draft.sources:
        raise draft.errors[0]
    plan, reads = draft.plan, {} if draft.plan is None else draft.plan.reads
    body = {
        "out": None if out is None else str(out),
        "possible": not draft.errors,
        "missing": [{"type": type(error).__name__, "message": str(error)} for error in draft.errors],
        "sources": [{**asdict(use), "bytes_to_read": reads.get(use.name)} for use in draft.sources],
        "free_bytes": None if out is None else free_bytes(out),
        **({} if plan is None else _planned(plan, out, workers or default_workers())),
    }
    output.answer(body, lambda console: _draw_plan(console, draft, body), as_json=as_json)
    return draft.errors[0].exit_code if draft.errors else OK


def _draw_plan(console: Console, draft: "MergeDraft", body: Mapping[str, Any]) -> None:
    plan = draft.plan
    if plan is not None:
        print_certificate(console, plan.checkpoint.certificate, plan.parameters)
    if draft.sources:
        output.spaced(console, source_table(draft.sources, None if plan is None else dict(plan.reads)))
    if plan is not None:
        output.spaced(console, _file_table(plan))
        console.print(output.facts(_facts(plan, body)))
        output.problems(console, plan.checkpoint.problems)
        _print_notes(console, plan.notes)
        print_load(console, body["load"])
    if draft.errors:
        output.problems(console, list(dict.fromkeys(map(str, draft.errors))), _FILES, "Missing")


def _planned(plan: "MergePlan", out: Path | None, workers: int) -> dict[str, Any]:
    return {
        "tag": plan.laid.tag,
        "framework": plan.checkpoint.framework,
        "step": plan.checkpoint.step,
        "parameters": plan.parameters,
        "bytes_to_read": plan.bytes_to_read,
        "bytes_to_write": plan.bytes_to_write,
        "memory_bytes": plan.memory(workers),
        "seconds": (plan.bytes_to_read + 2 * plan.bytes_to_write) / _RATE,  # what is written is read back
        "assumed_bytes_per_second": _RATE,
        "workers": workers,
        "files": [{"path": file.path, "bytes": file.container.nbytes} for file in plan.files],
        "load": [] if out is None else list(plan.load(out)),
        "notes": list(plan.notes),
        "certificate": plan.checkpoint.certificate.as_json(),
        "problems": list(plan.checkpoint.problems),
    }


def _facts(plan: "MergePlan", body: Mapping[str, Any]) -> dict[str, Text | str]:
    certificate, workers, free = plan.checkpoint.certificate, body["workers"], body["free_bytes"]
    rows: dict[str, Text | str] = {
        "Result": f"{certificate.save}: step {certificate.step}",
        "Kind": kind_of(certificate),
        "Read": size_text(plan.bytes_to_read),
        "Write": f"about {size_text(plan.bytes_to_write)} in {plural(len(plan.files), 'file')}",
        "Memory": f"at most {size_text(plan.memory(workers))} for tensors, with {plural(workers, 'worker')}",
        "Time": f"about {span_text(body['seconds'])} at {size_text(_RATE)}/s",
    }
    if free is not None:
        enough = free >= plan.bytes_to_write
        text = f"{size_text(free)} free: {'enough' if enough else 'not enough'}"
        rows["Disk"] = Text(text, style="" if enough else "bold red")
    return rows


def _file_table(plan: "MergePlan") -> Table:
    table = output.table(output.wide("File"), output.number("Bytes"))
    for file in plan.files[:_FILES]:
        table.add_row(output.cell(file.path), size_text(file.container.nbytes))
    if more := plan.files[_FILES:]:
        rest = sum(file.container.nbytes for file in more)
        table.add_row(f"and {plural(len(more), 'more file')}; --json lists all", size_text(rest))
    return table
