"""Lines of a drift trace: what is written is read to the bit, and what cannot be read is skipped and counted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.telemetry.trace import to_line
from store.trace import (
    CommitLine,
    DecisionLine,
    FailedLine,
    JobLine,
    Line,
    MovedLine,
    ResumedLine,
    TracedUnit,
    incarnations,
    read_lines,
)

UNIT = TracedUnit(layer="layers.0", slot="fp32", position=0, block=True, nbytes=64, numel=16, moving=True)


def begun(started: float, *units: TracedUnit) -> JobLine:
    return JobLine(
        started=started, epoch=1, framework="torch", world_size=2, policy="full", settings={"every": 10}, units=units
    )


JOB = begun(17.25, UNIT)
COMMIT = CommitLine(step=1, seconds=1.5, took=0.1, written=99, sizes={0: (64, "raw", 0.0, None)})
LINES: list[Line] = [
    JOB,
    DecisionLine(step=1, seconds=1.0, commits=0, saved={0: "raw"}, drift=(None,), staleness=(None,), error=(0.0,)),
    MovedLine(step=2, since={1: (0.1,), 0: (None,)}),
    COMMIT,
    FailedLine(step=2, seconds=2.0, reason="StorageError"),
    ResumedLine(step=1, newest=2, seconds=3.0),
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.kind)
def test_what_is_written_is_read(line: Line) -> None:
    data = to_line(line)
    assert data.count(b"\n") == 1 and data.endswith(b"\n")
    assert read_lines([data]).lines == (line,)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_read_to_the_bit(value: float) -> None:
    line = DecisionLine(step=1, seconds=0.0, commits=0, offered=value, drift=(value,))
    (found,) = read_lines([to_line(line)]).lines
    assert isinstance(found, DecisionLine)
    assert (found.offered, found.drift) == (value, (value,))


@given(st.integers(0, 2000))
def test_a_line_torn_anywhere_costs_itself_only(cut: int) -> None:
    torn = to_line(JOB)[: cut % (len(to_line(JOB)) - 2)]
    trace = read_lines([*map(to_line, LINES), torn + b"\n", to_line(COMMIT)])
    assert trace.lines == (*LINES, COMMIT)
    assert trace.skipped == bool(torn)


@pytest.mark.parametrize("raw", [b"[]", b"3", b'{"kind":"later"}', b'{"kind":"moved"}', b"\xff", b'{"kind":[]}'])
def test_what_is_of_no_kind_known_is_skipped(raw: bytes) -> None:
    assert (read_lines([raw]).lines, read_lines([raw]).skipped) == ((), 1)


def test_what_a_later_release_adds_to_a_line_is_left_out() -> None:
    values = json.loads(to_line(COMMIT)) | {"colour": "red"}
    assert read_lines([json.dumps(values).encode()]).lines == (COMMIT,)


def test_incarnations_begin_with_their_units() -> None:
    resumed, moved = LINES[5], LINES[2]
    lines = [COMMIT, begun(1.0), resumed, begun(1.0, UNIT), COMMIT, begun(1.0, UNIT, UNIT), moved, begun(2.0), resumed]
    found = list(incarnations(read_lines(map(to_line, lines))))
    assert found == [
        (begun(1.0, UNIT), (resumed, COMMIT)),
        (begun(1.0, UNIT, UNIT), (moved,)),
        (begun(2.0), (resumed,)),
    ]


def test_an_incarnation_that_died_before_its_units_were_known_keeps_its_lines() -> None:
    lines = [begun(1.0), LINES[5], begun(2.0, UNIT), COMMIT]
    found = list(incarnations(read_lines(map(to_line, lines))))
    assert found == [(begun(1.0), (LINES[5],)), (begun(2.0, UNIT), (COMMIT,))]
