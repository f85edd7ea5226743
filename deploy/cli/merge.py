"""``driftpoint merge``: rebuild a complete checkpoint of the training framework out of a store.

The merger is imported when the command runs, because it brings torch with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from deploy.cli import layers, output
from deploy.cli.door import find_save, open_store, parameters
from deploy.cli.options import DebugOption, JsonOption, StoreArgument
from deploy.cli.progress import byte_progress, watched
from deploy.cli.text import kind_text, size_text
from store.catalog import Catalog
from store.errors import DamagedError, NothingToResumeError, StorageError
from store.names import SaveId
from store.schema import ManifestRecord
from store.versions import newest_resumable, resolve

if TYPE_CHECKING:
    from merger.merge import MergeResult

OutOption = Annotated[
    Path, typer.Option(metavar="DIR", help="Directory to write; it must not exist yet.", show_default=False)
]
StepOption = Annotated[
    str | None,
    typer.Option(
        metavar="STEP",
        help="A step (of the newest epoch that has it), or a save such as 00000120-000003. "
        "Without it: the newest commit that can be rebuilt.",
        show_default=False,
    ),
]


def merge(
    store: StoreArgument,
    *,
    out: OutOption,
    step: StepOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Rebuild a complete checkpoint that the training framework loads by itself. The store stays as it is."""
    del debug
    catalog = open_store(store)
    save = None if step is None else find_save(catalog, step)
    result = rebuild(catalog, store, out, save)
    manifest = catalog.manifest(SaveId.parse(result.certificate.save))
    body = as_json(result, manifest)
    output.answer(body, lambda console: draw(console, result, manifest), as_json=json)


def rebuild(catalog: Catalog, root: Path, out: Path, save: SaveId | None) -> MergeResult:
    """Run the merger, with a progress bar where someone is watching."""
    from merger.merge import merge as merge_store

    total = _bytes_to_read(catalog, save) if watched() else 0
    with byte_progress("Rebuilding", total) as progress:
        return merge_store(root, out, save=save, progress=progress)


def as_json(result: MergeResult, manifest: ManifestRecord) -> dict[str, Any]:
    """The JSON object of the command."""
    return {
        "out": str(result.out),
        "tag": result.tag,
        "framework": manifest.framework,
        "bytes_written": result.bytes_written,
        "load": load_lines(result, manifest.framework),
        "certificate": result.certificate.as_json(),
        "problems": list(result.problems),
    }


def draw(console: Console, result: MergeResult, manifest: ManifestRecord) -> None:
    """The text of the command."""
    certificate = result.certificate
    kind = kind_text(exact=certificate.exact, max_staleness=certificate.max_staleness, max_drift=certificate.max_drift)
    layers.print_layers(console, certificate.units)
    console.print()
    console.print(layers.slot_table(certificate.units, parameters(manifest)))
    console.print()
    console.print(
        output.facts(
            {
                "Rebuilt": f"{certificate.save}: step {certificate.step}",
                "Kind": Text(kind, style="green" if certificate.exact else "yellow"),
                "Wrote": f"{size_text(result.bytes_written)} to {result.out}",
            }
        )
    )
    output.problems(console, result.problems)
    console.print()
    console.print("Load it with:")
    console.print()
    for line in load_lines(result, manifest.framework):
        console.print(Text(f"    {line}", style="bold"), soft_wrap=True)


def load_lines(result: MergeResult, framework: str) -> list[str]:
    """The lines of Python that load what was rebuilt."""
    if framework == "deepspeed":
        return [f"engine.load_checkpoint({str(result.out)!r}, tag={result.tag!r})"]
    return [
        f"{name}.load_state_dict(torch.load({str(result.out / f'{name}.pt')!r}))" for name in ("model", "optimizer")
    ]


def _bytes_to_read(catalog: Catalog, save: SaveId | None) -> int:
    try:
        resolution = newest_resumable(catalog)[0] if save is None else resolve(catalog, save)
    except (NothingToResumeError, DamagedError, StorageError):
        return 0  # the merger is about to say why
    return sum(source.entry.nbytes for source in resolution.sources())
