"""How each fragment is packed, and the bases that differences are taken to.

A fragment is stored whole once, and then as the difference to that, as long as this pays: with a base of F bytes and
differences that grow as the state moves on, the mean size of a save is least if a new base is made as soon as the
next difference would be larger than the mean so far. The base's encoded bytes stay in host memory.

The background thread asks and writes, one save at a time; the training thread settles a save before the next begins.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from monitor.levels import LevelChooser
from store.encoding.base import Bytes
from store.encoding.stream import Packing
from store.names import BUFFER, FROZEN, Fragment, SaveId, Unit
from store.packed import Encoded

_REST = 16
"""Saves for which a fragment is left alone after differences did not pay."""

LIFE = 16
"""Differences that are taken to one base at most. Damage of a base costs all that rests on it; so what does is bounded,
at the cost of a sixteenth of a whole save for each."""

_PAYS = 0.9
"""A first difference that is larger than this share of its base did not pay."""

Setting = Literal["auto", "none"] | int


@dataclass
class _Base:
    """chunks: as encoded. full: its packed bytes. spent, count, last: of the differences to it so far."""

    save: str
    encoding: str
    dtype: str
    chunks: tuple[Bytes, ...]
    full: int
    spent: int = 0
    count: int = 0
    last: int = 0
    growth: int = 0

    def fits(self, data: Encoded) -> bool:
        return (self.encoding, self.dtype) == (data.encoding.name, data.dtype)

    def pays(self) -> bool:
        """Whether the next difference is expected to be no larger than the mean save so far."""
        smaller = self.last + max(0, self.growth) <= (self.full + self.spent) / (1 + self.count)
        return smaller and self.count < LIFE

    def note(self, nbytes: int) -> None:
        self.growth = nbytes - self.last if self.count else 0
        self.spent, self.count, self.last = self.spent + nbytes, self.count + 1, nbytes


@dataclass
class SavePacking:
    """The packing of one save. level: zstd's, None to leave it. made: what became of the fragments, once written.

    active: False where nothing is ever packed, so that nobody need watch how it goes. lasting: False for a save out of
    turn, whose encodings are no base for the next."""

    save: SaveId
    active: bool
    level: int | None
    differences: bool
    bases: dict[Fragment, _Base]
    resting: frozenset[Fragment]
    lasting: bool = True
    made: list[tuple[Unit, Fragment, Encoded, list[Bytes]]] = field(default_factory=list)

    def packed(self, unit: Unit, fragment: Fragment, data: Encoded) -> Encoded:
        """How to write ``data``."""
        keep: list[Bytes] = []
        if self.level is not None:
            base = self.bases.get(fragment) if self.differences else None
            if base is not None and base.fits(data) and base.pays():
                data.packing, data.base = Packing(self.level, base.chunks), base.save
            else:
                data.packing = Packing(self.level)
                moving = unit.slot not in (FROZEN, BUFFER)  # what stands still is stored once
                if self.differences and self.lasting and moving and fragment not in self.resting:
                    data.chunks = _kept(data.chunks, keep)
        self.made.append((unit, fragment, data, keep))
        return data


class Packer:
    """Packs the saves of one rank. level: zstd's; ``auto`` chooses it, ``none`` packs nothing."""

    def __init__(self, level: Setting, differences: bool) -> None:
        self._level = level
        self._differences = differences
        self._bases: dict[Fragment, _Base] = {}
        self._resting: dict[Fragment, int] = {}
        self._chooser = LevelChooser()

    @property
    def memory_bytes(self) -> int:
        """Bytes held for bases."""
        return sum(chunk.nbytes for base in self._bases.values() for chunk in base.chunks)

    def begin(self, save: SaveId, nbytes: int, interval: float | None, lasting: bool = True) -> SavePacking:
        """The packing of a save of about ``nbytes``. interval: seconds between the last two saves. lasting: False for
        a save that somebody asked for."""
        level = self._chooser.level(nbytes, interval) if self._level == "auto" else self._level
        chosen = None if level == "none" else level
        return SavePacking(
            save, self._level != "none", chosen, self._differences, self._bases, frozenset(self._resting), lasting
        )

    def settle(self, done: SavePacking, seconds: float, moved: Callable[[Unit], bool], reached: Container[str]) -> None:
        """A save is over. seconds: what the segment took, 0 where it broke off. moved: whether a unit's version is now
        that of this save. reached: the saves that the newest commit rests on; the others may be gone any time."""
        if seconds > 0.0:
            self._learn(done, seconds)
        for fragment in [one for one, left in self._resting.items() if left <= 1]:
            del self._resting[fragment]
        self._resting = {fragment: left - 1 for fragment, left in self._resting.items()}
        for unit, fragment, data, keep in done.made:
            if not moved(unit):
                continue
            if data.base is not None:
                self._differed(fragment, data.written)
            elif keep:
                self._bases[fragment] = _Base(done.save.name, data.encoding.name, data.dtype, tuple(keep), data.written)
            else:
                self._bases.pop(fragment, None)
        self._bases = {fragment: base for fragment, base in self._bases.items() if base.save in reached}

    def reset(self) -> None:
        """Take no differences to what was saved before: the job went back, perhaps because that is damaged."""
        self._bases = {}
        self._resting = {}

    def _learn(self, done: SavePacking, seconds: float) -> None:
        made = [data for _, _, data, _ in done.made]
        nbytes = sum(data.encoding.stored_bytes(data.numel, data.dtype) for data in made)
        making = sum(data.seconds for data in made)
        self._chooser.learn(done.level, nbytes, sum(data.written for data in made), making, max(0.0, seconds - making))

    def _differed(self, fragment: Fragment, nbytes: int) -> None:
        base = self._bases.get(fragment)
        if base is None:
            return  # the job went back while this was written
        base.note(nbytes)
        if base.count == 1 and nbytes > _PAYS * base.full:
            del self._bases[fragment]
            self._resting[fragment] = _REST


def _kept(chunks: Callable[[], Iterable[Bytes]], keep: list[Bytes]) -> Callable[[], Iterable[Bytes]]:
    """The same chunks, a copy of each put aside: some are views of copies that are used again."""

    def keeping() -> Iterator[Bytes]:
        keep.clear()
        for chunk in chunks():
            keep.append(chunk.copy())
            yield chunk

    return keeping
