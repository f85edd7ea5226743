from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import Here


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """The command line, run in this process."""
    return Here(capsys, monkeypatch)


@pytest.fixture
def base() -> Iterator[Path]:
    """Where shared memory is. Short, since a socket's path has to be."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="dp-", dir=memory if os.access(memory, os.W_OK) else None) as folder:
        (Path(folder) / "m").mkdir()
        yield Path(folder) / "m"
