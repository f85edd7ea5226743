"""Detect the kind of checkpoint at a path and open it as a source."""

from collections.abc import Callable
from pathlib import Path

from merger.sources.base import Source
from merger.sources.deepspeed import STATE, DeepSpeedSource, TrainerSource, trainer_folders
from merger.sources.deepspeed_files import is_checkpoint, is_universal
from merger.sources.deepspeed_universal import UniversalSource
from merger.sources.store import StoreSource
from store.errors import NoStoreError, UnsupportedError, system_errors
from store.location import is_url

_MODEL_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "adapter_model.safetensors")


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
        (lambda: path.is_dir() and bool(trainer_folders(path)), lambda: TrainerSource(path)),
        (lambda: _holds(path, is_universal), lambda: UniversalSource(path, files)),
        (lambda: _holds(path, is_checkpoint), lambda: DeepSpeedSource(path, files)),
    )
    for matches, open_it in known:
        if matches():
            return open_it()
    if any((path / name).is_file() for name in _MODEL_FILES):
        raise UnsupportedError(f"{path} holds a model without a DeepSpeed training state, so there is nothing to merge")
    try:
        return StoreSource(path)
    except NoStoreError as error:
        raise NoStoreError(
            f"{error}; it is not a checkpoint of DeepSpeed (latest, global_stepN, *_model_states.pt), a universal "
            "checkpoint (latest_universal, zero/), or a Trainer folder (checkpoint-N) either"
        ) from error


def _holds(path: Path, is_one: Callable[[Path], bool]) -> bool:
    return path.is_dir() and any(is_one(inner) for inner in path.iterdir())
