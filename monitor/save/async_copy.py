"""Copy live state to host memory, so that it can be written while training goes on.

State does not change between two optimizer steps. So copies are made at once (``eager``), or during the next forward
and backward (``lazy``); then the next optimizer step waits for copies that are not complete, and so does any other
public call of the framework that changes the state. Other changes are detected, and the save is given up: the kernel
reports every write (:class:`WriteTracker`); where it cannot, version counters and a sample detect most.
If there is no memory for a second copy of the state, the optimizer step waits for storage, too (:class:`WaveCopy`)."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from monitor.adapters.base import Adapter
from monitor.adapters.identity import Integers, addresses_of, version_of
from monitor.background import Beside, Once, alone
from monitor.observe.units import LocalUnit
from monitor.save.device_memory import LastViews, MemoryViews
from monitor.save.torch_codecs import EncodedCopy
from monitor.save.write_tracker import LastPlans, SourceSample, TrackedCopy, WriteTracker, write_tracker
from store.errors import SaveError, StateChangedError

_log = logging.getLogger("driftpoint")

T = TypeVar("T")

WavePiece = tuple[int, torch.Tensor, torch.Tensor]  # number of later waves, elements of the live state, their buffer


class AsyncCopy:
    """Copies the live tensors of one save into host buffers.

    The training thread adds and starts. The first thread that calls :meth:`finish` completes the copies, and the other
    one waits for it, so training never depends on a background thread that hangs. Before that, buffers must not be read
    and sources not change. On CUDA, copies run in a side stream into pinned memory, after all work queued before."""

    def __init__(self) -> None:
        self.units: list[tuple[LocalUnit, Integers, Callable[[], Sequence[torch.Tensor]]]] = []
        """Units that are added but not started: (unit, addresses of its buffers, function that returns them)."""
        self._kept: list[Any] = []  # units that are copied by address: keeps their buffers alive until the end
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._samples: list[SourceSample] = []
        self._torn = self._checked = self._differ = False
        self.torn = False  # whether tracked copies are complete, but mix values of several states
        self._host: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._devices: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._encoded: list[EncodedCopy] = []
        self._watched: list[torch.Tensor] = []  # sources that are compared with themselves only
        self._queued: dict[torch.device, Any] = {}  # events after the copies in training's own streams
        self._tracked: TrackedCopy | None = None
        self._views: MemoryViews | None = None  # of all units, used instead of pairs
        self._held: Callable[[], bool] = lambda: True  # whether the memory behind the views is unchanged
        self._lock = threading.Lock()
        self._done = False

    def add_unit(self, part: LocalUnit, addresses: Integers, buffers: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Add copies of all pieces of a unit into buffers at ``addresses``, which the caller keeps alive."""
        self.units.append((part, addresses, buffers))

    def add(self, sources: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Add copies of ``sources`` into ``buffers``, pair by pair."""
        self._versions += [(source, version_of(source)) for source in sources]
        for pair in zip(sources, buffers, strict=True):
            pairs = self._devices.setdefault(pair[0].device, []) if pair[0].is_cuda else self._host
            pairs.append(pair)

    def copy_now(self, sources: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Queue copies in training's own stream, before later work there, such as a forward that changes buffers."""
        for source, buffer in zip(sources, buffers, strict=True):
            buffer.copy_(source, non_blocking=True)
        for device in {source.device for source in sources if source.is_cuda}:
            self._queued[device] = torch.cuda.current_stream(device).record_event()

    def add_encoded(self, copies: Sequence[EncodedCopy]) -> None:
        """Add fragments to be encoded on their device."""
        self._versions += [(copy.source, version_of(copy.source)) for copy in copies]
        self._encoded += copies
        self._watched += [copy.source for copy in copies]
        for copy in copies:
            if copy.source.is_cuda:
                self._devices.setdefault(copy.source.device, [])

    def start(self, last: LastViews | None = None) -> None:
        """Take the samples, and queue the copies from devices. Training thread. last: cache of views to reuse."""
        if last and self.units and any(map(_has_views, self.units[0][0].layout.regions.devices)):
            self._use_views(last.of([(part, addresses) for part, addresses, _ in self.units]))
        self._add_units()
        self._sample(self._host, "cpu")
        for device, pairs in self._devices.items():
            stream = _side_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                views = self._views if self._views and self._views.device == device else None
                self._sample(pairs, device, views)
                if views is not None:
                    views.copy()
                if pairs:
                    sources, buffers = zip(*pairs, strict=True)
                    torch._foreach_copy_(buffers, sources, non_blocking=True)
                for copy in self._encoded:
                    if copy.source.device == device:
                        copy.begin()

    def _use_views(self, views: MemoryViews | None) -> None:
        held = None if views is None else views.hold(self.units[0][0].owners)
        if views is not None and held is not None:  # else the units are copied tensor by tensor
            self._views, self._held = views, held
            self._devices.setdefault(views.device, [])
            self._kept, self.units = self.units, []

    def start_tracked(self, tracker: WriteTracker, last: LastPlans) -> bool:
        """Start with every write to the sources tracked. Return False if that is impossible. Training thread."""
        if self._host or self._devices or self._encoded or not self.units:
            return False
        regions, owners, firsts = last.sources([part for part, _, _ in self.units])
        if any(device.type != "cpu" for device in regions.devices):
            return False
        if 2 * int(regions.sizes[regions.pageable].sum()) < int(regions.sizes.sum()):
            return False  # most of it is pinned, which would be copied at once
        targets = np.concatenate([addresses for _, addresses, _ in self.units])
        if not np.array_equal(addresses_of(owners) + firsts, regions.addresses):
            return False  # the script gave tensors other memory since they were listed
        plan = last.plan(regions, targets)
        if not tracker.in_use.acquire(blocking=False):
            return False
        self._tracked = TrackedCopy(tracker, plan, owners)
        self._kept, self.units = self.units, []
        return True

    def let_change(self) -> None:
        """Return once work that is queued in the current streams from now on may change the sources.

        Copies from devices need not be complete: the streams wait for them. Training thread."""
        with self._lock:
            if not (self._done or self.units or self._host or self._encoded or self._tracked):
                self._sources_changed()
                for device in self._devices:
                    torch.cuda.current_stream(device).wait_stream(_side_stream(device))
                return
        self.finish()

    def finish(self, beside: Beside = alone) -> None:
        """Copy the host tensors, ``beside`` another thread, and return once all is complete. Later calls do nothing.

        So a CUDA graph may be captured at a later call: the capture would fail if a stream were waited for."""
        for device in () if self._done else self._devices:  # before the lock, for which let_change() would wait
            _side_stream(device).synchronize()
        with self._lock:
            if self._done:
                return
            self._done = self._torn = True  # torn until all succeed: after an error the save must not use the copies
            try:
                self._complete(beside)
            finally:
                self._views, self._held, self._kept = None, lambda: True, []

    def _complete(self, beside: Beside) -> None:
        for event in self._queued.values():
            event.synchronize()
        self._add_units()
        if self._tracked is not None:
            self.torn = self._torn = not self._tracked.finish(beside)
            return
        for source, buffer in self._host:
            buffer.copy_(source)
        for copy in self._encoded:
            if not copy.source.is_cuda:
                copy.begin()
        for device in self._devices:
            _side_stream(device).synchronize()
        for copy in self._encoded:
            copy.finish()
        self._torn = self._sources_changed() or not all(self._of_samples(SourceSample.holds))
        self._samples.clear()

    def close(self) -> None:
        """Release threads that wait for the writer, because the save is over."""

    def consolidate(self, stop: Callable[[], bool]) -> None:
        """Make the next copies of the same memory begin faster. Background thread, once the copies are complete."""
        if self._tracked is not None:
            self._tracked.consolidate(stop)

    def require_whole(self) -> None:
        """Raise StateChangedError if a source was changed in place before its copy was complete.

        With tracked writes, every change is detected. Otherwise autograd's version counters reveal most changes outside
        the optimizer, and a sample reveals others, such as those through ``.data``, unless they leave the sampled
        elements as they were."""
        if self._torn:
            raise StateChangedError(
                "the state was changed between two optimizer steps while it was copied, so this save is given up; "
                "call ckpt.copied() before such a change, or set `staging: eager`"
            )

    def _add_units(self) -> None:
        for part, _, buffers in self.units:
            self.add(part.tensors, buffers())
        self.units.clear()

    def _sample(self, pairs: Sequence[Any], device: torch.device | str, views: MemoryViews | None = None) -> None:
        watched = [source for source in self._watched if source.device == torch.device(device)]
        self._samples.append(SourceSample(pairs, watched, None if views is None else (views.sampled, views.kept)))

    def _sources_changed(self) -> bool:
        """Return whether version counters changed since the sources were added. The first call also reads samples."""
        if not self._checked:
            self._checked = True
            changed = any(version_of(source) != version for source, version in self._versions)
            self._differ = changed or not self._held()
            self._versions.clear()
            if not self._differ:  # else the views may be of memory that is gone
                self._of_samples(SourceSample.read_again)
        return self._differ

    def _of_samples(self, call: Callable[[SourceSample], T]) -> list[T]:
        """Call a method of each sample in the stream of its copies. There are no samples before the start."""
        streams: list[Any] = [nullcontext(), *(torch.cuda.stream(_side_stream(device)) for device in self._devices)]
        results = []
        for sample, stream in zip(self._samples, streams, strict=False):
            with stream:
                results.append(call(sample))
        return results


class WaveCopy(AsyncCopy):
    """Copies the state of a save in waves: each one reuses the memory of the wave before, once that is written.

    The writer thread copies a wave when it needs it; the training thread copies the first one if it waits earlier.
    Training waits at most ``timeout`` seconds for storage; then the save is given up. The state must not change until
    all is copied, which is checked as for other copies. ``lazy``: whether copying may go on after the decision."""

    def __init__(self, pieces: Sequence[WavePiece], timeout: float, *, lazy: bool) -> None:
        super().__init__()
        self._pieces, self._timeout, self.lazy = pieces, timeout, lazy
        self._watched = [source for _, source, _ in pieces]
        self._versions = [(source, version_of(source)) for source in self._watched]
        self._devices = {source.device: [] for source in self._watched if source.is_cuda}
        self._change = threading.Condition()
        self._over: SaveError | None = None  # why no more waves are copied
        self._first = self._left = pieces[0][0] + 1 if pieces else 0  # number of waves, and of those not copied yet

    def finish(self, beside: Beside = alone) -> None:
        """Do nothing: see :meth:`let_change` and :meth:`take`."""

    def let_change(self, timeout: float | None = None) -> None:
        """Return once all waves are copied, or the save is given up. Training thread. timeout: None for the usual."""
        began = time.monotonic()
        with self._change:
            if self._left and self._left == self._first:
                self._copy_next()
            if self._left and not self._over:
                if self._change.wait_for(lambda: not self._left or self._over, timeout or self._timeout):
                    _log.info("training waited %.2f s for storage (staging.max_bytes)", time.monotonic() - began)
                    return
                self.close(SaveError("storage took longer than timeouts.staging: raise that, or staging.max_bytes"))
                _log.warning("this save is given up, and training continues: %s", self._over)

    def take(self, pieces: Iterable[WavePiece]) -> Iterator[torch.Tensor]:
        """Yield copies, each valid until one of a later wave is taken. Writer. Raises SaveError for a given-up save."""
        for left, _, copy in pieces:
            with self._change:
                if left == self._left - 1 and not self._over:
                    self._copy_next()
                if self._over or left != self._left:
                    raise self._over or SaveError("a wave cannot be written again")
                self.require_whole()
            yield copy

    def close(self, error: SaveError | None = None) -> None:
        with self._change:
            self._over = self._over or error or SaveError("the save is over")
            self._change.notify_all()

    def _copy_next(self) -> None:
        try:
            for left, source, copy in self._pieces:
                if left == self._left - 1:
                    with torch.cuda.stream(_side_stream(source.device)) if source.is_cuda else nullcontext():
                        copy.copy_(source, non_blocking=True)
            for device in self._devices:
                _side_stream(device).synchronize()
            self._left -= 1
            self._torn = not self._left and (self._sources_changed() or not all(self._of_samples(SourceSample.holds)))
        except Exception as error:  # noqa: BLE001 - of the training thread, too: kept as the save's failure
            self.close(SaveError(f"the state could not be copied: {error!r}"))
        self._change.notify_all()


class CopyTiming:
    """Chooses when the copies of a job are made, for its saves and its snapshots. Training thread.

    They run beside training if the state is ``private`` to the optimizer, if the user set ``lazy``, or if all writes to
    the state are tracked, until a write is found. Otherwise they are complete before :meth:`start` returns."""

    def __init__(self, setting: Literal["auto", "eager", "lazy"], *, private: bool) -> None:
        self._lazy = setting == "lazy" or (setting == "auto" and private)
        self._tracker = write_tracker() if setting == "auto" else None
        self._last = AsyncCopy()  # the last one with tracked writes
        self._plan, self._views = LastPlans(), LastViews()

    def start(self, copying: AsyncCopy) -> None:
        """Start the copies, and complete them if they are not made beside training."""
        if self._tracker is not None and self._last.torn:
            self._tracker, self._lazy = None, False
            _log.warning(
                "the state was changed between two optimizer steps, so copies are made before ckpt.step() returns from "
                "now on, which takes longer. Make such changes before ckpt.step(), or call ckpt.copied() before them"
            )
        if isinstance(copying, WaveCopy):
            copying.lazy &= self._lazy
        elif self._tracker is not None and copying.start_tracked(self._tracker, self._plan):
            self._last = copying
            return
        copying.start(self._views)
        if not self._lazy:
            copying.finish()


class UnfinishedCopy:
    """The copies of the last save, which the next change of the state waits for. waited: called with the seconds."""

    def __init__(self, adapter: Adapter, waited: Callable[[float], None]) -> None:
        self._copying: AsyncCopy | Once[None] | None = None
        self._waited = waited
        adapter.before_change(self.before_update)

    def set(self, copying: AsyncCopy | Once[None] | None) -> None:
        self._copying = copying

    def finish(self) -> None:
        """Return once the copies are complete. Does not wait for waves."""
        if self._copying is not None:
            self._copying.finish()

    def before_update(self) -> None:
        copying, self._copying = self._copying, None
        if isinstance(copying, AsyncCopy):
            began = time.perf_counter()
            copying.let_change()
            self._waited(time.perf_counter() - began)
        elif copying is not None:  # work after a resume, which is no wait for a save
            copying.finish()


def _has_views(device: torch.device) -> bool:
    return device.type == "cuda"


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
