"""Fixtures shared by the tests of the training-side package."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Path of a store that does not exist yet."""
    return tmp_path / "store"
