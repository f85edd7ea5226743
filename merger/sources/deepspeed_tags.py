"""Directories of DeepSpeed's checkpoints: a tag each, and a file that names the newest."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from merger.checkpoint import Checkpoint
from merger.sources.folder import plain_name, read_name
from store.errors import MergeError
from store.files import LocalFiles
from store.text import listed

_STEP_TAG = re.compile(r"global_step(\d{1,18})(_universal)?")


@dataclass(frozen=True)
class Tags:
    """A directory that checkpoints were saved to, or one checkpoint's own.

    latest: name of the file that names the newest. is_one: whether a directory is a checkpoint.
    """

    root: Path
    latest: str
    is_one: Callable[[Path], bool]

    def all(self) -> list[str]:
        """Names of all checkpoints in the directory; links are none."""
        paths = (self.root / name for name in LocalFiles(self.root).list_dir(""))
        return [path.name for path in paths if not path.is_symlink() and self.is_one(path)]

    def steps(self) -> tuple[int, ...]:
        """Steps of those whose tag says it, newest first."""
        tags = [self.root.name] if self.is_one(self.root) else self.all()
        found = {step for step in map(step_of, tags) if step is not None}
        return tuple(sorted(found, reverse=True))

    def folder(self, step: int | str | None) -> Path:
        """The directory of the checkpoint at a step or tag, or of the newest for None.

        MergeError, naming those that are there, for one that is not, and for a name that leads elsewhere.
        """
        if self.is_one(self.root):
            if step is not None and not _means(step, self.root.name):
                raise MergeError(f"{self.root} is one checkpoint, and not {step}; name the directory above it")
            return self.root
        name = self._newest() if step is None else plain_name(self._tag(step), "the tag asked for")
        folder = self.root / name
        if folder.is_symlink() or not self.is_one(folder):
            by = f", which {self.latest} names" if step is None else ""
            raise MergeError(f"{self.root} has no checkpoint {name}{by}; there are: {self._told()}")
        return folder

    def verified(self, checkpoint: Checkpoint, step: int | str | None) -> Checkpoint:
        """The checkpoint found for ``step``, if its own counter says the step that its directory's name says.

        MergeError, naming both, if not; a problem where the directory itself was named, and so no step was meant.
        """
        tag = checkpoint.certificate.save
        told = step_of(tag)
        if told in (None, checkpoint.step):
            return checkpoint
        line = f"{checkpoint.origin} is called after step {told} and holds step {checkpoint.step}"
        if step is None and self.is_one(self.root):
            return replace(checkpoint, problems=(*checkpoint.problems, line))
        raise MergeError(f"{line}: give it its own name back, or name that directory itself to take it as it is")

    def _newest(self) -> str:
        found = read_name(self.root, self.latest)
        if found is None:
            raise MergeError(f"{self.root} has no file {self.latest!r}: name one of its checkpoints, {self._told()}")
        return found

    def _tag(self, step: int | str) -> str:
        return next((tag for tag in self.all() if _means(step, tag)), str(step))

    def _told(self) -> str:
        return listed(self.all(), 6) or "none"


def step_of(tag: str) -> int | None:
    """The step that a tag of DeepSpeed's own naming says."""
    found = _STEP_TAG.fullmatch(tag)
    return int(found[1]) if found else None


def _means(step: int | str, tag: str) -> bool:
    return str(step) == tag or (step_of(tag) is not None and str(step) == str(step_of(tag)))
