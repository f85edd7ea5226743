from __future__ import annotations

from collections.abc import Iterator

import pytest

from monitor.save.write_tracker import WriteTracker, write_tracker


@pytest.fixture(name="tracker")
def _tracker() -> Iterator[WriteTracker]:
    """The tracker of this process, in use by the test."""
    tracker = write_tracker()
    assert tracker is not None and tracker.in_use.acquire(blocking=False)
    yield tracker
    tracker.in_use.acquire(blocking=False)  # unless the test left it acquired
    tracker.in_use.release()
