"""How hard to pack: chosen for each segment from what packing and the storage were measured to take.

Packing costs time of a core beside training, and saves bytes. A save should be finished well before the next one, so
the hardest packing is taken that keeps a segment within a share of the time between saves. Pure but for its memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

LEVELS: tuple[int | None, ...] = (None, 1, 3, 6)
"""zstd levels, from none to hard. Above 6 byte planes of training state get no smaller worth the time."""

SHARE = 0.5
"""Of the time between two saves that a segment may take."""


@dataclass
class _Seen:
    """What a level did last: seconds of work and bytes left, a byte of encoded state."""

    seconds: float
    left: float


@dataclass
class LevelChooser:
    """The level of the next segment on one rank."""

    _seen: dict[int | None, _Seen] = field(default_factory=dict)
    _write_seconds: float = 0.0

    def learn(self, level: int | None, nbytes: int, written: int, made_seconds: float, write_seconds: float) -> None:
        """A segment of ``nbytes`` encoded bytes came to ``written``; making and writing them took so many seconds."""
        if nbytes and written:
            self._seen[level] = _Seen(made_seconds / nbytes, written / nbytes)
            self._write_seconds = write_seconds / written

    def level(self, nbytes: int, interval: float | None) -> int | None:
        """For a segment of ``nbytes`` encoded bytes. interval: seconds between saves, None where not known yet.

        Goes up one level at a time, and only to one that is expected to fit, or at least to be done sooner: where the
        storage is slow, packing is. What was seen to do neither is left."""
        best = LEVELS[0]
        if interval is None or best not in self._seen:
            return best
        for easier, level in pairwise(LEVELS):
            seen = self._seen.get(level)
            # Each level takes about three times the one before, for a tenth: a guess, replaced once it was tried.
            guess = _Seen(max(3 * self._seen[easier].seconds, 3e-9), 0.9 * self._seen[easier].left)
            if self._takes(seen or guess, nbytes) > max(SHARE * interval, self._takes(self._seen[easier], nbytes)):
                break
            if seen is not None and seen.left > 0.99 * self._seen[easier].left:
                break  # harder, but no smaller
            best = level
            if seen is None:
                break
        return best

    def _takes(self, seen: _Seen, nbytes: int) -> float:
        return nbytes * (seen.seconds + seen.left * self._write_seconds)
