"""The simulated disk and the small job of the crash tests serve here too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "crash"))

from simulated import SimulatedFiles
from workload import Job, Memory


@pytest.fixture
def files() -> SimulatedFiles:
    """An empty simulated disk."""
    return SimulatedFiles()


@pytest.fixture
def job(files: SimulatedFiles) -> Job:
    """A small job on it, before its first save."""
    return Job(files, Memory())
