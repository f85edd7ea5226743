"""Folders of the Hugging Face Trainer that hold checkpoints of DeepSpeed: ``checkpoint-N`` with ``global_stepN``.

What else is in such a folder (configuration, tokenizer, trainer state) belongs beside the state.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import replace
from pathlib import Path

from merger.blocks import Flaw
from merger.checkpoint import Checkpoint
from merger.sources.deepspeed import DeepSpeedSource
from store.errors import DamagedError, MergeError, StorageError
from store.files import LocalFiles
from store.text import listed

_FOLDER = re.compile(r"checkpoint-(\d{1,18})")
STATE = "trainer_state.json"


def is_trainer_folder(path: Path) -> bool:
    """Whether a directory is one of the Trainer's, whatever it holds."""
    return (path / STATE).is_file()


def is_output_folder(path: Path) -> bool:
    """Whether a directory holds folders ``checkpoint-N``."""
    return path.is_dir() and bool(_folders(path))


def _folders(root: Path) -> dict[int, Path]:
    """By step, newest first; links are none."""
    found = {}
    for path in (root / name for name in LocalFiles(root).list_dir("")):
        name = _FOLDER.fullmatch(path.name)
        if name and path.is_dir() and not path.is_symlink():
            found[int(name[1])] = path
    return dict(sorted(found.items(), reverse=True))


class TrainerSource:
    """An output directory of the Trainer, with a folder per checkpoint."""

    kind = "trainer"

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def steps(self) -> tuple[int, ...]:
        """See :class:`merger.sources.base.Source`."""
        return tuple(_folders(self._root))

    def checkpoint(self, step: int | str | None, _: Set[Flaw] = frozenset()) -> Checkpoint:
        """See :class:`merger.sources.base.Source`. None: the newest that is complete; a step's may be ``checkpoint-N``.

        The Trainer's own choice is the highest number, complete or not.
        """
        folders = _folders(self._root)
        if step is not None:
            wanted = next((path for number, path in folders.items() if str(step) in (str(number), path.name)), None)
            if wanted is None:
                raise MergeError(
                    f"{self._root} has no checkpoint {step}; there are: "
                    f"{listed((path.name for path in folders.values()), 6) or 'none'}"
                )
            return _of_its_step(wanted)
        return self._newest(folders)

    def _newest(self, folders: dict[int, Path]) -> Checkpoint:
        passed_over: list[str] = []
        for path in folders.values():
            try:
                found = _of_its_step(path)
            except (MergeError, DamagedError, StorageError) as error:
                passed_over.append(f"{path.name} is not complete: {error}")
                continue
            return replace(found, problems=(*passed_over, *found.problems))
        raise MergeError(f"{self._root} has no complete checkpoint: {listed(passed_over, 3, '; ')}")


def _of_its_step(path: Path) -> Checkpoint:
    """The checkpoint in a folder ``checkpoint-N``. MergeError unless it is of step N."""
    found = DeepSpeedSource(path, path).checkpoint(None)
    if path.name != f"checkpoint-{found.step}":
        raise MergeError(
            f"{path} is called after another step than {found.step}, which {found.origin} in it holds: give it its own "
            "name back, or name that directory itself to take it as it is"
        )
    return found
