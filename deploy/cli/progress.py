"""A progress bar over bytes, on stderr, and only where someone is watching."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ByteBar:
    """Call it with the bytes just done."""

    def __call__(self, count: int) -> None:
        """``count`` more bytes are done."""

    def begin(self, total: int) -> None:
        """Start from nothing: there are ``total`` bytes to do."""


class _DrawnBar(ByteBar):
    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def __call__(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def begin(self, total: int) -> None:
        self._bar.reset(self._task, total=total)


def watched() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr.isatty()


@contextmanager
def byte_progress(label: str, total: int | None = None) -> Iterator[ByteBar]:
    """A bar for the time of the block; None: the total is told later, with :meth:`ByteBar.begin`."""
    if not watched():
        yield ByteBar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _DrawnBar(bar, bar.add_task(label, total=total))
