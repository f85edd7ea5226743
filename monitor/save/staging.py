"""Stage the units of a save: choose their buffers, and whether they are encoded while they are copied."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from operator import is_

import torch

from monitor.adapters.identity import Integers, addresses_of
from monitor.adapters.module_tensors import dtype_name
from monitor.config.load import Config
from monitor.observe.drift_meter import DriftMeter, Measure, measure_record
from monitor.observe.units import LocalUnit, UnitLayout
from monitor.save.async_copy import AsyncCopy, CopyTiming, WaveCopy, WavePiece
from monitor.save.device_memory import ALIGN, pinned_buffers
from monitor.save.encode import LateCopy, StagedUnit, applicable_encoding
from monitor.save.torch_codecs import EncodedCopy
from monitor.types import DecisionResult
from store.encoding import CHUNK, encoding_named
from store.errors import SaveError
from store.names import BUFFER, FROZEN, RAW, Unit

Buffers = list[torch.Tensor]


class StagingPool:
    """Reuses host buffers, by unit. The caller owns a buffer from ``take`` to ``give``.

    New memory costs a page fault every 4 KiB, which takes several times as long as the copy."""

    def __init__(self) -> None:
        self._free: dict[Unit, list[tuple[UnitLayout, tuple[torch.Tensor, ...]]]] = {}  # layouts that they fit
        self._addresses: dict[Unit, tuple[tuple[torch.Tensor, ...], Integers]] = {}
        self._bytes: dict[Unit, list[torch.Tensor]] = {}
        self._known: set[Unit] = set()
        self._untouched: dict[Unit, tuple[torch.Tensor, ...]] = {}
        self._lock = threading.Lock()
        self._block: torch.Tensor | None = None  # of waves

    @torch.inference_mode(False)
    def take_waves(self, groups: Sequence[Sequence[torch.Tensor]], most: int) -> list[WavePiece]:
        """Return a wave piece for each tensor, in order. Each wave uses the same ``most`` bytes; no group is split."""
        if self._block is None:  # unpinned pages take memory only once they are written
            cuda = next((tensor.device for group in groups for tensor in group if tensor.is_cuda), None)
            (self._block,) = _buffers([most], cuda)
        left, room, pieces = 0, most, list[WavePiece]()
        for group in reversed(groups):  # so that the last wave, for which training waits least, is the fullest
            if padded_bytes(group) > room:
                left, room = left + 1, most
            for tensor in reversed(group):
                room = (room - tensor.nbytes) // ALIGN * ALIGN
                pieces.append((left, tensor, self._block[room : room + tensor.nbytes].view(tensor.dtype)))
        return pieces[::-1]

    def take_bytes(self, unit: Unit, sizes: Sequence[int], cuda: torch.device | None) -> list[torch.Tensor]:
        """Return 1-d uint8 buffers of these sizes, contents undefined; pinned for copies from ``cuda``, if given."""
        free = self._bytes.pop(unit, None)
        if free is not None and [buffer.numel() for buffer in free] == list(sizes):
            return free
        return _buffers(sizes, cuda)

    def give_bytes(self, unit: Unit, buffers: Sequence[torch.Tensor]) -> None:
        self._bytes[unit] = list(buffers)

    def reserve(self, unit: Unit, layout: UnitLayout) -> None:
        """Allocate one set of buffers. :meth:`prepare` touches its pages, unless pinning has done so."""
        self._known.add(unit)
        buffers = _allocate(layout)
        if layout.regions.cuda is None:
            self._untouched[unit] = buffers
        self.give(unit, buffers, layout)

    def prepare(self, unit: Unit, layout: UnitLayout) -> None:
        """Touch the pages of the first set of buffers, unless a save has taken it. Any thread."""
        with self._lock:
            if unit not in self._known:
                self.reserve(unit, layout)
            for buffer in self._untouched.pop(unit, ()):
                buffer.zero_()

    def take(self, unit: Unit, layout: UnitLayout) -> tuple[torch.Tensor, ...]:
        """Return buffers of the same dtypes and sizes, contents undefined."""
        with self._lock:  # so that prepare() does not zero buffers that a save fills
            self._known.add(unit)
            self._untouched.pop(unit, None)
        for index, (known, buffers) in enumerate(self._free.get(unit, [])):
            if known is layout or (known == layout and known.regions.cuda == layout.regions.cuda):
                self._free[unit] = self._free[unit][index + 1 :]  # those before fit an earlier shape
                return buffers
        self._free.pop(unit, None)  # they fit an earlier shape of the unit
        return _allocate(layout)

    def give(self, unit: Unit, buffers: tuple[torch.Tensor, ...], layout: UnitLayout) -> None:
        """Take buffers back, which were taken for ``layout``."""
        self._free.setdefault(unit, []).append((layout, buffers))

    def addresses(self, unit: Unit, buffers: tuple[torch.Tensor, ...]) -> Integers:
        """Return the address of each buffer. Caches them, because a unit mostly gets the same buffers."""
        known = self._addresses.get(unit)
        if known is None or known[0] is not buffers:
            known = self._addresses[unit] = buffers, addresses_of(buffers)
        return known[1]


def padded_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes that buffers for tensors take in one block, at most."""
    return sum(tensor.nbytes + ALIGN for tensor in tensors)


@torch.inference_mode(False)
def _allocate(layout: UnitLayout) -> tuple[torch.Tensor, ...]:
    sizes = [one.numel * dtype.itemsize for one, dtype in zip(layout.fragments, layout.dtypes, strict=True)]
    buffers = _buffers(sizes, layout.regions.cuda)
    return tuple(buffer.view(dtype) for buffer, dtype in zip(buffers, layout.dtypes, strict=True))


def _buffers(sizes: Sequence[int], cuda: torch.device | None) -> list[torch.Tensor]:
    return pinned_buffers(sizes, cuda) if cuda else [torch.empty(n, dtype=torch.uint8, device="cpu") for n in sizes]


@dataclass(frozen=True)
class _ReusableStaging:
    """All units of a save, if none was measured or encoded: the next save of the same units reuses their buffers."""

    staged: list[StagedUnit]
    chosen: Mapping[Unit, str]
    layouts: Sequence[UnitLayout]
    addresses: Sequence[Integers]
    buffers: Sequence[Callable[[], Sequence[torch.Tensor]]]

    @classmethod
    def of(cls, staged: list[StagedUnit], copying: AsyncCopy) -> "_ReusableStaging | None":
        """Return None if a unit was copied at once: buffers of the model, and frozen weights."""
        if len(copying.units) < len(staged) or not staged:
            return None
        chosen, layouts = {one.unit: one.encoding for one in staged}, [one.layout for one in staged]
        return cls(staged, chosen, layouts, [one for _, one, _ in copying.units], [one for *_, one in copying.units])


class Stager:
    """Chooses the buffers of each unit, and whether it is encoded while it is copied. Training thread only."""

    def __init__(self, meter: DriftMeter, config: Config) -> None:
        self._meter = meter
        self._encode, self._most, self._timeout = config.encode, config.copies.max_bytes, config.timeouts.staging
        self._pool = StagingPool()
        self._last: _ReusableStaging | None = None  # of the last save
        self._free: _ReusableStaging | None = None  # the same, if that save is over
        self.keeps = self._most is None and not config.shares_memory()
        """Whether buffers stay for the next save. Else most saves use memory of snapshots, and buffers are freed."""

    def reserve(self, local: Mapping[Unit, LocalUnit]) -> None:
        """Allocate buffers for a full save."""
        for unit, part in local.items() if self.keeps else ():
            self._pool.reserve(unit, part.layout)

    def prepare(self, local: Mapping[Unit, LocalUnit], stop: Callable[[], bool]) -> None:
        """Touch the memory of a full save's buffers, so that the first save does not do it. Background thread."""
        for unit, part in local.items() if self.keeps else ():
            if not stop():
                self._pool.prepare(unit, part.layout)

    def stage_all(
        self, decided: DecisionResult, local: Mapping[Unit, LocalUnit], lent: Mapping[Unit, Buffers], timing: CopyTiming
    ) -> tuple[list[StagedUnit], AsyncCopy, Exception | None]:
        """Stage the decided units and start their copies. On an error, return it, and nothing staged.

        Raising it (out of memory on one rank, for example) would leave the other ranks waiting in a collective. The
        save fails instead, as it does if a rank cannot write."""
        staged, copying = list[StagedUnit](), AsyncCopy()
        chosen = {unit: choice.encoding or "" for unit, choice in decided.saved.items() if unit in local}
        try:
            if self._most is not None:
                staged, copying = self._stage_waves([(local[u], chosen[u]) for u in chosen], decided.mine, self._most)
                chosen = {}
            left = () if self._encode == "saving" else chosen.keys() - decided.mine.keys()
            encoded = [local[unit] for unit in left if self._encodes_now(local[unit], chosen[unit])]
            mine = {**decided.mine, **self._meter.measure_many({part.unit: part.tensors for part in encoded})}
            plain = not (encoded or lent or mine.keys() & chosen.keys())
            if (last := self._reuse_last(chosen if plain else {}, local)) is not None:
                staged = last.staged
                parts = map(local.__getitem__, last.chosen)  # whose order is that of the addresses
                copying.units = list(zip(parts, last.addresses, last.buffers, strict=True))
            else:
                for unit, encoding in chosen.items():
                    staged.append(self.stage(local[unit], encoding, mine.get(unit), copying, lent.get(unit)))
                self._last = _ReusableStaging.of(staged, copying) if plain and self.keeps else None
            timing.start(copying)
        except Exception as error:  # noqa: BLE001 - this rank's edge: kept as the save's failure
            with suppress(Exception):
                copying.finish()  # a device may be writing into the buffers
            for one in staged:
                self.unstage(one)
            return [], AsyncCopy(), SaveError(f"the state could not be copied: {error!r}")
        return staged, copying, None

    def stage(
        self, part: LocalUnit, encoding: str, measure: Measure | None, copying: AsyncCopy, lent: Buffers | None = None
    ) -> StagedUnit:
        """Add the copies of a unit, in ``encoding``, to ``copying``. ``measure`` is of the live tensors, if any.

        lent: buffers for a raw unit that the caller gets back when the save is settled."""
        copies = self._pool.take(part.unit, part.layout) if lent is None else tuple(lent)
        encoded = tuple[EncodedCopy, ...]()
        if self._encodes_now(part, encoding):
            # The original values do not reach host memory, so they are measured on the device.
            measure = measure or self._meter.measure(part.unit, part.tensors)
            if measure.finite:
                sizes = [encoding_named(encoding).stored_bytes(tensor.numel(), "F32") for tensor in part.tensors]
                buffers = self._pool.take_bytes(part.unit, sizes, part.layout.regions.cuda)
                encoded = tuple(map(EncodedCopy, part.tensors, repeat(encoding), buffers, copies))
        if encoded:
            copying.add_encoded(encoded)
        elif part.unit.slot in (BUFFER, FROZEN):  # a forward may change buffers, and scripts reach frozen weights
            copying.copy_now(part.tensors, copies)
        else:
            addresses = self._pool.addresses(part.unit, copies) if lent is None else addresses_of(copies)
            copying.add_unit(part, addresses, lambda: copies)
        record, known = (None, None) if measure is None else (measure_record(part.unit, measure), measure.signature)
        return StagedUnit(part.unit, encoding, part.layout, copies, record, encoded, known, lent is not None)

    def _stage_waves(
        self, parts: Sequence[tuple[LocalUnit, str]], mine: Mapping[Unit, Measure], most: int
    ) -> tuple[list[StagedUnit], WaveCopy]:
        """Stage units in waves of at most ``most`` bytes. One that no wave can hold is stored raw, piece by piece."""
        groups = list[Sequence[torch.Tensor]]()
        for live in (part.tensors for part, _ in parts):
            groups += [live] if padded_bytes(live) <= most else [[one] for t in live for one in torch.split(t, CHUNK)]
        pieces = self._pool.take_waves(groups, most)
        lazy = not any(part.unit.slot in (BUFFER, FROZEN) for part, _ in parts)  # see :meth:`stage`
        staged, copying, left = list[StagedUnit](), WaveCopy(pieces, self._timeout, lazy=lazy), iter(pieces)
        for part, wanted in parts:
            unit, live, whole = part.unit, part.tensors, padded_bytes(part.tensors) <= most
            measure, encoding = mine.get(unit) or self._meter.measure(unit, live), wanted if whole else RAW
            late = []
            for tensor in live:
                split = list(islice(left, 1 if whole else max(1, -(-tensor.numel() // CHUNK))))
                late.append(LateCopy(split[0][2], applicable_encoding(encoding, tensor), partial(copying.take, split)))
            copies = tuple(tensor.clone() if unit.slot == BUFFER else tensor for tensor in live)  # for the meter
            record, known = measure_record(unit, measure), measure.signature
            staged.append(StagedUnit(unit, encoding, part.layout, copies, record, (), known, late=tuple(late)))
        return staged, copying

    def _reuse_last(self, chosen: Mapping[Unit, str], local: Mapping[Unit, LocalUnit]) -> "_ReusableStaging | None":
        """Return the units of the last save, if the same are chosen. Else return their buffers to the pool."""
        last, self._free = self._free, None
        if last is None:
            return None
        if last.chosen == chosen and all(map(is_, last.layouts, (local[unit].layout for unit in last.chosen))):
            return last
        for unit in last.staged:
            self.unstage(unit)
        return None

    def unstage_all(self, staged: Sequence[StagedUnit]) -> None:
        """Return buffers after a save. Those of the last save stay together, since the next one mostly reuses them."""
        if self._last is not None and self._last.staged is staged:
            self._free = self._last
            return
        for unit in staged:
            self.unstage(unit)

    def unstage(self, unit: StagedUnit) -> None:
        """Return buffers to the pool after a save."""
        if unit.lent or not self.keeps:
            return
        if unit.encoded:
            self._pool.give_bytes(unit.unit, [copy.encoded for copy in unit.encoded])
        self._pool.give(unit.unit, unit.copies, unit.layout)

    def _encodes_now(self, part: LocalUnit, encoding: str) -> bool:
        """Whether to encode while staging: fewer bytes to copy, but the copying thread spends the time."""
        if self._encode == "saving" or (known := encoding_named(encoding)).lossless:
            return False
        return all(known.applies(dtype_name(dtype)) for dtype in part.layout.dtypes)
