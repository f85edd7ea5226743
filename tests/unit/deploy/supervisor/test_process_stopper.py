"""What a signal to the supervisor says of the end of the command, days later too. A real process, an injected clock."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cli.run import places
from deploy.supervisor.processes import ATTRIBUTION_SECONDS, ProcessStopper
from store.errors import PREEMPTED, ConfigError

HANDLES = """
import signal, time
signal.signal(signal.SIGUSR1, lambda *_: print("USR1", flush=True))
signal.signal(signal.SIGUSR2, lambda *_: print("USR2", flush=True))
signal.signal(signal.SIGTERM, lambda *_: print("TERM", flush=True))
print("ready", flush=True)
while True:
    time.sleep(0.05)  # pause() would miss a signal that comes just before it
"""


@pytest.fixture
def trainer() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", HANDLES], stdout=subprocess.PIPE, text=True) as process:
        assert said(process) == "ready"
        yield process
        process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_notice_is_answered_by_an_end_soon_after_or_by_its_code(trainer: subprocess.Popen[str]) -> None:
    """A handler may be there for something else, and the job die of something else: that is a failure like any."""
    clock = Clock()
    stopping = ProcessStopper(trainer.pid, lambda _: None, clock=clock)
    assert stopping.exit_request(1) is None
    stopping.take(signal.SIGUSR1)
    assert said(trainer) == "USR1"
    assert stopping.exit_request(1) == PREEMPTED, "launchers hide the code"
    clock.now += 30.0 + ATTRIBUTION_SECONDS + 1.0
    assert stopping.exit_request(1) is None and stopping.exit_request(-9) is None
    assert stopping.exit_request(PREEMPTED) == PREEMPTED
    stopping.take(signal.SIGUSR2)
    assert said(trainer) == "USR2" and stopping.exit_request(1) == PREEMPTED


def test_the_end_that_was_asked_for_stays_asked_for(trainer: subprocess.Popen[str]) -> None:
    clock = Clock()
    stopping = ProcessStopper(trainer.pid, lambda _: None, clock=clock)
    stopping.take(signal.SIGTERM)
    clock.now += 1e6
    assert said(trainer) == "USR1" and stopping.exit_request(1) == PREEMPTED


@pytest.mark.parametrize(("signals", "first"), [("[SIGUSR2]", "USR2"), ("[SIGTERM]", "TERM"), ("[]", "USR1")])
def test_the_trainer_gets_the_notice_that_its_settings_name(
    trainer: subprocess.Popen[str], tmp_path: Path, signals: str, first: str
) -> None:
    """It would not heed SIGUSR1, and SIGTERM would end it before it had saved anything."""
    yaml = tmp_path / "job.yaml"
    yaml.write_text(f"store: s\npreemption: {{signals: {signals}}}\n")
    _, _, notice = places(yaml, None)
    ProcessStopper(trainer.pid, lambda _: None, notice=notice).take(signal.SIGTERM)
    assert said(trainer) == first


def test_signals_that_there_are_not_are_an_error(tmp_path: Path) -> None:
    yaml = tmp_path / "job.yaml"
    for section in ("{signals: [USR1]}", "{signals: 5}", "[SIGUSR1]"):
        yaml.write_text(f"preemption: {section}\n")
        with pytest.raises(ConfigError, match="preemption"):
            places(yaml, None)
