"""Real signals to this very process: noted once, passed on where they are not to be noted, and given back."""

from __future__ import annotations

import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from weakref import WeakSet

import pytest

import monitor
from monitor import preemption
from monitor.config.load import load_config
from monitor.preemption import ECHO, SignalWatcher, deadline, with_scheduler
from store.errors import ConfigError
from tests.support.jobs import Job

USR1 = signal.SIGUSR1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody listens at first: a job of another test, which was not closed, may still be in this process."""
    monkeypatch.setattr(preemption, "_watchers", defaultdict(WeakSet))
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (USR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_moment_counts() -> None:
    clock = Clock()
    one = SignalWatcher(["SIGUSR1", "SIGUSR2"], clock)
    assert one.first is None
    for number in (USR1, signal.SIGUSR2, USR1):
        signal.raise_signal(number)
        clock.now += ECHO / 4
    assert one.first == 100.0
    one.close()
    assert signal.getsignal(USR1) == signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_a_handler_of_the_user_stays(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    signal.signal(USR1, own)
    one = SignalWatcher(["SIGUSR1"])
    assert "SIGUSR1 already has a handler" in caplog.text
    signal.raise_signal(USR1)
    assert (heard, one.first) == ([USR1], None)
    one.close()
    assert signal.getsignal(USR1) is own


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(USR1, signal.SIG_IGN)
    one = SignalWatcher(["SIGUSR1"])
    signal.raise_signal(USR1)
    assert one.first is None and signal.getsignal(USR1) == signal.SIG_IGN


def test_a_handler_that_came_later_is_left_alone() -> None:
    one = SignalWatcher(["SIGUSR1"])
    later = signal.SIG_IGN
    signal.signal(USR1, later)
    one.close()
    assert signal.getsignal(USR1) == later


def test_two_in_one_process_both_hear_of_it_in_whatever_order_they_close() -> None:
    first, second = SignalWatcher(["SIGUSR1"]), SignalWatcher(["SIGUSR1"])
    signal.raise_signal(USR1)
    assert first.first is not None and second.first is not None
    first.close()  # not on top: its handler stays below, and passes on
    second.close()
    third = SignalWatcher(["SIGUSR1"])
    signal.raise_signal(USR1)
    assert third.first is not None
    third.close()


def test_it_is_not_kept_alive_by_its_handlers() -> None:
    below, one = SignalWatcher(["SIGUSR1"]), SignalWatcher(["SIGUSR1"])
    del one
    signal.raise_signal(USR1)
    assert below.first is not None
    below.close()


def _ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _handled() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: None)


@pytest.mark.parametrize(
    ("settings", "ranks", "before", "heeded"),
    [
        ({}, 1, None, (["SIGUSR1", "SIGTERM"], 25.0)),
        ({"grace_seconds": 90}, 1, None, (["SIGUSR1", "SIGTERM"], 90.0)),
        ({"signals": ["SIGUSR1"]}, 1, None, None),
        ({"signals": []}, 1, None, None),
        ({}, 2, None, None),
        ({}, 1, _handled, None),
        ({}, 1, _ignored, None),
    ],
)
@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"])
def test_sigterm_is_heeded_where_only_the_scheduler_sends_it(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    settings: dict[str, object],
    ranks: int,
    before: Callable[[], None] | None,
    heeded: tuple[list[str], float] | None,
) -> None:
    given = load_config({"preemption": settings}).preemption
    was = signal.getsignal(signal.SIGTERM)
    try:
        if before is not None:
            before()
        assert with_scheduler(given, ranks) == (given, None)
        monkeypatch.setenv(variable, "12")
        found, scheduler = with_scheduler(given, ranks)
    finally:
        signal.signal(signal.SIGTERM, was)
    if heeded is None:
        assert (found, scheduler) == (given, None)
    else:
        assert (found.signals, found.grace_seconds) == heeded and scheduler in ("Slurm", "Kubernetes")


def test_the_sigterm_of_a_supervisor_whose_grace_is_over_ends_the_process() -> None:
    """``driftpoint run`` sends SIGUSR1, and SIGTERM after its grace period."""
    clock = Clock()
    one = SignalWatcher(["SIGUSR1", "SIGTERM"], clock, ends=signal.SIGTERM)
    signal.raise_signal(USR1)
    assert one.heard(signal.SIGTERM), "an echo"
    clock.now += 2 * ECHO
    assert not one.heard(signal.SIGTERM)
    other = SignalWatcher(["SIGUSR1", "SIGTERM"], clock)
    signal.raise_signal(USR1)
    clock.now += 2 * ECHO
    assert other.heard(signal.SIGTERM), "where both are set, each is heeded"
    other.close()
    one.close()


def test_outside_the_main_thread_there_is_a_way_by_hand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made: list[Job] = []
    thread = threading.Thread(target=lambda: made.append(Job(tmp_path / "store", every=100)))
    thread.start()
    thread.join()
    (job,) = made
    assert "not called in the main thread" in caplog.text
    assert signal.getsignal(USR1) == signal.SIG_DFL
    assert job.step() is None
    asking = threading.Thread(target=job.ckpt.preempt)
    asking.start()
    asking.join()
    with pytest.raises(monitor.Preempted) as left:
        job.step()
    assert left.value.code == 75
    assert left.value.report.preempted and left.value.report.step == 2
    assert job.ckpt.preempted and job.metric("driftpoint_preemptions_total", outcome="full") == 1


def test_a_loop_that_goes_on_saves_as_ever(tmp_path: Path) -> None:
    job = Job(tmp_path / "store", every=2, preemption={"exit": False})
    signal.raise_signal(USR1)
    reports = [job.step() for _ in range(4)]
    assert [report is not None and report.preempted for report in reports] == [True, False, False, False]
    assert [report.step for report in reports if report is not None] == [1, 2, 4]
    job.ckpt.close()
    assert signal.getsignal(USR1) == signal.SIG_DFL


def test_switched_off_there_is_nothing_to_announce(tmp_path: Path) -> None:
    job = Job(tmp_path / "store", preemption={"signals": []})
    with pytest.raises(ConfigError, match="preemption is off"):
        job.ckpt.preempt()
    job.ckpt.close()


def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    """Health comes before haste: the versions before stay, whatever the deadline is."""
    job = Job(tmp_path / "store", every=1)
    job.step()
    job.model.head.weight.data.fill_(float("nan"))
    job.ckpt.preempt()
    with pytest.raises(monitor.Preempted):
        job.ckpt.step()
    assert job.metric("driftpoint_preemptions_total", outcome="part") == 1
    other = Job(tmp_path / "store")
    assert other.ckpt.resume() == 2
    assert all(tensor.isfinite().all() for tensor in other.weights().values())
    other.ckpt.close()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"signals": ["SIGUSR9"]}, "preemption.signals: unknown 'SIGUSR9': did you mean 'SIGUSR"),
        ({"signals": ["USR1"]}, "did you mean 'SIGUSR1'?"),
        ({"signals": ["SIGKILL"]}, "preemption.signals: unknown 'SIGKILL'"),
        ({"signals": "SIGUSR1"}, "preemption.signals"),
        ({"grace_seconds": 0}, "preemption.grace_seconds"),
        ({"grace": 3}, "did you mean 'grace_seconds'?"),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config({"preemption": settings})
    assert told in str(refused.value)


def test_a_part_of_the_grace_is_kept_for_leaving() -> None:
    for grace, kept in ((30.0, 1.5), (2.0, 0.2)):
        one = deadline(grace, passed=1.0)
        assert one.end - one.at == pytest.approx(kept)
        assert one.end - one.heard == pytest.approx(grace)
        assert 0.0 < one.left <= grace - kept - 1.0
    late = deadline(2.0, passed=60.0)
    assert late.left == 0.0 < late.to_leave
