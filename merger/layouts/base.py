"""What a layout is: one way to write a checkpoint, so that a framework loads it by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from merger.checkpoint import Checkpoint
from merger.containers.base import OutFile
from merger.target import Target
from store.certificate import Certificate


@dataclass(frozen=True)
class Laid:
    """All files of an output, planned. tag: the checkpoint's name inside the directory, as its framework says it.

    load: lines of Python that load it, with ``{out}`` for the directory and ``{out:FILE}`` for what is in it.
    notes: what the user has to know before loading it, each with its way out. certificate: of what is laid out, None
    where that is the checkpoint's own.
    """

    tag: str
    files: tuple[OutFile, ...]
    load: tuple[str, ...]
    notes: tuple[str, ...] = ()
    certificate: Certificate | None = None


class Layout(Protocol):
    """Plans the files of one checkpoint. Reads no tensor and writes nothing."""

    def lay_out(self, checkpoint: Checkpoint, target: Target, /) -> Laid:
        """MergeError where the checkpoint lacks what the layout needs, UnsupportedError where it cannot hold it."""
        ...
