"""`every: auto` counts how long a job ran by a clock that nobody sets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from monitor import ledger
from store.catalog import open_catalog
from store.session import count_incarnations
from store.storage.local import LocalFiles
from tests.support.internals import tracer_of
from tests.support.jobs import Job


@pytest.mark.parametrize("days", [400, -400])
def test_a_clock_that_is_set_does_not_change_the_hours_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    """After it was set forward, hours without interruptions lengthened the interval of every later job."""
    one = Job(tmp_path / "store", every="auto")

    class Set(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + timedelta(days=days)

    monkeypatch.setattr(ledger, "datetime", Set)
    one.ckpt.save(wait=True)
    files = LocalFiles(tmp_path / "store")
    newest = open_catalog(files)
    created = datetime.fromisoformat(newest.manifest(newest.saves()[0]).created)
    assert abs((created - datetime.now(UTC)).days) > 300
    one.ckpt._closed = True  # as a killed process
    one.ckpt._saver.close(30.0, clean=False)
    tracer_of(one.ckpt).close(1.0)
    found = count_incarnations(open_catalog(files))
    assert found.interruptions == 1 and 0.0 < found.rank_seconds < 3600.0
