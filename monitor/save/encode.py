"""Encode and compress the fragments of a save, also as deltas to earlier saves.

A fragment is stored whole once, and then as deltas. In a lossy encoding each is taken to the save before, in chains of
a number of saves; the next chain begins with a delta to the whole, and after a few chains, or one on the first whole of
a process, the fragment is stored whole again. In a lossless encoding all deltas are taken to the whole, as long as the
next one is expected to be no larger than the mean save so far. docs/encodings.md has the reasons. The encoded bytes of
the whole, and of the newest save of a chain, stay in host memory.

A segment's zstd level is the highest whose measured writing time stays within a share of the time between saves. The
background thread encodes, one save at a time; the training thread settles a save before the next one begins."""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from msgspec import Struct

from monitor.adapters.module_tensors import as_bytes, dtype_name
from monitor.observe.drift_meter import Signature
from monitor.observe.units import UnitLayout
from monitor.save.torch_codecs import EncodedCopy, EncodingLoss, encoder_named, in_range
from store.encoding import BF16, BF16_SCALED, CHUNK, Encoding, encoding_named
from store.encoding.base import Bytes
from store.encoding.bfloat16 import LEAST
from store.encoding.compression import FEW
from store.encoding.stream import EncodedEntry, Packing
from store.errors import SaveError
from store.names import BUFFER, FROZEN, RAW, Fragment, SaveId, Unit
from store.schema import MeasureRecord
from store.segment import Data, StagedFragment

LEVELS: tuple[int | None, ...] = (None, 1, 3, 6)
"""zstd levels in rising order. Above 6, byte planes of training state hardly get smaller for the time it takes."""

SHARE = 0.5  # share of the time between two saves that writing a segment may take

LIFE = 12  # most deltas that a version needs
CHAINS = 4  # most chains that begin at one whole, unless it is the first
LOSSLESS_LIFE = 16  # most deltas to one whole in a lossless encoding

_REST = 16  # saves without deltas of a fragment after a delta did not pay
_PAYS = 0.9  # a delta larger than this share of the whole does not pay

_LEAST_SUM = 1e-20  # Float32 sums of squares above this lose less than float32 precision to squares that underflow

_FIRST, _PIECE = 1 << 8, 1 << 17  # elements of a gradient that are checked at once: mostly the first few decide
_INFINITE = 0x7F80  # magnitude of bfloat16's infinity; NaN are above
_SAMPLE = 1 << 12  # elements of a gradient from which it is estimated whether few are nonzero

Setting = Literal["auto", "none"] | int


@dataclass
class _LevelCost:
    """Seconds of work and compressed bytes, for each byte of encoded state, when a level was last used."""

    seconds: float
    ratio: float


@dataclass
class LevelChooser:
    """Chooses the zstd level of the next segment on one rank."""

    _costs: dict[int | None, _LevelCost] = field(default_factory=dict)
    _write_seconds: float = 0.0

    def learn(self, level: int | None, nbytes: int, written: int, made_seconds: float, write_seconds: float) -> None:
        """Record a segment: its encoded bytes, its compressed bytes, and the times to make them and to write them."""
        if nbytes and written:
            self._costs[level] = _LevelCost(made_seconds / nbytes, written / nbytes)
            self._write_seconds = write_seconds / written

    def level(self, nbytes: int, interval: float | None) -> int | None:
        """Return the level for a segment of ``nbytes`` encoded bytes and ``interval`` seconds between saves, if known.

        The level rises one step at a time, if the next one is expected to fit into the interval, or to be faster than
        the one before because storage is slow. A level measured not to compress better is not used."""
        best = LEVELS[0]
        if interval is None or best not in self._costs:
            return best
        for easier, level in pairwise(LEVELS):
            cost = self._costs.get(level)
            # Assume three times the time of the level before for a tenth fewer bytes, until the level is measured.
            guess = _LevelCost(max(3 * self._costs[easier].seconds, 3e-9), 0.9 * self._costs[easier].ratio)
            if self._seconds(cost or guess, nbytes) > max(SHARE * interval, self._seconds(self._costs[easier], nbytes)):
                break
            if cost is not None and cost.ratio > 0.99 * self._costs[easier].ratio:
                break  # slower, but no smaller
            best = level
            if cost is None:
                break
        return best

    def _seconds(self, cost: _LevelCost, nbytes: int) -> float:
        return nbytes * (cost.seconds + cost.ratio * self._write_seconds)


@dataclass(frozen=True)
class _Base:
    """A version of a fragment to which a delta may be taken: the whole, or the newest lasting one."""

    saves: tuple[str, ...]  # its own, and those that it needs, back to the one that holds the fragment whole
    encoding: str
    dtype: str
    chunks: tuple[Bytes, ...]  # encoded
    full: int  # compressed bytes of the whole
    chains: int  # that begin at the whole
    whole: "_Base | None" = None  # None: itself
    deltas: tuple[int, ...] = ()  # compressed bytes of those to it, in a lossless encoding

    @property
    def lossless(self) -> bool:
        return encoding_named(self.encoding).lossless

    def fits(self, data: EncodedEntry) -> bool:
        return (self.encoding, self.dtype) == (data.encoding.name, data.dtype)

    def next(self) -> "_Base | None":
        """Return what the next delta is taken to; None to store the fragment whole."""
        if self.lossless:
            mean = (self.full + sum(self.deltas)) / (1 + len(self.deltas))
            before, last = (0, 0, *self.deltas)[-2:]
            expected = last + max(0, last - before) if len(self.deltas) > 1 else last
            return self if len(self.deltas) < LOSSLESS_LIFE and expected <= mean else None
        if len(self.saves) <= LIFE:
            return self
        return replace(self.whole, chains=self.chains + 1) if self.whole and self.chains < CHAINS else None


@dataclass
class SavePacking:
    """Compression of one save."""

    save: SaveId
    active: bool  # False if the configuration never compresses
    level: int | None  # of zstd; None: do not compress
    differences: bool
    bases: dict[Fragment, _Base]
    resting: frozenset[Fragment]  # fragments without deltas for a while
    lasting: bool = True  # False for a forced save, whose fragments do not become bases
    made: list[tuple[Unit, Fragment, EncodedEntry, list[Bytes]]] = field(default_factory=list)

    def packed(self, unit: Unit, fragment: Fragment, data: EncodedEntry) -> EncodedEntry:
        """Set how ``data`` is compressed, and return it."""
        retained: list[Bytes] = []
        if self.level is not None:
            newest = self.bases.get(fragment) if self.differences else None
            base = newest.next() if newest is not None and newest.fits(data) else None
            if base is not None:
                data.packing, data.bases = Packing(self.level, base.chunks), base.saves
            else:
                data.packing = Packing(self.level)
            lasts = self.lasting and not (base is not None and base.lossless)
            moving = unit.slot not in (FROZEN, BUFFER)  # others rarely change, so a base would not be used
            if self.differences and lasts and moving and fragment not in self.resting:
                data.chunks = _retaining(data.chunks, retained)
        self.made.append((unit, fragment, data, retained))
        return data


class Packer:
    """Compresses the saves of one rank. ``level`` is zstd's; ``auto`` chooses it, ``none`` compresses nothing."""

    def __init__(self, level: Setting, differences: bool) -> None:
        self._level = level
        self._differences = differences
        self._bases: dict[Fragment, _Base] = {}
        self._resting: dict[Fragment, int] = {}
        self._chooser = LevelChooser()

    def begin(
        self, save: SaveId, nbytes: int, interval: float | None, lasting: bool = True, alone: bool = False
    ) -> SavePacking:
        """Return the compression of the next save, of about ``nbytes``; ``lasting`` is False for a forced one.

        ``interval``: seconds between the last two saves, if known. ``alone``: the save must need no other one."""
        level = self._chooser.level(nbytes, interval) if self._level == "auto" else self._level
        active, chosen = self._level != "none", None if level == "none" else level
        bases, resting = {} if alone else self._bases, frozenset(self._resting)
        return SavePacking(save, active, chosen, self._differences, bases, resting, lasting)

    def settle(
        self,
        done: SavePacking,
        seconds: float,
        moved: Callable[[Unit], bool],
        reached: Container[str],
        alone: bool = False,
    ) -> None:
        """Learn from a finished save, and update the bases.

        ``seconds``: time to write the segment, 0 if that failed. ``moved``: whether a unit's committed version is now
        that of this save. ``reached``: saves that the newest commit refers to; others may be pruned at any time.
        ``alone``: whether the next save should need no other one, for want of room."""
        if seconds > 0.0:
            made = [data for _, _, data, _ in done.made]
            nbytes = sum(data.encoding.stored_bytes(data.numel, data.dtype) for data in made)
            written, making = sum(data.written for data in made), sum(data.seconds for data in made)
            self._chooser.learn(done.level, nbytes, written, making, max(0.0, seconds - making))
        self._resting = {fragment: left - 1 for fragment, left in self._resting.items() if left > 1}
        for unit, fragment, data, retained in done.made:
            if not moved(unit):
                continue
            newest = self._bases.get(fragment) if data.bases else None
            base = None if newest is None else newest.next()
            if data.bases and (base is None or base.saves != data.bases or not (retained or base.lossless)):
                continue  # the job rolled back while this was written, or the save was a forced one
            if base is not None and base.lossless and (base.deltas or data.written <= _PAYS * base.full):
                self._bases[fragment] = replace(base, deltas=(*base.deltas, data.written))
                continue
            if retained and (base is None or data.written <= _PAYS * base.full):
                saves, kind = (done.save.name, *data.bases), (data.encoding.name, data.dtype)
                version = _Base(saves, *kind, tuple(retained), data.written, 1 if fragment in self._bases else CHAINS)
                if base is not None:
                    version = replace(version, full=base.full, chains=base.chains, whole=base.whole or base)
                self._bases[fragment] = version
                continue
            self._bases.pop(fragment, None)
            if base is newest is not None:
                self._resting[fragment] = _REST
        kept = (item for item in self._bases.items() if all(save in reached for save in item[1].saves))
        self._bases = {} if alone else dict(kept)

    def reset(self) -> None:
        """Forget all bases: the job rolled back, perhaps because earlier saves are damaged."""
        self._bases = {}
        self._resting = {}


def _retaining(chunks: Callable[[], Iterable[Bytes]], retained: list[Bytes]) -> Callable[[], Iterable[Bytes]]:
    """Return the same chunks, and append a copy of each to ``retained``: some are views of reused buffers."""

    def copied() -> Iterator[Bytes]:
        retained.clear()
        for chunk in chunks():
            retained.append(chunk.copy())
            yield chunk

    return copied


@dataclass
class LateCopy:
    """A fragment that is copied while it is written, in an encoding that can hold its values."""

    copy: torch.Tensor  # the buffer, of its dtype
    encoding: str
    parts: Callable[[], Iterable[torch.Tensor]]  # copies of it in order; each is valid until the next
    written: Callable[[], object] = lambda: None  # called at the end

    def chunks(self, lost: EncodingLoss, encoding: str) -> Iterator[Bytes]:
        """Yield the encoded chunks. encoding: the unit's."""
        known = encoding_named(self.encoding)
        for copy in self.parts():
            if known.lossless and self.encoding != encoding:
                lost.decoded_sq += squared(copy)  # as in :func:`encode_unit`
            yield from _raw_chunks(copy) if known.lossless else _lossy_chunks(copy, known, lost)
        self.written()


class StagedUnit(NamedTuple):
    """A unit's copies on this rank, one for each fragment.

    Once they are written, the copies hold the decoded values."""

    unit: Unit
    encoding: str
    layout: UnitLayout
    copies: tuple[torch.Tensor, ...]
    measure: MeasureRecord | None  # if the live tensors were measured
    encoded: tuple[EncodedCopy, ...] = ()
    """If the unit is encoded while it is staged: one for each fragment, writing to ``copies``. Implies ``measure``."""
    signature: Signature | None = None  # if the live tensors were measured
    lent: bool = False  # whether the copies are in memory of a snapshot
    late: tuple[LateCopy, ...] = ()
    """If the unit is copied in waves: one for each fragment. Then ``copies`` are of buffers, else the live tensors."""

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        return self.layout.fragments


def encoded_bytes(unit: StagedUnit) -> int:
    """Return the encoded bytes of a unit on this rank, before compression."""
    encoding, layout = encoding_named(unit.encoding), unit.layout
    if encoding.lossless:
        return layout.nbytes
    return sum(
        encoding.stored_bytes(fragment.numel, dtype_name(dtype))
        if encoding.applies(dtype_name(dtype))
        else fragment.numel * dtype.itemsize
        for fragment, dtype in zip(layout.fragments, layout.dtypes, strict=True)
    )


class UnitEncoding(NamedTuple):
    """A unit's fragments on this rank, ready to be written. ``lost`` is complete once they are."""

    fragments: tuple[StagedFragment, ...]
    lossy: bool
    lost: EncodingLoss
    bases: tuple[str, ...]  # saves that they need


def encode_unit(
    unit: Unit,
    encoding: str,
    fragments: Sequence[Fragment],
    copies: Sequence[torch.Tensor | EncodedCopy | LateCopy],
    packing: SavePacking,
) -> UnitEncoding:
    """Return the fragments to write for finite ``copies``. Those that the encoding cannot hold are stored raw.

    Writing them with a lossy encoding replaces the copies by the decoded values, which a resume would give back, so
    that drift is measured against them from then on. Background thread only."""
    lost, made, bases = EncodingLoss(), [], set[str]()
    for fragment, staged in zip(fragments, copies, strict=True):
        copy = staged if isinstance(staged, torch.Tensor) else staged.copy
        if isinstance(staged, LateCopy):
            chosen = staged.encoding
            chunks: Callable[[], Iterable[Bytes]] = partial(staged.chunks, lost, encoding)
        elif isinstance(staged, EncodedCopy) and staged.held:
            chosen, chunks = staged.encoding, staged.chunks
            lost.error_sq += staged.lost.error_sq
            lost.decoded_sq += staged.lost.decoded_sq
        else:
            chosen = RAW if isinstance(staged, EncodedCopy) else applicable_encoding(encoding, copy)
            known = encoding_named(chosen)
            chunks = partial(_raw_chunks, copy) if known.lossless else partial(_lossy_chunks, copy, known, lost)
            if chosen != encoding:  # the relative error of the unit is over all of its values
                lost.decoded_sq += squared(copy)
        region, dtype = fragment._asdict(), dtype_name(copy.dtype)
        data: Data = RawBytes(copy)
        if chosen != RAW or packing.active or isinstance(staged, LateCopy):
            data = packing.packed(unit, fragment, EncodedEntry(encoding_named(chosen), fragment.numel, dtype, chunks))
            bases.update(data.bases)
        made.append(StagedFragment(layer=unit.layer, **region, dtype=dtype, encoding=chosen, data=data))
    lossy = any(not encoding_named(one.encoding).lossless for one in made)
    return UnitEncoding(tuple(made), lossy, lost, tuple(sorted(bases)))


class RawBytes(Struct, frozen=True, gc=False):
    """The bytes of a copy, as they are. They become an object of their own when they are written, and not before."""

    copy: torch.Tensor
    exact: ClassVar[bool] = True

    @property
    def nbytes(self) -> int:
        return self.copy.numel() * self.copy.element_size()

    def pieces(self) -> Iterable[memoryview]:
        return (as_bytes(self.copy),)


def applicable_encoding(encoding: str, copy: torch.Tensor) -> str:
    """Return the encoding, or raw if it cannot hold these values."""
    known = encoding_named(encoding)
    if known.lossless or not known.applies(dtype_name(copy.dtype)):
        return RAW
    return encoding if in_range(copy, encoder_named(encoding)) else RAW


def _raw_chunks(copy: torch.Tensor) -> Iterator[Bytes]:
    data, step = np.frombuffer(as_bytes(copy), np.uint8), CHUNK * copy.element_size()
    for start in range(0, data.size, step):
        yield data[start : start + step]


def _lossy_chunks(copy: torch.Tensor, encoding: Encoding, lost: EncodingLoss) -> Iterator[Bytes]:
    encoder = encoder_named(encoding.name)
    scratch = torch.empty(min(CHUNK, copy.numel()), dtype=torch.float32, device="cpu")
    for values in torch.split(copy, CHUNK):
        out = torch.empty(encoding.stored_bytes(values.numel(), "F32"), dtype=torch.uint8, device="cpu")
        decoded = scratch[: values.numel()]
        if not encoder.encode(values, out):  # checked before; never commit values that the encoder does not confirm
            raise SaveError(f"values in range cannot be stored as {encoding.name}: report this, and store them raw")
        encoder.decode(out, decoded)
        lost.error_sq += squared(values.sub_(decoded))
        lost.decoded_sq += squared(decoded)
        values.copy_(decoded)
        yield out.numpy()


def squared(values: torch.Tensor) -> float:
    """Return the squared norm: float32 sums over pieces that fit the cache, added in float64.

    Float64 is used for pieces whose squares under- or overflow float32, as those of second moments do."""
    total = 0.0
    for piece in torch.split(values, 1 << 14):
        narrow = piece.float()
        square = float(torch.dot(narrow, narrow))
        if not _LEAST_SUM < square < math.inf:
            wide = piece.double()
            square = float(torch.dot(wide, wide))
        total += square
    return total


def encode_gradient(
    layer: str, fragment: Fragment, copy: torch.Tensor, *, factor: float, level: int | None
) -> StagedFragment:
    """Encode a gradient for a record of the journal, without loss.

    float32 values take two bytes each if all are bfloat16 values, or such values times ``factor``. The bytes are
    compressed with zstd's ``level``; if that is None, only if few elements seem to be nonzero."""
    name, dtype = RAW, dtype_name(copy.dtype)
    sample = np.frombuffer(as_bytes(copy), f"<u{copy.element_size()}")[:: -(-copy.numel() // _SAMPLE) or 1]
    sparse = np.count_nonzero(sample) * FEW <= sample.size
    if copy.dtype == torch.float32 and copy.numel():
        name = next((one for one, by in ((BF16, 1.0), (BF16_SCALED, factor)) if _is_bfloat16(copy, by)), RAW)
    data: Data = as_bytes(copy)
    if name != RAW or sparse or level is not None:
        chunks = partial(_raw_chunks, copy) if name == RAW else partial(_bfloat16_chunks, copy, factor, name)
        packing = Packing(level or 1) if sparse or level is not None else None
        data = EncodedEntry(encoding_named(name), fragment.numel, dtype, chunks, packing)
    return StagedFragment(layer, **fragment._asdict(), dtype=dtype, encoding=name, data=data)


def _is_bfloat16(copy: torch.Tensor, factor: float) -> bool:
    """Return whether all values are finite and, to the bit, those of bfloat16 times ``factor``.

    Unless that is 1, subnormal values are refused, because threads may flush them to 0."""
    if not LEAST <= factor <= 1.0 / LEAST:
        return False
    least = 0 if factor == 1.0 else int(np.float32(LEAST * max(1.0, 1.0 / factor)).view("<u4") >> 16)
    room = min(_PIECE, copy.numel())
    halves, back = (torch.empty(room, dtype=one, device="cpu") for one in (torch.bfloat16, torch.float32))
    for part in chain([copy[:_FIRST]], torch.split(copy, _PIECE)):
        half, again = _halved(part, factor, halves, back), back[: part.numel()]
        magnitudes = half.view(torch.int16).numpy().view(np.uint16) & 0x7FFF
        if magnitudes.max() >= _INFINITE or (magnitudes - np.uint16(1)).min() < least:  # 0 becomes the largest
            return False
        again.copy_(half).mul_(factor)
        if not torch.equal(again.view(torch.int32), part.view(torch.int32)):
            return False
    return True


def _halved(part: torch.Tensor, factor: float, halves: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Return the values over ``factor``, as bfloat16, at the beginning of ``halves``."""
    quotient = part if factor == 1.0 else torch.mul(part, 1.0 / factor, out=scratch[: part.numel()])
    return halves[: part.numel()].copy_(quotient)


def _bfloat16_chunks(copy: torch.Tensor, factor: float, name: str) -> Iterator[Bytes]:
    """Yield the chunks of an encoding that can hold the values. A chunk is valid until the next one."""
    head = np.array([factor] * (name == BF16_SCALED), "<f4").view(np.uint8)
    data = torch.empty(head.size + 2 * min(CHUNK, copy.numel()), dtype=torch.uint8, device="cpu")
    scratch = torch.empty(_PIECE, dtype=torch.float32, device="cpu")
    data[: head.size] = torch.from_numpy(head)
    by, halves = factor if head.size else 1.0, data[head.size :].view(torch.bfloat16)
    for values in torch.split(copy, CHUNK):
        for part, half in zip(torch.split(values, _PIECE), torch.split(halves, _PIECE), strict=False):
            _halved(part, by, half, scratch)
        yield data.numpy()[: head.size + 2 * values.numel()]
