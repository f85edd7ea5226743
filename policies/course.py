"""What the store of a replay held, stretch by stretch, and what a failure finds from some moment on.

Configurations are compared from one moment on, alike for all: what came before the first commit of the latest of them
would count for some only. Pure; it does not know how versions came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from policies.exposure import Exposed, Exposure, Held
from policies.movement import Movement
from store.trace import TracedUnit

Position = tuple[int, float]
"""A moment of a run: number of the era, and step. Steps alone go back where a job resumes."""


@dataclass(frozen=True)
class Stretch:
    """From step ``begin`` to ``end`` of an era the store held this; None: no commit."""

    era: int
    begin: float
    end: float
    held: Held | None


@dataclass(frozen=True)
class Course:
    """A whole replay. eras: units of each, and how they moved. stretches: in order, without gaps within an era."""

    eras: Sequence[tuple[Sequence[TracedUnit], Movement]]
    stretches: Sequence[Stretch]

    @property
    def first(self) -> Position | None:
        """Since when there is a commit. None: there never is."""
        return next(((one.era, one.begin) for one in self.stretches if one.held is not None), None)

    @property
    def end(self) -> Position:
        """The last recorded decision."""
        return (self.stretches[-1].era, self.stretches[-1].end) if self.stretches else (0, 0.0)

    def steps(self, since: Position | None = None) -> float:
        """Steps of training from ``since`` on; None: all of them."""
        return sum(one.end - one.begin for one in self._after(since))

    def exposure(self, since: Position | None = None) -> Exposure:
        """What a failure finds from ``since`` on; steps without a commit are counted over the whole of it."""
        sums = Exposure()
        adding: dict[int, Exposed] = {}
        for one in self._after(since):
            if one.held is None:
                continue
            if one.era not in adding:
                adding[one.era] = Exposed(*self.eras[one.era], sums)
            adding[one.era].between(one.begin, one.end, one.held)
        sums.unprotected = sum(one.end - one.begin for one in self.stretches if one.held is None)
        return sums

    def _after(self, since: Position | None) -> Iterable[Stretch]:
        for one in self.stretches:
            begin = one.begin if since is None or one.era > since[0] else max(one.begin, since[1])
            if (since is None or one.era >= since[0]) and begin < one.end:
                yield Stretch(one.era, begin, one.end, one.held)


def latest_first(courses: Iterable[Course]) -> Position | None:
    """Since when all of those that ever commit have a commit. None: none does."""
    return max((one.first for one in courses if one.first is not None), default=None)
