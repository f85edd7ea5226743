"""Which lines of a trace make sense: a trace is a plain file, and anybody may have written into it.

What a line says may be wrong; but it must not be able to stop whoever reads it. Numbers are finite and within bounds,
lists are as long as they should be. What does not hold counts as a line that cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from store.trace import CommitLine, DecisionLine, FailedLine, JobLine, Line, ResumedLine

_LATEST = 253_000_000_000.0
"""Seconds since 1970 that a calendar has."""

_MOST = float(1 << 60)
"""Steps, bytes, seconds."""


class Sceptic:
    """Told the lines of one trace in their order."""

    def __init__(self) -> None:
        self._units = 0

    def believe(self, lines: Iterable[Line | None]) -> Iterator[Line | None]:
        """The same, None for each line that makes no sense."""
        for line in lines:
            if line is None or not _sensible(line, self._units):
                yield None
                continue
            if isinstance(line, JobLine):
                self._units = len(line.units)
            yield line


def _sensible(line: Line, units: int) -> bool:
    if isinstance(line, JobLine):
        return _within((line.started, line.seconds), _LATEST) and _within(_sizes(line), _MOST)
    if isinstance(line, DecisionLine):
        named = (*line.saved, *line.sick, *line.changed)
        right = len(line.drift) in (0, units) and all(0 <= index < units for index in named)
        return right and _within((line.step, line.seconds, line.stall, line.copy_wait, line.interval or 0), _MOST)
    if isinstance(line, CommitLine):
        sizes = (size[0] for size in line.sizes.values())
        right = all(0 <= index < units for index in line.sizes)
        return right and _within((line.step, line.seconds, line.took, line.written, *sizes), _MOST)
    if isinstance(line, FailedLine):
        return _within((line.step, line.seconds), _MOST)
    return not isinstance(line, ResumedLine) or _within((line.step, line.newest, line.seconds), _MOST)


def _sizes(line: JobLine) -> Iterator[int]:
    for unit in line.units:
        yield unit.nbytes
        yield abs(unit.position)


def _within(numbers: Iterable[float], most: float) -> bool:
    """Not of what is no number, either."""
    return all(0 <= number <= most for number in numbers)
