"""Telling what a path holds, and opening it as a source."""

from __future__ import annotations

from pathlib import Path

from merger.sources.base import Source
from merger.sources.store import StoreSource


def open_source(path: Path) -> Source:
    """The source at a path. NoStoreError where nothing known is there."""
    return StoreSource(path)
