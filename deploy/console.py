"""Print results of commands: JSON or text on stdout, notes and errors on stderr; declare shared options.

Only this module writes to stdout: all text is rendered first, so that a closed pipe (``| head``) shows in one place."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from typer import Argument, Option

from deploy.format import printable
from store.location import place_of

if TYPE_CHECKING:
    from rich.progress import Progress

_PIECE = 1024  # characters, of 4 bytes at most


class ReaderLeftError(Exception):
    """Report that stdout was closed. Not an OSError, so that no layer in between catches it."""


def answer(body: Mapping[str, Any], render: Callable[[Console], None], *, as_json: bool) -> None:
    """Print the result of a command: ``body`` as JSON, or the text that ``render`` draws."""
    if as_json:
        _write(json.dumps(body, indent=2, allow_nan=False) + "\n")
        return
    console = Console(highlight=False, markup=False, emoji=False)
    with console.capture() as drawn:
        render(console)
    text = drawn.get()
    _write(text if console.is_terminal else "".join(f"{line.rstrip()}\n" for line in text.splitlines()))


def note(message: str) -> None:
    """Print one line on stderr."""
    sys.stderr.write(f"{printable(message)}\n")
    sys.stderr.flush()


# Columns of tables, by what happens to long text in them.
fold = partial(Column, overflow="fold")
wide = partial(Column, overflow="fold", ratio=1)
line = partial(Column, no_wrap=True)
number = partial(Column, justify="right", no_wrap=True)


def table(*columns: Column) -> Table:
    """Return an empty table in the common style."""
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")


def facts(rows: Mapping[str, Text | str]) -> Table:
    """Return a grid of names and values, one per line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, cell(value))
    return grid


def cell(value: Text | str, style: str = "") -> Text:
    """Return text without markup and without control characters."""
    return value if isinstance(value, Text) else Text(printable(value), style=style)


def spaced(console: Console, part: Table | Text) -> None:
    """Print a part, and an empty line after it."""
    console.print(part)
    console.print()


def problems(console: Console, found: Sequence[str], limit: int = 20, heading: str = "Problems") -> None:
    """Print a list of problems, at most ``limit`` of them."""
    if not found:
        return
    console.print()
    console.print(Text(heading, style="bold red"))
    lines = Table.grid(padding=(0, 1))
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    for text in found[:limit]:
        lines.add_row(" -", cell(text))
    console.print(lines)
    if len(found) > limit:
        console.print(f" … and {len(found) - limit} more; --json lists all")


def _write(text: str) -> None:
    try:
        # An unbuffered stdout (PYTHONUNBUFFERED) loses the rest of a write that the system carries out in part;
        # pieces of at most PIPE_BUF bytes are written whole or not at all.
        for start in range(0, len(text), _PIECE):
            sys.stdout.write(text[start : start + _PIECE])
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderLeftError from error


if TYPE_CHECKING:
    StorePath = Path
else:  # typer would convert the parser's result to a plain Path
    StorePath = object

_STORE = "Directory of the store, or its s3://, az:// or gs:// URL."
StoreArgument = Annotated[StorePath, Argument(metavar="STORE", parser=place_of, help=_STORE)]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON object instead of tables.")]
DebugOption = Annotated[bool, Option("--debug", help="Show the traceback of an error.")]
MemoryOption = Annotated[Path, Option(metavar="PATH", help="Shared memory directory: the job's `memory: {path: ...}`.")]


class ByteBar:
    """Progress in bytes."""

    def __init__(self, bar: "Progress", label: str, total: int | None) -> None:
        self._bar, self._task = bar, bar.add_task(label, total=total)

    def __call__(self, count: int) -> None:
        """Add ``count`` bytes to the progress."""
        self._bar.advance(self._task, count)

    def begin(self, total: int) -> None:
        """Restart at zero with a new total."""
        self._bar.reset(self._task, total=total)


def watched() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr.isatty()


@contextmanager
def byte_progress(label: str, total: int | None = None) -> Iterator[ByteBar]:
    """Show a progress bar on a terminal. With ``total=None``, call :meth:`ByteBar.begin` once the total is known."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    done = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True)
    rate = TransferSpeedColumn(), TimeRemainingColumn()
    bar = Progress(*done, *rate, console=Console(stderr=True), transient=True)
    with bar if watched() else nullcontext():  # only an entered one draws
        yield ByteBar(bar, label, total)
