"""What the daemon's socket takes from whoever connects, and what it does not."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from deploy.daemon.server import CONNECTIONS
from store.daemon_protocol import (
    LINE_LIMIT,
    VERSION,
    AskStop,
    Register,
    ShuttingDown,
    StatusUpdate,
    connect,
    parse_client_message,
    parse_daemon_message,
    socket_path,
    to_line,
)
from store.errors import DaemonError
from store.memory.layout import home
from tests.support.cli import driftpoint, environment
from tests.support.daemons import Running, daemon, daemon_command, report, until

STORE_ID = "0" * 31 + "1"


@pytest.fixture
def beside(base: Path) -> Iterator[Running]:
    with daemon(base) as running:
        yield running


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """For tests that leave the daemon as it was."""
    with tempfile.TemporaryDirectory(prefix="dp-", dir="/tmp") as folder, daemon(Path(folder)) as running:
        yield running


def opened(base: Path) -> socket.socket:
    found = connect(base, 30.0)
    found.settimeout(30.0)
    return found


def hello(base_: Path, **more: Any) -> dict[str, Any]:
    said = Register(pid=1, rank=0, world_size=1, store="/s", store_id=STORE_ID, epoch=1, base=str(base_))
    return {**to_builtins(said), **more}


def last_word(link: socket.socket) -> dict[str, Any]:
    """What the daemon says before it closes."""
    with link.makefile("rb") as stream:
        lines = stream.readlines()
    found = json.loads(lines[-1])
    assert isinstance(found, dict)
    return found


def refused(base: Path, *lines: bytes) -> str:
    with opened(base) as link:
        for line in lines:
            link.sendall(line)
        found = last_word(link)
    assert found["kind"] == "refused"
    assert report(base) is not None, "it lives"
    return str(found["why"])


def line(body: Any) -> bytes:
    return json.dumps(body).encode() + b"\n"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"\x00\xff garbage\n", "no JSON"),
        (b"[1]\n", "no JSON object"),
        (b"[" * 60_000 + b"\n", "no JSON"),
        (b"x" * (LINE_LIMIT + 10) + b"\n", "exceeds"),
        (b'{"kind": "hello"}\n', "no message of this protocol"),
        (b'{"kind": "dance"}\n', "no message of this protocol"),
        (line({"kind": "note"}), "first message"),
        (line({"kind": "status", "version": VERSION + 1}), f"version {VERSION + 1}"),
    ],
)
def test_what_cannot_be_understood_closes_the_connection(shared: Running, said: bytes, why: str) -> None:
    before = report(shared.base)
    assert why in refused(shared.base, said)
    found = report(shared.base)
    assert before is not None and found is not None and found.refused == before.refused + 1
    assert "a connection was refused" in shared.said()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"store": "relative"}, "store"),
        ({"store_id": "../../x"}, "store_id"),
        ({"epoch": -1}, "epoch"),
        ({"base": "/elsewhere"}, "memory is in /elsewhere"),
        ({"version": 99}, "version 99"),
    ],
)
def test_a_trainer_that_is_wrong_is_refused(shared: Running, change: dict[str, Any], why: str) -> None:
    assert why in refused(shared.base, line(hello(shared.base, **change)))


def test_a_trainer_keeps_to_the_protocol(shared: Running) -> None:
    said = line(hello(shared.base))
    assert "note or bye" in refused(shared.base, said, said)
    assert "committed" in refused(shared.base, said, line({"kind": "note", "committed": "../x"}))


def test_two_processes_cannot_be_the_same_rank(beside: Running) -> None:
    with opened(beside.base) as link:
        link.sendall(line(hello(beside.base)))
        until(lambda: (found := report(beside.base)) and found.jobs, "a job")
        code = "import sys, socket; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
        code += "s.sendall(sys.argv[2].encode()); print(s.makefile().read())"
        said = line(hello(beside.base)).decode()
        words = [sys.executable, "-c", code, str(socket_path(beside.base)), said]
        other = subprocess.run(words, capture_output=True, text=True, timeout=180, check=True)
        assert f"is already process {os.getpid()}" in other.stdout


def test_more_connections_than_it_takes(beside: Running) -> None:
    with ExitStack() as stack:
        links = [stack.enter_context(opened(beside.base)) for _ in range(200)]
        told = [last_word(link) for link in links[CONNECTIONS:]]
        assert {one["kind"] for one in told} == {"refused"}
    until(lambda: report(beside.base) is not None, "it answers again")


def test_nobody_waits_for_who_does_not_read(beside: Running) -> None:
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(opened(beside.base)).sendall(line({"kind": "status", "version": VERSION}))
        assert report(beside.base) is not None


def test_status_and_stop(beside: Running) -> None:
    text = driftpoint("daemon", "status", "--memory", beside.base, columns=200)
    assert (text.code, text.err) == (0, "") and f"process {beside.process.pid}" in text.out
    told = driftpoint("daemon", "status", "--memory", beside.base, "--json").json
    assert (told["pid"], told["jobs"], told["rescues"]) == (beside.process.pid, [], [])
    assert driftpoint("daemon", "stop", "--memory", beside.base).code == 0
    assert beside.process.wait(180) == 0
    assert not socket_path(beside.base).exists()
    gone = driftpoint("daemon", "status", "--memory", beside.base)
    assert gone.code == 1 and "driftpoint daemon run" in gone.err


@pytest.mark.slow
def test_one_for_each_base(beside: Running) -> None:
    second = subprocess.run(
        daemon_command(beside.base), capture_output=True, text=True, env=environment(), timeout=180, check=False
    )
    assert second.returncode == 1 and "a daemon runs for" in second.stderr
    assert report(beside.base) is not None


@pytest.mark.slow
def test_the_socket_of_a_dead_one_is_replaced(beside: Running) -> None:
    beside.kill()
    assert socket_path(beside.base).exists()
    with daemon(beside.base) as second:
        found = report(beside.base)
        assert found is not None and found.pid == second.process.pid


@pytest.mark.slow
def test_one_that_nobody_can_reach_ends(beside: Running) -> None:
    shutil.rmtree(home(beside.base))
    assert beside.process.wait(180) == 0


def test_a_port_that_is_taken_costs_the_endpoint_only(base: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, daemon(base, "--port", taken.getsockname()[1]) as running:
        found = report(base)
        assert found is not None and found.port is None
        assert "no metrics of the daemon" in running.said()


def test_metrics_are_served(beside: Running) -> None:
    found = report(beside.base)
    assert found is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{found.port}/metrics", timeout=180) as answer:
        assert "driftpoint_daemon_up 1.0" in answer.read().decode()


def test_the_socket_is_this_users_own(beside: Running) -> None:
    assert socket_path(beside.base).stat().st_mode & 0o777 == 0o600
    assert home(beside.base).stat().st_mode & 0o777 == 0o700


def test_a_path_that_is_too_long_is_said(tmp_path: Path) -> None:
    base = tmp_path / ("x" * 100)
    base.mkdir()
    told = driftpoint("daemon", "run", "--memory", base)
    assert told.code == 1 and "too long for a socket" in told.err


@pytest.mark.needs_root
def test_another_user_is_refused_and_told(tmp_path: Path) -> None:
    """The daemon is nobody's; root, who may open every socket, is another user all the same."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("another user cannot be played without root and setpriv: NOT tested")
    prefix = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    if subprocess.call([*prefix, sys.executable, "-c", "import deploy"], env=environment(), cwd="/") != 0:
        pytest.skip("another user cannot read this checkout, which is in a private folder: NOT tested")
    with tempfile.TemporaryDirectory(prefix="dp-", dir="/tmp") as folder:
        base = Path(folder) / "m"
        base.mkdir()
        Path(folder).chmod(0o755)
        base.chmod(0o777)
        log = tmp_path / "log"
        with log.open("wb") as output:
            command = [*prefix, *daemon_command(base)]
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment(), cwd="/")
        place = base / "driftpoint-65534" / "daemon.sock"
        try:
            until(lambda: place.exists() or process.poll() is not None, "a daemon of another user")
            assert process.poll() is None, log.read_text()
            with socket.socket(socket.AF_UNIX) as link:
                until(lambda: link.connect_ex(str(place)) == 0, "a connection")
                link.settimeout(30)
                with suppress(BrokenPipeError):  # the refusal does not wait for what is asked
                    link.sendall(line({"kind": "stop", "version": VERSION}))
                told = last_word(link)
            assert told["kind"] == "refused" and "user 0" in told["why"]
            assert process.poll() is None
        finally:
            process.terminate()
            process.wait(180)


def test_messages_come_back_as_they_were() -> None:
    note = StatusUpdate(committed="00000004-000001", memory=None)
    assert parse_client_message(to_line(note)) == note
    with pytest.raises(DaemonError, match="answer is invalid"):
        parse_daemon_message(b'{"kind": "note"}\n')
    with pytest.raises(DaemonError, match="driftpoint daemon stop"):
        parse_daemon_message(b'{"kind": "welcome", "version": 2, "pid": 1}\n')


def test_a_daemon_of_another_version_can_be_stopped() -> None:
    assert parse_client_message(line({"kind": "stop", "version": VERSION + 1})) == AskStop(version=VERSION + 1)
    answer = parse_daemon_message(line({"kind": "leaving", "version": VERSION + 1, "pid": 7}))
    assert isinstance(answer, ShuttingDown)
