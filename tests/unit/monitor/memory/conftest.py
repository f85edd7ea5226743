"""Fixtures of the memory tier's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
