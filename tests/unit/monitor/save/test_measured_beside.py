"""Where training waits for a save, drift is measured by one thread while another one writes; else after it.

Nothing of a save is under way once it is over."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from monitor.observe.sketch_meter import SketchMeter
from store.errors import StorageError
from tests.support.jobs import Job, job


class Threads:
    """The thread that measured each unit of the saves, and what measuring waits for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: dict[str, str] = {}
        self.until: threading.Event | None = None
        measure = SketchMeter.measure

        def noted(meter: SketchMeter, unit: Any, pieces: Any) -> Any:
            name = threading.current_thread().name
            if self.until is not None and "pages" in name:
                assert self.until.wait(60)
            self.names[str(unit)] = name.split("-")[1]
            return measure(meter, unit, pieces)

        patch.setattr(SketchMeter, "measure", noted)


def awaited(one: Job) -> None:
    """Return once training waits for the save, if called by the thread that writes it."""
    writer, until = one.ckpt._saver._writer, time.monotonic() + 60
    while writer.is_current and not writer.awaited:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_units_are_measured_while_the_payload_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, written = Threads(monkeypatch), threading.Event()
    with job(tmp_path / "s", every=1000) as one:
        one.ckpt.resume()
        one.step()

        def before(operation: str, path: str) -> None:
            awaited(one)
            assert operation != "write" or written.wait(60)

        def release() -> None:
            while len(threads.names) < 3:  # ends only if they do not wait for the writing
                time.sleep(0.01)
            written.set()

        one.hook().before = before
        threads.names.clear()
        threading.Thread(target=release, daemon=True).start()
        assert one.ckpt.save().skipped is None
        one.ckpt.flush()
        assert "pages" in threads.names.values()


def test_beside_training_the_thread_that_writes_measures_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training has one core of two then, and two threads of lower priority would take turns with it."""
    threads = Threads(monkeypatch)
    with job(tmp_path / "s", every=1000) as one:
        one.ckpt.resume()
        for _ in range(5):
            one.step()
            threads.names.clear()
            assert one.ckpt.save().skipped is None
            while not one.ckpt._saver.wait(0.0):
                time.sleep(0.01)
            assert set(threads.names.values()) == {"writer"}


@pytest.mark.parametrize("fails", [True, False])
def test_a_save_that_is_over_is_measured_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The other thread is late: it is in the middle of a unit when all is written, or when writing fails."""
    threads = Threads(monkeypatch)
    with job(tmp_path / "s", every=1000) as one:
        one.ckpt.resume()
        one.step()
        assert one.ckpt.save(wait=True).skipped is None
        one.step()
        threads.until, entered = threading.Event(), threading.Event()

        def before(operation: str, path: str) -> None:
            awaited(one)
            if operation == "write" and not entered.is_set():
                entered.set()
                threading.Timer(0.3, threads.until.set).start()
                if fails:
                    raise StorageError("no")

        one.hook().before = before
        one.ckpt.save()
        one.ckpt.flush()
        assert entered.is_set()
        threads.names.clear()
        time.sleep(0.3)
        assert not threads.names
        one.hook().before = lambda operation, path: None
        one.step()  # a unit that was measured late would still be staged
        assert one.ckpt.save(wait=True).skipped is None
