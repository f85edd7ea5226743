from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.plain_stores import PlainStore


@pytest.fixture
def store(tmp_path: Path) -> PlainStore:
    """Empty, two ranks."""
    return PlainStore(tmp_path / "store")
