"""``driftpoint import``: convert an existing checkpoint into a store that a job can resume from.

The merger is imported when the command runs, because it imports torch."""

from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from deploy import console as output
from deploy.cli.merge import NonfiniteOption, damage_as_no_result, kind_of
from deploy.console import DebugOption, JsonOption, StorePath, byte_progress
from deploy.format import plural, size_text
from store.location import place_of

if TYPE_CHECKING:
    from merger.import_checkpoint import ImportPlan, ImportResult

_CHECKPOINT = "A checkpoint of DeepSpeed, DCP, the Trainer or torch.save, or another store."
_STORE = "The store to write: without commits, or a new or empty directory or s3://, az:// or gs:// prefix."
_STEP = "A step, a tag or a save name. Default: `latest` of a DeepSpeed directory, otherwise the newest."


def import_(
    checkpoint: Annotated[StorePath, Argument(parser=place_of, metavar="CHECKPOINT", help=_CHECKPOINT)],
    *,
    store: Annotated[StorePath, Option(metavar="STORE", parser=place_of, help=_STORE)],
    step: Annotated[str | None, Option(metavar="STEP", help=_STEP)] = None,
    link: Annotated[bool, Option("--link", help="Take a store's commit as it is, by hard links if possible.")] = False,
    allow_nonfinite: NonfiniteOption = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Convert a checkpoint into a store, bit for bit, so that a job can resume from it. The source is not changed."""
    from merger.import_checkpoint import import_checkpoint, plan_import

    with damage_as_no_result():
        plan = plan_import(checkpoint, step, link=link)
        with byte_progress("Importing", plan.bytes_to_read) as progress:
            found = import_checkpoint(plan, store, progress, allow_nonfinite=allow_nonfinite)
    body = {
        "store": str(found.store),
        "save": found.save.name,
        "step": found.save.step,
        "source": plan.checkpoint.origin,
        "kind": plan.kind,
        "framework": plan.checkpoint.framework,
        "layers": len(plan.checkpoint.layers),
        "bytes_written": found.bytes_written,
        "certificate": found.certificate.as_json(),
        "notes": list(found.notes),
        "problems": list(found.problems),
    }
    output.answer(body, lambda console: _draw(console, plan, found), as_json=json)


def _draw(console: Console, plan: "ImportPlan", found: "ImportResult") -> None:
    checkpoint = plan.checkpoint
    rows: dict[str, Text | str] = {
        "Imported": f"{checkpoint.origin} ({plan.kind})",
        "As": f"{found.save} in {found.store}",
        "Kind": kind_of(found.certificate),
        "Wrote": f"{size_text(found.bytes_written)}, {plural(len(checkpoint.layers), 'layer')}",
    }
    console.print(output.facts(rows))
    for note in found.notes:
        console.print()
        console.print(output.cell(note, "yellow"))
    output.problems(console, found.problems)
    console.print("\nTo resume from it, set this in the job's YAML:\n")
    console.print(Text(f"    store: {found.store}", style="bold"), soft_wrap=True)
