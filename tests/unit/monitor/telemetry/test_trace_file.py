"""The file of a trace: whole lines at its end, after a crash too; given up where it cannot be written."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from monitor.telemetry.metrics import Metrics
from monitor.telemetry.trace import TraceFile, TraceWriter
from store.errors import StorageError
from tests.support.launch import ENVIRONMENT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "er" / "trace.jsonl"


def upkeep(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value("driftpoint_failures_total", {"reason": "upkeep"}) or 0.0


def test_lines_are_appended_to_what_is_there(path: Path) -> None:
    for text in (b"a\n", b"b\n"):
        file = TraceFile(path)
        file.append(text)
        file.append(text)
        file.close()
    assert path.read_bytes() == b"a\na\nb\nb\n"


@pytest.mark.parametrize(
    ("torn", "closed"), [(b"", b""), (b"x\n", b"x\n"), (b'{"kin', b'{"kin\n'), (b"x\n{", b"x\n{\n")]
)
def test_a_torn_line_is_closed_off(path: Path, torn: bytes, closed: bytes) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(torn)
    file = TraceFile(path)
    file.append(b"a\n")
    file.close()
    assert path.read_bytes() == closed + b"a\n"


HOLD = """
import sys
from pathlib import Path
from monitor.telemetry.trace import TraceFile
file = TraceFile(Path(sys.argv[1]))
file.append(b"theirs\\n")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_file_is_one_job_s_until_that_ends(path: Path) -> None:
    args = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match="another job writes"):
            TraceFile(path).append(b"ours\n")
        other.kill()
    file = TraceFile(path)
    file.append(b"ours\n")
    file.close()
    assert path.read_bytes() == b"theirs\nours\n"


def test_lines_of_two_threads_are_whole(path: Path) -> None:
    def write(mark: bytes) -> None:
        file = TraceFile(path)
        for _ in range(200):
            file.append(mark * 20_000 + b"\n")
        file.close()

    threads = [threading.Thread(target=write, args=(mark,)) for mark in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [line for line in path.read_bytes().splitlines() if line]  # an empty one closes off what was not torn
    assert sorted(set(lines)) == [b"a" * 20_000, b"b" * 20_000] and len(lines) == 400


@pytest.mark.parametrize("trouble", ["a directory", "a parent that is a file", "a pipe"])
def test_a_file_that_cannot_be_is_told(tmp_path: Path, trouble: str) -> None:
    path = tmp_path / "x" / "trace.jsonl"
    if trouble == "a directory":
        path.mkdir(parents=True)
    elif trouble == "a pipe":
        path.parent.mkdir()
        os.mkfifo(path)
    else:
        (tmp_path / "x").write_text("")
    with pytest.raises(StorageError, match=r"trace\.jsonl"):
        TraceFile(path).append(b"a\n")


FULL = """
import resource, signal, sys
from pathlib import Path
from monitor.telemetry.metrics import Metrics
from monitor.telemetry.trace import TraceWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (25, resource.RLIM_INFINITY))
metrics = Metrics()
writer = TraceWriter(Path(sys.argv[1]), metrics)
for _ in range(5):
    writer.put(lambda: b"012345678\\n")
writer.close(10)
print(metrics.registry.get_sample_value("driftpoint_failures_total", {"reason": "upkeep"}))
"""


@pytest.mark.slow
def test_a_disk_that_is_full_ends_the_trace_and_leaves_no_gap(path: Path) -> None:
    command = [sys.executable, "-c", FULL, str(path)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1.0"
    assert path.read_bytes() == b"012345678\n" * 2 + b"01234"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    after = TraceFile(path)
    after.append(b"x\n")
    after.close()
    assert path.read_bytes().splitlines()[2:] == [b"01234", b"x"]


def test_a_line_that_cannot_be_made_ends_the_trace_and_is_told_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bytes:
        raise ValueError("a line that is none")

    metrics = Metrics()
    writer = TraceWriter(path, metrics)
    with caplog.at_level(logging.WARNING, "driftpoint"):
        for make in (lambda: b"a\n", broken, lambda: b"b\n", broken):
            writer.put(make)
        writer.close(10)
    assert path.read_bytes() == b"a\n"
    assert upkeep(metrics) == 1.0
    assert [record.message for record in caplog.records] == [
        "the drift trace of this run ends here, training and saves go on: writing failed: a line that is none"
    ]


def test_a_disk_that_does_not_answer_holds_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def slow() -> bytes:
        answers.wait(180)
        return b"a\n"

    monkeypatch.setattr("monitor.telemetry.trace._BACKLOG", 5)
    metrics = Metrics()
    writer = TraceWriter(path, metrics)
    for _ in range(20):
        writer.put(slow)
    assert upkeep(metrics) == 1.0
    writer.close(0.05)
    answers.set()
    assert upkeep(metrics) == 1.0
