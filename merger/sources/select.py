"""Telling what a path holds, and opening it as a source."""

from __future__ import annotations

from pathlib import Path

from merger.sources.base import Source
from merger.sources.deepspeed import DeepSpeedSource
from merger.sources.deepspeed_files import is_checkpoint
from merger.sources.store import StoreSource


def open_source(path: Path) -> Source:
    """The source at a path. NoStoreError where nothing known is there."""
    if _is_store(path):
        return StoreSource(path)
    if is_checkpoint(path) or _holds_checkpoints(path):
        return DeepSpeedSource(path)
    return StoreSource(path)


def _is_store(path: Path) -> bool:
    return (path / "STORE.json").is_file()


def _holds_checkpoints(path: Path) -> bool:
    return path.is_dir() and ((path / "latest").is_file() or any(is_checkpoint(inner) for inner in path.iterdir()))
