"""The level that ``packing: auto`` takes: up while it fits between two saves and makes anything smaller, and down."""

from __future__ import annotations

from dataclasses import dataclass, field

from monitor.save.encode import LEVELS, SHARE, LevelChooser

NBYTES = 1_000_000_000


@dataclass
class Machine:
    """Where saves of NBYTES come every ``interval`` seconds. seconds, left: of a byte at each level."""

    interval: float
    write: float = 1e-9
    seconds: dict[int | None, float] = field(default_factory=lambda: {None: 0.3e-9, 1: 1e-9, 3: 3e-9, 6: 9e-9})
    left: dict[int | None, float] = field(default_factory=lambda: {None: 1.0, 1: 0.7, 3: 0.65, 6: 0.6})
    chooser: LevelChooser = field(default_factory=LevelChooser)

    def saves(self, count: int) -> list[int | None]:
        """The levels of the next saves."""
        return [self._save() for _ in range(count)]

    def _save(self) -> int | None:
        level = self.chooser.level(NBYTES, self.interval)
        written = int(self.left[level] * NBYTES)
        self.chooser.learn(level, NBYTES, written, self.seconds[level] * NBYTES, self.write * written)
        return level

    def takes(self, level: int | None) -> float:
        return NBYTES * (self.seconds[level] + self.left[level] * self.write)


def test_nothing_is_packed_before_anything_is_known() -> None:
    chooser = LevelChooser()
    assert chooser.level(NBYTES, None) is None
    assert chooser.level(NBYTES, 100.0) is None  # nothing was measured yet
    chooser.learn(None, NBYTES, NBYTES, 0.3, 1.0)
    assert chooser.level(NBYTES, None) is None


def test_it_goes_up_a_level_at_a_time_to_the_hardest_that_fits() -> None:
    assert Machine(interval=1000).saves(6) == [None, 1, 3, 6, 6, 6]


def test_what_does_not_fit_between_two_saves_is_never_taken() -> None:
    for interval in (1.0, 2.5, 3.5, 8.0, 25.0):
        machine = Machine(interval)
        taken = machine.saves(12)[6:]
        assert len(set(taken)) == 1, (interval, taken)  # it settles
        assert machine.takes(taken[0]) <= SHARE * interval or taken[0] is None
        harder = LEVELS[LEVELS.index(taken[0]) + 1 :]
        assert not harder or 3 * machine.takes(harder[0]) > SHARE * interval


def test_one_that_took_longer_than_thought_is_left_again() -> None:
    machine = Machine(interval=10, seconds={None: 0.3e-9, 1: 1e-9, 3: 50e-9, 6: 90e-9})
    assert machine.saves(6) == [None, 1, 3, 1, 1, 1]


def test_saves_that_come_more_often_bring_it_down_and_fewer_up_again() -> None:
    machine = Machine(interval=1000)
    assert machine.saves(4)[-1] == 6
    machine.interval = 4.0
    assert machine.saves(2) == [1, 1]
    machine.interval = 1.0
    assert machine.saves(2) == [None, None]
    machine.interval = 1000
    assert machine.saves(2) == [6, 6]  # all of them are known by now


def test_a_harder_level_that_makes_nothing_smaller_is_left() -> None:
    machine = Machine(interval=1000, left={None: 1.0, 1: 0.7, 3: 0.699, 6: 0.6})
    assert machine.saves(5) == [None, 1, 3, 1, 1]
    assert Machine(interval=1000, left=dict.fromkeys(LEVELS, 1.0)).saves(4) == [None, 1, None, None]


def test_where_nothing_fits_the_one_that_is_done_first_is_taken() -> None:
    assert Machine(interval=0.5).saves(4) == [None, None, None, None]
    slow = Machine(interval=4.0, write=50e-9, left={None: 1.0, 1: 0.7, 3: 0.69, 6: 0.6})
    assert slow.takes(None) > slow.takes(3) > slow.takes(1) > SHARE * slow.interval
    assert slow.saves(5) == [None, 1, 3, 1, 1]


def test_an_empty_segment_teaches_nothing() -> None:
    chooser = LevelChooser()
    chooser.learn(None, 0, 0, 0.0, 0.0)
    assert chooser.level(NBYTES, 1000.0) is None
