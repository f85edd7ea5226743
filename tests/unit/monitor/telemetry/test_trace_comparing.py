"""Background threads compare the decisions of a job for its trace, and training waits for none of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import monitor.telemetry.trace
from monitor.observe.drift_meter import Signature
from monitor.telemetry.drift_history import Compared, DriftHistory
from monitor.telemetry.trace import TraceFile
from store.errors import CollectiveError
from store.trace import MovedLine
from tests.support.internals import tracer_of
from tests.support.jobs import LAYERS, job
from tests.support.traced import distances, only, trained


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def compared_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that compare decisions, in order."""
    seen, add = [], DriftHistory.add

    def noted(history: DriftHistory, step: int, signatures: Sequence[Signature | None]) -> Compared:
        seen.append(threading.current_thread().name)
        return add(history, step, signatures)

    monkeypatch.setattr(DriftHistory, "add", noted)
    return seen


def test_training_does_not_compare(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = compared_by(monkeypatch)
    with job(store) as one:
        one.ckpt.resume()
        for _ in range(4):
            one.step()
            assert tracer_of(one.ckpt)._comparing.join(180)  # type: ignore[union-attr]
    assert len(seen) == 3 and threading.current_thread().name not in seen
    assert [line.step for line in only(store).of(MovedLine)] == [2, 3]


def test_at_most_one_decision_waits_to_be_compared(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training compares where the background does not keep up, so that signatures do not pile up."""
    seen, goes_on, append = compared_by(monkeypatch), threading.Event(), TraceFile.append

    def slow(file: TraceFile, line: bytes, *, job: bool = False) -> None:
        assert goes_on.wait(180)
        append(file, line, job=job)

    def busy() -> Compared:
        assert goes_on.wait(180)
        return Compared((), torch.zeros(0))

    monkeypatch.setattr(TraceFile, "append", slow)
    with job(store) as one:
        one.ckpt.resume()
        tracer_of(one.ckpt)._comparing.submit(busy)  # type: ignore[union-attr]
        for _ in range(6):
            one.step()
        assert seen == [threading.current_thread().name] * 4  # of five; the newest waits
        goes_on.set()
    assert len(seen) == 5 and seen[4] != threading.current_thread().name
    assert [line.step for line in only(store).of(MovedLine)] == list(range(2, 6))


@pytest.mark.parametrize(("where", "name"), [(torch, "stack"), (torch, "zeros"), (monitor.telemetry.trace, "Compared")])
def test_a_comparison_that_lacks_memory_is_made_again(
    where: Any, name: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it fails: no line is missing, since with several ranks the others have begun to sum that one."""
    real, failed = getattr(where, name), list[str]()

    def full(*args: Any, **settings: Any) -> Any:
        thread = threading.current_thread().name
        if thread == "driftpoint-drift" and len(failed) < 3:
            failed.append(thread)
            raise RuntimeError("can't allocate memory")
        return real(*args, **settings)

    with job(store) as one:
        one.ckpt.resume()
        for step in range(6):
            one.step()
            assert tracer_of(one.ckpt)._comparing.join(180)  # type: ignore[union-attr]
            if step == 1:
                monkeypatch.setattr(where, name, full)
    assert failed
    assert [line.step for line in only(store).of(MovedLine)] == list(range(2, 6))


def test_why_a_sum_could_not_begin_is_told(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not that a second attempt finds the rank without its group."""

    class Lost:
        under_way = done = False
        reasons = iter(("rank 1 is gone",))

        def start(self, _: torch.Tensor) -> None:
            raise CollectiveError(next(self.reasons, "this rank has left the collectives"))

        def finish(self) -> None:
            return None

    with job(store) as one:
        one.ckpt.resume()
        tracer_of(one.ckpt)._sum = Lost()  # type: ignore[assignment]
        for _ in range(4):
            one.step()
            assert tracer_of(one.ckpt)._comparing.join(180)  # type: ignore[union-attr]
    assert "rank 1 is gone" in caplog.text and "has left" not in caplog.text


def test_a_slow_disk_does_not_keep_signatures_waiting(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, goes_on, append = compared_by(monkeypatch), threading.Event(), TraceFile.append

    def slow(file: TraceFile, line: bytes, *, job: bool = False) -> None:
        assert goes_on.wait(180)
        append(file, line, job=job)

    monkeypatch.setattr(TraceFile, "append", slow)
    with job(store) as one:
        _, states = trained(one, 8)
        assert tracer_of(one.ckpt)._comparing.join(180)  # type: ignore[union-attr]
        assert threading.current_thread().name not in seen and len(seen) == 7
        goes_on.set()
    lines = only(store).of(MovedLine)
    assert [line.step for line in lines] == list(range(2, 8))
    for line in lines:
        for then, ratios in line.since.items():
            true = distances(states[line.step], states[then], LAYERS)
            found = {unit: ratio for unit, ratio in zip(only(store).units, ratios, strict=True) if ratio is not None}
            assert found == {unit: pytest.approx(true[unit], rel=0.06) for unit in found} and found
