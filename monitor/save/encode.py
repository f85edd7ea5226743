"""Encode and compress fragments; delta bases; zstd level choice.

How hard to pack: chosen for each segment from what packing and the storage were measured to take.

Packing costs time of a core beside training, and saves bytes. A save should be finished well before the next one, so
the hardest packing is taken that keeps a segment within a share of the time between saves. Pure but for its memory.

How each fragment is packed, and the bases that differences are taken to.

A fragment is stored whole once, and then as the difference to that, as long as this pays: with a base of F bytes and
differences that grow as the state moves on, the mean size of a save is least if a new base is made as soon as the
next difference would be larger than the mean so far. The base's encoded bytes stay in host memory.

The background thread asks and writes, one save at a time; the training thread settles a save before the next begins.

From a unit's copies to what its segment holds: encoded and packed while it is written, and what that lost.

A lossy encoding leaves the decoded values where the copies were: they are what a resume would give back, so drift is
measured against them from then on. Background thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from monitor.adapters.module_tensors import dtype_name
from monitor.save.staging import EncodedCopy, EncodingLoss, as_bytes, in_range
from monitor.save.torch_codecs import encoder_named
from store.encoding import CHUNK, Encoding, encoding_named
from store.encoding.base import Bytes
from store.encoding.stream import EncodedEntry, Packing
from store.errors import SaveError
from store.names import BUFFER, FROZEN, RAW, Fragment, SaveId, Unit
from store.segment import StagedFragment

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

    def fits(self, data: EncodedEntry) -> bool:
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
    made: list[tuple[Unit, Fragment, EncodedEntry, list[Bytes]]] = field(default_factory=list)

    def packed(self, unit: Unit, fragment: Fragment, data: EncodedEntry) -> EncodedEntry:
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


_LEAST_SUM = 1e-20
"""Of squares in float32, to which those that vanished add less than float32 tells."""


@dataclass(frozen=True)
class UnitEncoding:
    """A unit's fragments on this rank, ready to be written. lost: complete once they are."""

    fragments: tuple[StagedFragment, ...]
    lossy: bool
    lost: EncodingLoss = field(default_factory=EncodingLoss)


def encode_unit(
    unit: Unit,
    encoding: str,
    fragments: Sequence[Fragment],
    copies: Sequence[torch.Tensor | EncodedCopy],
    packing: SavePacking,
) -> UnitEncoding:
    """What to write for finite ``copies``. Fragments that the encoding cannot hold, or does not apply to, are raw."""
    lost, made = EncodingLoss(), []
    for fragment, staged in zip(fragments, copies, strict=True):
        copy = staged.copy if isinstance(staged, EncodedCopy) else staged
        if isinstance(staged, EncodedCopy) and staged.held:
            chosen, known = staged.encoding, encoding_named(staged.encoding)
            source = EncodedEntry(known, copy.numel(), dtype_name(copy.dtype), staged.chunks)
            lost.error_sq += staged.lost.error_sq
            lost.decoded_sq += staged.lost.decoded_sq
        else:
            chosen = RAW if isinstance(staged, EncodedCopy) else _fitting(encoding, copy)
            source = _encoded(chosen, copy, lost)
            if chosen != encoding:  # it counts in the size of the unit, of which what is lost is a share
                lost.decoded_sq += sum(_squared(piece.float()) for piece in torch.split(copy, CHUNK))
        plain = chosen == RAW and not packing.active
        data = as_bytes(copy) if plain else packing.packed(unit, fragment, source)
        made.append(
            StagedFragment(
                layer=unit.layer,
                slot=unit.slot,
                fqn=fragment.fqn,
                start=fragment.start,
                numel=fragment.numel,
                dtype=dtype_name(copy.dtype),
                encoding=chosen,
                data=data,
            )
        )
    lossy = any(not encoding_named(one.encoding).lossless for one in made)
    return UnitEncoding(tuple(made), lossy, lost)


def _fitting(encoding: str, copy: torch.Tensor) -> str:
    known = encoding_named(encoding)
    if known.lossless or not known.applies(dtype_name(copy.dtype)):
        return RAW
    return encoding if in_range(copy, encoder_named(encoding).unsigned) else RAW


def _encoded(name: str, copy: torch.Tensor, lost: EncodingLoss) -> EncodedEntry:
    encoding = encoding_named(name)
    chunks = partial(_raw_chunks, copy) if encoding.lossless else partial(_lossy_chunks, copy, encoding, lost)
    return EncodedEntry(encoding, copy.numel(), dtype_name(copy.dtype), chunks)


def _raw_chunks(copy: torch.Tensor) -> Iterator[Bytes]:
    data = np.frombuffer(as_bytes(copy), np.uint8)
    step = CHUNK * copy.element_size()
    for start in range(0, data.size, step):
        yield data[start : start + step]


def _lossy_chunks(copy: torch.Tensor, encoding: Encoding, lost: EncodingLoss) -> Iterator[Bytes]:
    encoder = encoder_named(encoding.name)
    scratch = torch.empty(min(CHUNK, copy.numel()), dtype=torch.float32)
    for values in torch.split(copy, CHUNK):
        out = torch.empty(encoding.stored_bytes(values.numel(), "F32"), dtype=torch.uint8)
        decoded = scratch[: values.numel()]
        if not encoder.encode(values, out):  # looked at before; but what it does not vouch for is never committed
            raise SaveError(f"values within reach cannot be stored as {encoding.name}: report this, and store them raw")
        encoder.decode(out, decoded)
        lost.error_sq += _squared(values.sub_(decoded))
        lost.decoded_sq += _squared(decoded)
        values.copy_(decoded)
        yield out.numpy()


def _squared(values: torch.Tensor) -> float:
    """In float32 sums of a cache-sized piece each, added up in float64."""
    return sum(_squared_piece(piece) for piece in torch.split(values, 1 << 14))


def _squared_piece(values: torch.Tensor) -> float:
    quick = float(torch.dot(values, values))
    # Squares below 1e-38 vanish in float32, and above 3e38 there are none: second moments come to the first.
    if _LEAST_SUM < quick < math.inf:
        return quick
    wide = values.double()
    return float(torch.dot(wide, wide))
