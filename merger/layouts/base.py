"""What a layout is: one way to write a rebuilt checkpoint, so that a framework loads it by itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from merger.plan import MergePlan
from merger.read import Reader


@dataclass(frozen=True)
class Written:
    """What a layout wrote. tag: the checkpoint's name inside the directory, as its framework says it."""

    tag: str
    bytes_written: int


class Layout(Protocol):
    """Writes one checkpoint into an empty directory, one rank's files in memory at a time.

    Every file is durable when :meth:`write` returns; names of files are made durable by the caller.
    """

    def write(self, plan: MergePlan, reader: Reader, folder: Path) -> Written:
        """Write the checkpoint. MergeError where the plan does not hold what the layout needs."""
        ...
