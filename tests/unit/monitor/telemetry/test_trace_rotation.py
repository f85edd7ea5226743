"""A trace file that is full is renamed, and the next one can be read alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.report.history import read_history
from deploy.simulate.simulation import read_trace
from monitor.telemetry.trace import TraceFile
from policies.replay.recorded_run import run_of
from store.errors import StorageError
from store.trace import DecisionLine, JobLine, rotated_path
from tests.support.internals import tracer_of
from tests.support.jobs import job
from tests.support.traced import trace_of, traced


def test_two_files_of_a_job_hold_its_newest_decisions(tmp_path: Path) -> None:
    path = tmp_path / "store.trace.jsonl"
    with job(tmp_path / "store", every=1) as one:
        one.step()
        writer = tracer_of(one.ckpt)._writer
        assert writer is not None
        writer._file._most = 20_000
        for _ in range(30):
            one.step()
    full = rotated_path(path)
    assert full.stat().st_size <= 20_000 and path.stat().st_size <= 20_000
    assert sorted(file.name for file in tmp_path.glob("*.jsonl*")) == [path.name, full.name]
    for file in (full, path):
        trace = trace_of(file)
        assert trace.skipped == 0 and isinstance(trace.lines[0], JobLine) and trace.lines[0].units
    found = [line.step for file in (full, path) for part in traced(file) for line in part.of(DecisionLine)]
    assert found == list(range(found[0], 32)) and len(found) > 5
    (replayed,) = run_of(read_trace(path)).segments
    assert [decision.line.step for decision in replayed.decisions] == found, "one incarnation, through both files"
    history = read_history(path)
    assert history.totals.incarnations == 1 and history.skipped == 0 and not history.restarts
    assert history.job_status is not None and history.job_status.newest is not None
    assert history.job_status.newest.step == 31 and len(history.job_status.saves) > 1


def test_a_full_file_of_an_earlier_job_is_renamed_by_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"x" * 90 + b"\n")
    file = TraceFile(path, most=100)
    file.append(b"job 1234567\n", job=True)
    file.append(b"a decision\n")
    file.close()
    assert rotated_path(path).read_bytes() == b"x" * 90 + b"\n"
    assert path.read_bytes() == b"job 1234567\na decision\n"


def test_a_job_line_longer_than_a_file_does_not_fill_one_at_each_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    file = TraceFile(path, most=10)
    file.append(b"job 1234567\n", job=True)
    for text in (b"a\n", b"b\n", b"c\n"):
        file.append(text)
    file.close()
    assert path.read_bytes() == b"job 1234567\na\nb\nc\n"


def test_a_file_that_cannot_be_renamed_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    (rotated_path(path) / "in the way").mkdir(parents=True)
    file = TraceFile(path, most=10)
    file.append(b"123456789\n")
    with pytest.raises(StorageError, match="cannot write"):
        file.append(b"123456789\n")
    file.close()
