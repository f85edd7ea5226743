"""The simulated disk and the small job of the crash tests serve here too."""

from __future__ import annotations

import pytest

from tests.crash.simulated import SimulatedFiles
from tests.crash.workload import Job, Memory


@pytest.fixture
def files() -> SimulatedFiles:
    """An empty simulated disk."""
    return SimulatedFiles()


@pytest.fixture
def job(files: SimulatedFiles) -> Job:
    """A small job on it, before its first save."""
    return Job(files, Memory())
