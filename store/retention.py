"""Which commits to keep: the last few, every N steps, and ever sparser ones further back. Pure.

Silent corruption is found late, so ages are covered in powers of two. The newest proven commit always stays. Suspects
count as little as if they were not there, but for the newest commit of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from store.errors import ConfigError
from store.names import SaveId


@dataclass(frozen=True)
class Retention:
    """keep_last: newest commits to keep, at least 1. keep_every: also one in each stretch of so many steps.

    log_spaced: also the oldest in each age range [2^i, 2^(i+1)) steps behind the newest commit.
    """

    keep_last: int = 3
    keep_every: int | None = None
    log_spaced: bool = True

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ConfigError(f"retention.keep_last is {self.keep_last}: at least 1 commit must stay")
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"retention.keep_every is {self.keep_every}: give a number of steps, or leave it out")


def kept(
    saves: Iterable[SaveId], proven: Set[SaveId], retention: Retention, suspects: Set[SaveId] = frozenset()
) -> set[SaveId]:
    """The commits to keep of those given. All must be whole: a damaged one must not push out a good one.

    Nor may a suspect: whatever is kept is chosen among the others, and the newest commit stays besides."""
    everything = sorted(saves, reverse=True)
    newest_first = [save for save in everything if save not in suspects] or everything
    keep = {*everything[:1], *newest_first[: retention.keep_last]}
    keep.update(sorted(proven & set(newest_first), reverse=True)[:1])
    if retention.keep_every is not None:
        keep |= _oldest_in_each(newest_first, [save.step // retention.keep_every for save in newest_first])
    if retention.log_spaced and newest_first:
        newest = newest_first[0].step
        keep |= _oldest_in_each(newest_first, [abs(newest - save.step).bit_length() for save in newest_first])
    return keep


def _oldest_in_each(newest_first: Sequence[SaveId], buckets: Sequence[int]) -> set[SaveId]:
    return set(dict(zip(buckets, newest_first, strict=True)).values())
