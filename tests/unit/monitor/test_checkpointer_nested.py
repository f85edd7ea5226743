"""Calls of the checkpointer while another one runs: from a signal handler that interrupts it, or another thread."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import monitor
from store.errors import SaveError
from tests.support.jobs import Job, committed_steps


class Interrupted:
    """State whose capture, which is in the middle of a call, is interrupted by ``act``."""

    def __init__(self) -> None:
        self.act: Any = lambda: None

    def state_dict(self) -> dict[str, int]:
        self.act()
        return {"calls": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_a_save_in_a_signal_handler_saves_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, reports = Interrupted(), list[monitor.StepReport]()
    one = Job(tmp_path / "store", state=[state])
    before = signal.signal(signal.SIGUSR1, lambda *_: reports.append(one.ckpt.save()))
    try:
        state.act = lambda: signal.raise_signal(signal.SIGUSR1)
        for _ in range(4):
            one.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
        state.act = lambda: None
    one.ckpt.close()
    assert reports and {report.skipped for report in reports} == {"busy"}
    assert "by a signal handler or another thread" in (reports[0].problem or "")
    assert sum("signal handler" in record.getMessage() for record in caplog.records) == 1
    assert committed_steps(tmp_path / "store") == [1, 2, 3, 4]


def test_a_save_in_another_thread_that_is_to_be_certain_fails(tmp_path: Path) -> None:
    state, raised = Interrupted(), list[BaseException]()
    one = Job(tmp_path / "store", state=[state])

    def save() -> None:
        try:
            one.ckpt.save(wait=True)
        except SaveError as error:
            raised.append(error)

    def beside() -> None:
        thread = threading.Thread(target=save)
        thread.start()
        thread.join(60)

    one.step()
    state.act = beside
    one.step()
    state.act = lambda: None
    one.ckpt.close()
    assert raised
    assert committed_steps(tmp_path / "store") == [1, 2]
