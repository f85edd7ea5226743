"""Compare a job's first save, and the first after its state changed shape, with the live state, in value and type.

While the state stands still, the training thread notes what ``state_dict()`` of model, optimizer and the user's objects
hold. Each tensor must be a piece, or a copy of one, or be in the run state; nothing may be left over. What several
ranks hold whole must be alike. The background thread decodes the run state before it is written, and after the commit
reads all of this rank's segment back. What differs is an error in the log, and no commit from then on is exact."""

import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from monitor.adapters.base import Adapter, LiveValue
from monitor.adapters.module_tensors import bits_of
from monitor.context import JobContext
from monitor.events import BackgroundFailureEvent
from monitor.observe.units import LocalUnit
from monitor.run_state import CapturedState, from_tree
from monitor.save.encode import StagedUnit
from monitor.save.rank_comparison import RankComparison, Sample
from store.encoding import encoding_named
from store.errors import DamagedError, StorageError
from store.fragments import FragmentReader, Source
from store.names import BUFFER, FROZEN, WEIGHTS, Fragment, SaveId
from store.resolve import Key, Stored, index_bases, with_base
from store.schema import digest
from store.segment import SegmentDraft, read_leaves, read_part
from store.state_tree import Leaf
from store.storage.local import Files
from store.text import listed

_log = logging.getLogger("driftpoint")

_WIDTH = 16  # keys of the first level of an object's state that are looked at
_NAMED = 8  # differences that are logged and recorded; usually they have one cause

_TENSORS = {torch.Tensor: "torch.Tensor", nn.Parameter: "torch.nn.Parameter"}
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})

Outline = dict[str, tuple[str, str]]  # Path -> type (with dtype, shape, length) and digest of the value


def outline(value: Any, name: str) -> Outline:
    """Return the types and values in nested data. Tensors count with their bits, on whichever device they are."""
    out: Outline = {}
    _outline(value, name, out)
    return out


def _outline(value: Any, name: str, out: Outline) -> None:
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        local = _local(value)
        known = _TENSORS.get(type(local), type(local).__name__) + (" that requires grad" if local.requires_grad else "")
        out[name] = f"{known} of {local.dtype} {tuple(local.shape)}", digest(bits_of(local).data)
    elif isinstance(value, np.ndarray | np.generic):
        out[name] = f"numpy {kind} of {value.dtype} {value.shape}", digest(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        out[name] = f"{kind} of {len(value)}", ""
        for key, item in value.items():
            _outline(item, f"{name}[{key!r}]", out)
    elif isinstance(value, set | frozenset):
        out[name] = f"{kind} of {len(value)}", _digest(sorted(map(repr, value)))
    elif isinstance(value, list | tuple | deque) and not all(type(item) in _PLAIN for item in value):
        out[name] = f"{kind} of {len(value)}", ""
        for index, item in enumerate(value):
            _outline(item, f"{name}[{index}]", out)
    else:
        length = f" of {len(value)}" if isinstance(value, list | tuple | deque) else ""
        out[name] = kind + length, _digest(value)


def _digest(value: Any) -> str:
    return digest(repr(value).encode(errors="surrogatepass"))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor).__name__ != "DTensor":
        return tensor
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[attr-defined, no-any-return]


def differences(live: Outline, stored: Outline) -> list[str]:
    """Return what comes back otherwise than it is, with both types."""
    out = []
    for name in [*live, *(name for name in stored if name not in live)]:
        was, back = live.get(name), stored.get(name)
        if was is None or back is None:
            text = f"is {was[0]} and is missing" if was else "is not there"
            out.append(f"{name} {text} in what was saved" if was else f"{name} {text} and comes back as {back[0]}")  # type: ignore[index]
        elif was[0] != back[0]:
            out.append(f"{name} is {was[0]} and comes back as {back[0]}")
        elif was[1] != back[1]:
            out.append(f"{name}, {was[0]}, comes back with other values")
    return out


def unsaved(adapter: Adapter, state: Mapping[str, Any], objects: Sequence[object] = ()) -> list[str]:
    """Return what the framework's own state dicts hold beyond the adapter's pieces and the run state.

    A copy counts as the piece of its name that has the same bits, rounded as it is, else as a piece with the same bits
    that the state dicts hold nowhere else. state: as captured; ``framework`` is None on ranks that do not store it.
    objects: those in ``state=``."""
    pieces, tensors = adapter.held(), list[LiveValue]()
    owned = {id(one) for item in objects for one in (item, *getattr(item, "__dict__", {}).values())}
    live = (one for one in adapter.live_values() if not (one.ownable and id(one.value) in owned))
    found = [text for one in live for text in _unsaved(one, state, tensors)]
    memory, reached = {_memory_of(piece.tensor) for piece in pieces}, {_memory_of(one.value) for one in tensors}
    named = {name.fqn: tensor for name, tensor, _ in pieces if name.slot in (WEIGHTS, FROZEN, BUFFER)}
    others: list[tuple[LiveValue, Sample]] = []
    for one in [one for one in tensors if one.value.numel() and _memory_of(one.value) not in memory]:
        own, sample = named.get(one.fqn or ""), Sample.of(one.value)
        if own is not None and Sample.of(own, one.value.dtype) == sample:
            reached.add(_memory_of(own))
        else:
            others.append((one, sample))
    left = Counter(Sample.of(piece.tensor) for piece in pieces if others and _memory_of(piece.tensor) not in reached)
    for one, sample in others:
        left[sample] -= 1
        found += [_is_in_no_part(one)] if left[sample] < 0 else []
    return found


def _unsaved(one: LiveValue, state: Mapping[str, Any], tensors: list[LiveValue]) -> Iterator[str]:
    """Yield what is not in the run state. The tensors that belong to pieces go to ``tensors``."""
    if one.stored is not None:
        if state.get(one.stored[0]) is None and one.stored[0] == "framework":
            return  # rank 0 stores it for all
        found = _at(state, one.stored)
        if found is None:
            yield _is_in_no_part(one)
        else:
            yield from differences(outline(one.value, one.name), outline(found[0], one.name))
    elif isinstance(one.value, torch.Tensor) and not one.ownable:
        tensors.append(replace(one, value=_local(one.value)))
    elif isinstance(one.value, Mapping | list | tuple) and not one.ownable:
        items = one.value.items() if isinstance(one.value, Mapping) else enumerate(one.value)
        for key, item in items:
            yield from _unsaved(LiveValue(f"{one.name}[{key!r}]", item), state, tensors)
    elif one.value is not None:
        yield _is_in_no_part(one)


def _is_in_no_part(one: LiveValue) -> str:
    return f"{one.name} is {outline(one.value, '')[''][0]} and is in no part of a save"


def _at(state: Any, path: Sequence[Any]) -> tuple[Any] | None:
    for key in path:
        try:
            state = state[key]
        except (LookupError, TypeError):
            return None
    return (state,)


def _memory_of(tensor: torch.Tensor) -> tuple[int, int, torch.dtype]:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype


@dataclass
class SelfCheck:
    """One save of this rank and the live state that it must hold."""

    save: SaveId
    live: Outline  # of the run state
    found: list[str]  # differences
    seconds: float  # that the training thread spent
    samples: Mapping[Fragment, Sample] = field(default_factory=dict)
    earlier: Sequence[str] = ()  # differences that only reading back shows, of the check before
    shown: Sequence[str] = ()  # such differences of this check; set by :meth:`read_back`
    stopped: threading.Event = field(default_factory=threading.Event)
    done: bool = False
    failed: bool = False  # the storage could not be read

    def compare(self, segment: SegmentDraft, staged: Iterable[StagedUnit]) -> tuple[str, ...]:
        """Compare what is about to be written: staged copies, and the run state, decoded. Return all differences.

        Costs no more than the run state, so the commit can still say what differs."""
        for unit in staged:
            if encoding_named(unit.encoding).lossless and not unit.late:
                for fragment, copy in zip(unit.fragments, unit.copies, strict=True):
                    self._add(_difference(f"{fragment.fqn}/{fragment.slot}", self.samples[fragment], Sample.of(copy)))
        tree, leaves = json.loads(json.dumps(segment.run_state)), cast("Sequence[Leaf]", segment.run_leaves)
        self._add(differences(self.live, outline(from_tree(tree, leaves), "state")))
        if self.found:
            self._report()
        return tuple(dict.fromkeys((*self.earlier, *self.found)))[:_NAMED]

    def read_back(self, files: Files, store_id: str, rank: int) -> None:
        """Read the segment and compare it. Only storage that cannot be read is no difference."""
        began, before = time.monotonic(), len(self.found)
        try:
            part = read_part(files, store_id, self.save, rank)
            bases = _Bases(files, store_id, rank)
            for entry in part.entries:
                if self.stopped.is_set():
                    return
                source = Source(part, entry) if entry.base is None else with_base(part, entry, bases.find)
                self._add(self._compare(files, source))
            missing = self.samples.keys() - {entry.fragment for entry in part.entries}
            self._add(f"{one.fqn}/{one.slot} is missing in what was saved" for one in missing)
            if not self.found:
                self._add(differences(self.live, outline(from_tree(part.run_state, read_leaves(files, part)), "state")))
        except DamagedError as error:
            self._add([f"the segment cannot be read back: {error}"])
        except StorageError as error:
            _log.warning("self-check of step %d: the segment cannot be read back: %s", self.save.step, error)
            self.failed = True
            return
        self.shown, self.done = self.found[before:], True
        if self.shown:
            self._report()
        _log.info(
            "self-check of step %d: %d fragments and %d values of the run state %s; it took %.3f s of training, and "
            "%.2f s in the background",
            self.save.step,
            len(self.samples),
            len(self.live),
            "differ in part" if self.found else "come back equal",
            self.seconds,
            time.monotonic() - began,
        )

    def _compare(self, files: Files, source: Source) -> Iterator[str]:
        entry = source.entry
        name, sample = f"{entry.fqn}/{entry.slot}", self.samples.get(entry.fragment)
        if sample is None:
            yield f"{name}, elements {entry.start} to {entry.stop}, was saved and is not there"
            return
        try:
            chunks = FragmentReader(files, source).chunks()
            if not encoding_named(entry.encoding).lossless:
                deque(chunks, maxlen=0)  # what it lost is measured when it is encoded
                back = sample.data
            else:
                back = sample.select(chunks)
        except DamagedError as error:
            yield f"{name} cannot be read back: {error}"
            return
        yield from _difference(name, sample, replace(sample, dtype=entry.dtype, data=back))

    def _add(self, found: Iterable[str]) -> None:
        self.found += [one for one in found if one not in self.found]

    def _report(self) -> None:
        _log.error(
            "self-check: not all of the state comes back from a save as it is, so commits from step %d on are not "
            "exact: %s",
            *(self.save.step, listed(self.found, _NAMED, "; ")),
        )


def _difference(name: str, live: Sample, stored: Sample) -> Iterator[str]:
    if stored.dtype != live.dtype:
        yield f"{name} is {live.dtype} and comes back as {stored.dtype}"
    elif stored.data != live.data:
        yield f"{name}, {live.dtype}, comes back with other values"


class _Bases:
    """Finds the fragments that differences refer to; a rank's bases are in its own segments."""

    def __init__(self, files: Files, store_id: str, rank: int) -> None:
        self._files, self._store_id, self._rank = files, store_id, rank
        self._known: dict[str, Mapping[Key, Stored]] = {}

    def find(self, key: Key) -> Stored | None:
        name = key[0]
        if name not in self._known:
            part = read_part(self._files, self._store_id, SaveId.parse(name), self._rank)
            self._known[name] = index_bases((part, entry) for entry in part.entries)
        return self._known[name].get(key)


class SelfChecker:
    """Decides when a save of this rank is checked, and keeps what the last check found."""

    def __init__(self, job: JobContext) -> None:
        self._job, self.ranks = job, RankComparison(job)
        self._changed = False  # whether the units did, or the ranks were compared, since :meth:`describe`
        self._shapes: Any = None  # of the user's objects, when they were checked last
        self._unsaved: list[str] = []
        self._described: tuple[Outline, list[str], float] | None = None
        self._current: SelfCheck | None = None
        self.differs: tuple[str, ...] = ()  # what the last check found
        self._shown: Sequence[str] = ()  # those among them that only reading back shows

    @property
    def known(self) -> tuple[str, ...]:
        """All that is known not to come back from this rank, also of a check under way."""
        found = self._current.found if self._current else ()
        return tuple(dict.fromkeys((*self.ranks.unlike, *self.recorded, *found)))[:_NAMED]

    @property
    def recorded(self) -> tuple[str, ...]:
        """What a save of this rank that is not checked records: all that is known not to come back from it."""
        return tuple(dict.fromkeys((*self._lacking(), *self.differs)))[:_NAMED]

    def _lacking(self) -> list[str]:
        return [*self.ranks.differing, *self._job.adapter.unsaveable(), *self._unsaved]

    def compare_ranks(self) -> None:
        """Compare the ranks if that is due. Collective."""
        self._changed |= self.ranks.compare()

    def describe(self, captured: CapturedState) -> None:
        """Note the live state if a check is due. Training thread, while it stands still. captured: the run state."""
        self._described = None
        shapes = [_shape_of(item) for item in captured.live["user"]]
        if not self._job.config.self_check or not (self._changed or self._shapes != shapes):
            return
        began, live = time.perf_counter(), Outline()
        try:
            state = captured.whole()
            live = outline(state, "state")
            if self._changed:  # alike on all ranks, in case a script's own state_dict() communicates
                self._unsaved = unsaved(self._job.adapter, state, self._job.user.objects)
        except Exception as error:  # noqa: BLE001 - the edge to the user's own state dicts: reported, saves go on
            self._unsaved = [f"the state dicts of model and optimizer cannot be compared: {error!r}"]
        seconds = time.perf_counter() - began + self._changed * self.ranks.seconds
        self._described = live, self._lacking(), seconds
        self._changed, self._shapes = False, shapes

    def begin(self, save: SaveId, parts: Iterable[LocalUnit]) -> SelfCheck | None:
        """Return the check of a save that stores ``parts``, or None. Training thread, while the state stands still."""
        described, self._described = self._described, None
        if described is None:
            return None
        began, (live, found, seconds) = time.perf_counter(), described
        try:
            samples = {piece.fragment: Sample.of(piece.tensor) for part in parts for piece in part.pieces}
        except Exception as error:  # noqa: BLE001 - out of memory on one rank: reported, the save goes on
            _log.warning("self-check: the live state cannot be sampled: %r", error)
            self._shapes = None  # the next save is checked
            return None
        self._current = SelfCheck(save, live, found, seconds + time.perf_counter() - began, samples, self._shown)
        return self._current

    def stop(self) -> None:
        """End a check under way, since the process is about to exit."""
        if self._current is not None:
            self._current.stopped.set()

    def collect(self) -> None:
        """Take the outcome of a check that ended in the background. Training thread."""
        check = self._current
        if check is None:
            return
        new = tuple(check.found[:_NAMED])
        if not set(new) <= set(self.differs):
            self._job.listeners.on_background_failure(BackgroundFailureEvent("self_check"))
        if check.done:
            self.differs, self._shown, self._current = new, check.shown, None
        else:
            self.differs = tuple(dict.fromkeys((*self.differs, *new)))[:_NAMED]
        if check.failed:
            self.repeat()

    def repeat(self) -> None:
        """Check the next save: this one failed, or cannot be read."""
        if self._current is not None and not self._current.done:
            self._current, self._shapes = None, None


def _shape_of(state: Any) -> Any:
    if isinstance(state, Mapping):
        return type(state), [(key, type(item)) for key, item in state.items() if isinstance(key, str)][:_WIDTH]
    return type(state)
