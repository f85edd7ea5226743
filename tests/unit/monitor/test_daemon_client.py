"""The trainer's side of the daemon, where there is none, or one that is of no use."""

from __future__ import annotations

import logging
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monitor import daemon_client
from store.daemon_protocol import socket_path
from store.memory.layout import make_home
from tests.support.daemons import until
from tests.support.jobs import Job


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dp-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def answers(base: Path) -> Iterator[list[bytes]]:
    """What a made-up daemon says to each that connects, and then closes."""
    said: list[bytes] = []
    make_home(base)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(socket_path(base)))
    listening.listen()

    def serve() -> None:
        while True:
            try:
                link, _ = listening.accept()
            except OSError:
                return
            link.recv(1 << 16)
            for line in said:
                link.sendall(line)
            link.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield said
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()


def job(store: Path, base: Path, **daemon: Any) -> Job:
    memory = {"enabled": True, "every": 1, "path": str(base)}
    return Job(store, every=2, memory=memory, daemon={"enabled": True, "start": False, "port": 0, **daemon})


def trained(one: Job) -> None:
    one.ckpt.resume()
    for _ in range(4):
        one.step()
    assert one.ckpt.metrics.registry.get_sample_value("driftpoint_saves_total") == 1.0
    one.ckpt.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = (one for one in caplog.records if one.levelno >= logging.WARNING)
    return [one.getMessage() for one in records if "daemon" in one.getMessage()]


def test_without_a_daemon_it_is_said_once(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = job(tmp_path / "store", base)
    until(lambda: one.metric("driftpoint_failures_total", reason="daemon") == 1.0, "a complaint")
    trained(one)
    assert sum("driftpoint daemon run" in text for text in warnings(caplog)) == 1


def test_another_version_of_the_protocol_is_said(
    tmp_path: Path, base: Path, answers: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    answers.append(b'{"kind": "welcome", "version": 9, "pid": 1}\n')
    one = job(tmp_path / "store", base)
    until(lambda: warnings(caplog), "a complaint")
    trained(one)
    assert "speaks version 9" in warnings(caplog)[0] and "driftpoint daemon stop" in warnings(caplog)[0]


def test_one_that_hangs_is_said(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, for one: the kernel takes connections for it."""
    monkeypatch.setattr(daemon_client, "_MESSAGE_TIMEOUT", 0.2)
    make_home(base)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(socket_path(base)))
        listening.listen()
        one = job(tmp_path / "store", base)
        until(lambda: warnings(caplog), "a complaint")
        trained(one)
    assert "timed out" in warnings(caplog)[0]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"kind": "refused", "version": 9, "why": "because"}\n', "refused this job: because"),
        (b'{"kind": "leaving", "version": 1, "pid": 1}\n', "is asked to stop"),
        (b"\xff\n", "no JSON"),
    ],
)
def test_what_it_says_last_is_told(
    tmp_path: Path, base: Path, answers: list[bytes], caplog: pytest.LogCaptureFixture, line: bytes, why: str
) -> None:
    answers.append(line)
    one = job(tmp_path / "store", base, start=True)
    until(lambda: warnings(caplog), "a complaint")
    trained(one)
    assert why in warnings(caplog)[0]
    assert not (base / "daemon.log").exists(), "no other is started"


def test_a_path_that_is_too_long_for_a_socket(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = tmp_path / ("x" * 100)
    base.mkdir()
    one = job(tmp_path / "store", base, start=True)
    until(lambda: warnings(caplog) or any("too long" in one.getMessage() for one in caplog.records), "a complaint")
    trained(one)


def test_nothing_is_begun_where_it_is_not_wanted(tmp_path: Path, base: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    one = job(tmp_path / "store", base, enabled=False)
    assert "driftpoint-daemon-link" not in {thread.name for thread in threading.enumerate()} - before
    trained(one)


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="driftpoint")
