"""``driftpoint merge --plan``: what a merge would read and write, what it takes, and everything that is in its way."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.cli import output
from deploy.cli.exit_codes import OK
from deploy.cli.merge import kind_of, print_certificate, print_load, print_notes, source_table
from deploy.cli.merge_damage import told as told_error
from deploy.cli.text import plural, size_text
from merger.plan import Draft, MergePlan, Request, default_workers, draft_merge, free_bytes

_FILES = 20
"""Files, and things that are missing, listed one by one in the text."""


@dataclass(frozen=True)
class Told:
    """A draft and where it would go. free: bytes there, None where no directory was named."""

    draft: Draft
    out: Path | None
    workers: int
    free: int | None


def tell(request: Request, out: Path | None, workers: int | None, *, as_json: bool) -> int:
    """Print the plan; returns the exit code that the merge would have. Writes nothing."""
    with output.kept_for_answers():
        draft = draft_merge(request, out)
    draft = replace(draft, errors=tuple(told_error(error) for error in draft.errors))
    if request.recipe is None and not draft.sources:
        raise draft.errors[0]
    told = Told(draft, out, workers or default_workers(), None if out is None else free_bytes(out))
    output.answer(to_json(told), lambda console: draw(console, told), as_json=as_json)
    return draft.errors[0].exit_code if draft.errors else OK


def to_json(told: Told) -> dict[str, Any]:
    """The JSON object of the command."""
    draft, plan = told.draft, told.draft.plan
    reads = {} if plan is None else plan.reads
    return {
        "out": None if told.out is None else str(told.out),
        "possible": not draft.errors,
        "missing": [{"type": type(error).__name__, "message": str(error)} for error in draft.errors],
        "sources": [{**asdict(use), "bytes_to_read": reads.get(use.name)} for use in draft.sources],
        "free_bytes": told.free,
        **(_planned(plan, told) if plan is not None else {}),
    }


def draw(console: Console, told: Told) -> None:
    """The text of the command."""
    draft, plan = told.draft, told.draft.plan
    if plan is not None:
        print_certificate(console, plan.checkpoint.certificate, plan.parameters)
    if draft.sources:
        console.print(source_table(draft.sources, None if plan is None else dict(plan.reads)))
        console.print()
    if plan is not None:
        console.print(_file_table(plan))
        console.print()
        console.print(output.facts(_facts(plan, told)))
        output.problems(console, plan.checkpoint.problems)
        print_notes(console, plan.notes)
        if told.out is not None:
            print_load(console, plan.load(told.out))
    if draft.errors:
        output.problems(console, list(dict.fromkeys(map(str, draft.errors))), _FILES, "Missing")


def _planned(plan: MergePlan, told: Told) -> dict[str, Any]:
    return {
        "tag": plan.laid.tag,
        "framework": plan.checkpoint.framework,
        "step": plan.checkpoint.step,
        "parameters": plan.parameters,
        "bytes_to_read": plan.bytes_to_read,
        "bytes_to_write": plan.bytes_to_write,
        "memory_bytes": plan.memory(told.workers),
        "workers": told.workers,
        "files": [{"path": file.path, "bytes": file.container.nbytes} for file in plan.files],
        "load": [] if told.out is None else list(plan.load(told.out)),
        "notes": list(plan.notes),
        "certificate": plan.checkpoint.certificate.as_json(),
        "problems": list(plan.checkpoint.problems),
    }


def _facts(plan: MergePlan, told: Told) -> dict[str, Text | str]:
    certificate = plan.checkpoint.certificate
    rows: dict[str, Text | str] = {
        "Would be": f"{certificate.save}: step {certificate.step}",
        "Kind": kind_of(certificate),
        "Read": size_text(plan.bytes_to_read),
        "Write": f"about {size_text(plan.bytes_to_write)} in {plural(len(plan.files), 'file')}",
        "Memory": f"at most {size_text(plan.memory(told.workers))} for tensors, with {plural(told.workers, 'worker')}",
    }
    if told.free is not None:
        enough = told.free >= plan.bytes_to_write
        rows["Disk"] = Text(
            f"{size_text(told.free)} free: {'enough' if enough else 'not enough'}", style="" if enough else "bold red"
        )
    return rows


def _file_table(plan: MergePlan) -> Table:
    table = output.table()
    table.add_column("File", overflow="fold", ratio=1)
    table.add_column("Bytes", justify="right", no_wrap=True)
    for file in plan.files[:_FILES]:
        table.add_row(output.cell(file.path), size_text(file.container.nbytes))
    more = plan.files[_FILES:]
    if more:
        rest = sum(file.container.nbytes for file in more)
        table.add_row(f"and {plural(len(more), 'more file')}; --json lists all", size_text(rest))
    return table
