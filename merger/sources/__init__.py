"""Detect the kind of checkpoint at a path and open it as a source."""

import re
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path

from merger.checkpoint import Checkpoint
from merger.io.blocks import Damage
from merger.sources.base import Source
from merger.sources.deepspeed import DeepSpeedSource
from merger.sources.deepspeed_files import is_checkpoint, is_universal
from merger.sources.deepspeed_universal import UniversalSource
from merger.sources.store import StoreSource
from merger.sources.torch_dcp import is_dcp, read_dcp
from merger.sources.torch_state_dict import STATE, TrainingState, build_checkpoint, optimizer_file, read_state
from store.errors import DamagedError, MergeError, NoStoreError, StorageError, UnsupportedError, system_errors
from store.location import is_url
from store.storage.local import LocalFiles
from store.text import listed

_FOLDER = re.compile(r"(?:checkpoint|step)-(\d{1,18})")


def open_source(path: Path) -> Source:
    """Open the source at a path. NoStoreError if it holds none, UnsupportedError for unsupported checkpoints."""
    with system_errors("read", path):
        return _open(path)


def _open(path: Path) -> Source:
    if is_url(path):
        return StoreSource(path)
    files = path if (path / STATE).is_file() else None
    known: tuple[tuple[Callable[[], bool], Callable[[], Source]], ...] = (
        ((path / "STORE.json").is_file, lambda: StoreSource(path)),
        (lambda: is_universal(path), lambda: UniversalSource(path)),
        (lambda: is_checkpoint(path) or (path / "latest").is_file(), lambda: DeepSpeedSource(path, files)),
        ((path / "latest_universal").is_file, lambda: UniversalSource(path, files)),
        (lambda: is_dcp(path), lambda: SingleSource(path, "dcp", read_dcp)),
        (lambda: path.is_file() or optimizer_file(path) is not None, lambda: SingleSource(path, "torch", read_state)),
        (lambda: path.is_dir() and bool(numbered_folders(path)), lambda: NumberedSource(path)),
        (lambda: _holds(path, is_universal), lambda: UniversalSource(path, files)),
        (lambda: _holds(path, is_checkpoint), lambda: DeepSpeedSource(path, files)),
    )
    for matches, open_it in known:
        if matches():
            return open_it()
    if path.is_dir() and any(inner.suffix in (".safetensors", ".bin") for inner in path.iterdir()):
        raise UnsupportedError(f"{path} holds a model without an optimizer's state, so there is nothing to merge")
    try:
        return StoreSource(path)
    except NoStoreError as error:
        raise NoStoreError(
            f"{error}; it is not a checkpoint of DeepSpeed (latest, global_stepN, *_model_states.pt), a universal "
            "checkpoint (latest_universal, zero/), one of DCP (.metadata, step-N), a Trainer folder (checkpoint-N) "
            "or a file of torch.save either"
        ) from error


def _holds(path: Path, is_one: Callable[[Path], bool]) -> bool:
    return path.is_dir() and any(is_one(inner) for inner in path.iterdir())


class SingleSource:
    """One checkpoint of DCP or of plain PyTorch, which ``read`` reads."""

    def __init__(self, path: Path, kind: str, read: Callable[[Path], TrainingState]) -> None:
        self._path, self.kind, self._read = path.absolute(), kind, read

    def steps(self) -> tuple[int, ...]:
        return (self.checkpoint(None).step,)

    def checkpoint(self, step: int | str | None, _: Set[Damage] = frozenset()) -> Checkpoint:
        found = build_checkpoint(self._read(self._path))
        if step is not None and str(step) not in (str(found.step), self._path.name):
            raise MergeError(f"{self._path} is one checkpoint, of step {found.step}, and not {step}")
        return found


def numbered_folders(root: Path) -> dict[int, Path]:
    """Return the Trainer's ``checkpoint-N``, or torchtitan's ``step-N``, by step, newest first, without links."""
    found = {}
    for path in (root / name for name in LocalFiles(root).list_dir("")):
        name = _FOLDER.fullmatch(path.name)
        if name and path.is_dir() and not path.is_symlink():
            found[int(name[1])] = path
    return dict(sorted(found.items(), reverse=True))


class NumberedSource:
    """A directory of numbered checkpoints: an output directory of the Trainer, or of torchtitan."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        names = [path.name for path in numbered_folders(root).values()]
        self.kind = "dcp" if any(name.startswith("step") for name in names) else "trainer"

    def steps(self) -> tuple[int, ...]:
        return tuple(numbered_folders(self._root))

    def checkpoint(self, step: int | str | None, _: Set[Damage] = frozenset()) -> Checkpoint:
        """Return the state of a folder, given by step or name; None: the newest complete one.

        The Trainer itself chooses the highest number, complete or not."""
        folders = numbered_folders(self._root)
        if step is not None:
            named = next((path for number, path in folders.items() if str(step) in (str(number), path.name)), None)
            if named is None:
                raise MergeError(
                    f"{self._root} has no checkpoint {step}; there are: "
                    f"{listed((path.name for path in folders.values()), 6) or 'none'}"
                )
            return _checkpoint_in(named)
        passed_over: list[str] = []
        for path in folders.values():
            try:
                found = _checkpoint_in(path)
            except (MergeError, DamagedError, StorageError, NoStoreError) as error:
                passed_over.append(f"{path.name} is not complete: {error}")
                continue
            return replace(found, problems=(*passed_over, *found.problems))
        raise MergeError(f"{self._root} has no complete checkpoint: {listed(passed_over, 3, '; ')}")


def _checkpoint_in(path: Path) -> Checkpoint:
    """Return the checkpoint in a numbered folder. MergeError unless it is of the step in its name."""
    found = _open(path).checkpoint(None, frozenset())
    if path.name.rpartition("-")[2] != str(found.step):
        raise MergeError(
            f"{path} holds {found.origin} of step {found.step}, another than in its name: restore its name, or name "
            "that inner directory to merge it as it is"
        )
    return found
