"""How a command answers: one JSON object or text on stdout, errors in one line on stderr.

The only place of the command line that writes. Text is laid out completely before its first byte goes out, so
that a reader who leaves early (``| head``) is noticed here and nowhere else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.cli.text import printable

_PIECE = 1024  # characters, of 4 bytes at most


class ReaderLeftError(Exception):
    """Nobody reads stdout any more. No OSError, so that no layer between takes it for its own."""


def answer(body: Mapping[str, Any], render: Callable[[Console], None], *, as_json: bool) -> None:
    """Print a command's result: ``body`` as JSON, or what ``render`` draws."""
    if as_json:
        _write(json.dumps(body, indent=2, allow_nan=False) + "\n")
        return
    console = Console(highlight=False, markup=False, emoji=False)
    with console.capture() as drawn:
        render(console)
    text = drawn.get()
    _write(text if console.is_terminal else "".join(f"{line.rstrip()}\n" for line in text.splitlines()))


@contextmanager
def kept_for_answers() -> Iterator[None]:
    """Keep stdout for the answer: what libraries print while the block runs (DeepSpeed logs there) goes to stderr."""
    with redirect_stdout(sys.stderr):
        yield


def answer_error(kind: str, message: str, *, as_json: bool) -> None:
    """Tell what went wrong: ``error: …`` on stderr, or as JSON on stdout."""
    if as_json:
        _write(json.dumps({"error": {"type": kind, "message": message}}, indent=2) + "\n")
        return
    sys.stderr.write(f"error: {printable(message)}\n")
    sys.stderr.flush()


def note(message: str) -> None:
    """A line on stderr beside the result."""
    sys.stderr.write(f"{printable(message)}\n")
    sys.stderr.flush()


def table(**options: Any) -> Table:
    """An empty table in the style of all tables here."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", **options)


def facts(rows: Mapping[str, Text | str]) -> Table:
    """Names and values, one a line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, cell(value))
    return grid


def cell(value: Text | str, style: str = "") -> Text:
    """A piece of text in which nothing is markup and no control character is left."""
    return value if isinstance(value, Text) else Text(printable(value), style=style)


def problems(console: Console, found: Sequence[str], limit: int = 20, heading: str = "Problems") -> None:
    """A list of what is wrong, cut where it gets too long to read."""
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
