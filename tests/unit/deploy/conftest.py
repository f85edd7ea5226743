from __future__ import annotations

import pytest

from tests.support.cli import Here


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """The command line, run in this process."""
    return Here(capsys, monkeypatch)
