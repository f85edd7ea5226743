"""How often a version is kept, by what it costs."""

from __future__ import annotations

import pytest

from monitor.decide.schedule import FIRST_SNAPSHOT, SnapshotSchedule


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def learned(stall: float, work: float, sends: float = 0.0) -> int:
    """Steps of a second each between versions, once they were seen to cost so many seconds."""
    clock = Clock()
    pace = SnapshotSchedule("auto", 0.02, clock)
    assert pace.wanted() == FIRST_SNAPSHOT
    for step in range(0, 60, FIRST_SNAPSHOT):
        pace.agreed(step, FIRST_SNAPSHOT)
        pace.stalled(stall)
        pace.took(work)
        if sends:
            pace.sent(sends)
        clock.now += FIRST_SNAPSHOT
    return pace.wanted()


@pytest.mark.parametrize(
    ("stall", "work", "sends", "wanted"),
    [
        (0.01, 0.1, 0.0, 1),
        (0.4, 0.1, 0.0, 20),  # training waits for 2 %
        (0.01, 10.0, 0.0, 40),  # the background thread has three quarters of the time for itself
        (0.01, 0.1, 15.0, 30),  # and a version is on its way half of it
        (0.4, 10.0, 15.0, 40),
    ],
)
def test_the_dearest_of_what_it_costs_sets_the_pace(stall: float, work: float, sends: float, wanted: int) -> None:
    assert learned(stall, work, sends) == wanted


@pytest.mark.parametrize("every", [1, 3])
def test_steps_that_are_counted_anew_do_not_put_versions_off(every: int) -> None:
    """As after an engine has loaded an earlier checkpoint of its own."""
    pace = SnapshotSchedule(every, 0.02)
    for step in range(1, 40):
        if pace.due(step):
            pace.agreed(step, every)
    assert [step for step in range(5, 12) if pace.due(step) and pace.agreed(step, every) is None] == [
        step for step in range(5, 12) if step % every == 0
    ]
