"""Arguments and options that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="Directory of the store.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
MemoryOption = Annotated[
    Path, typer.Option("--memory", metavar="PATH", help="Where shared memory is, the `memory: {path: ...}` of a job.")
]
