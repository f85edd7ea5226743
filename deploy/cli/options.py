"""Arguments and options that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from store.place import place_of

if TYPE_CHECKING:
    StorePath = Path
else:  # typer would make a plain path again of what the parser gives
    StorePath = object

StoreArgument = Annotated[
    StorePath,
    typer.Argument(
        metavar="STORE", parser=place_of, help="Directory of the store, or s3://BUCKET/PREFIX.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
MemoryOption = Annotated[
    Path, typer.Option("--memory", metavar="PATH", help="Where shared memory is, the `memory: {path: ...}` of a job.")
]
