"""DeepSpeed's own checkpoints as a source, as ``engine.save_checkpoint`` wrote them, at any stage and world size.

Nothing of them is prepared, and nothing of DeepSpeed runs: see :mod:`merger.sources.pt`.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from merger.blocks import Flaw
from merger.checkpoint import Checkpoint
from merger.sources.deepspeed_checkpoint import build
from merger.sources.deepspeed_files import is_checkpoint, read_files
from merger.sources.deepspeed_tags import Tags
from merger.sources.deepspeed_zero import param_shapes
from merger.sources.deepspeed_zero3 import zero3
from merger.sources.deepspeed_zero12 import zero12
from merger.sources.merged import as_merged


class DeepSpeedSource:
    """A directory that checkpoints were saved to, or one checkpoint's own directory.

    files: a directory with what belongs beside the state, or None.
    """

    kind = "deepspeed"

    def __init__(self, root: Path, files: Path | None = None) -> None:
        self._tags, self._files = Tags(root.absolute(), "latest", is_checkpoint), files

    def steps(self) -> tuple[int, ...]:
        """See :class:`merger.sources.base.Source`. Tags that say no step are left out."""
        return self._tags.steps()

    def checkpoint(self, step: int | str | None, _: Set[Flaw] = frozenset()) -> Checkpoint:
        """See :class:`merger.sources.base.Source`. None: the one that ``latest`` names."""
        files = read_files(self._tags.folder(step))
        optimized = zero3(files) if files.stage == 3 else zero12(files)
        found = as_merged(build(files, param_shapes(files.model), optimized, self._files), files)
        return self._tags.verified(found, step)
