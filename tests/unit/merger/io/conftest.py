"""Fixtures of the tests of transfers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.extents import Spread


@pytest.fixture
def spread(tmp_path: Path) -> Spread:
    """No tensors yet."""
    return Spread(tmp_path)
