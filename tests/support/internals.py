"""Parts of a checkpointer without a public name, for tests that watch a job or hold it up. No other file reads them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

import monitor
from monitor.context import JobContext
from monitor.events import SaveListener
from monitor.memory.tier import MemoryTier
from monitor.observe.drift_meter import BySlotMeter, DriftMeter
from monitor.observe.sketch_meter import SketchMeter
from monitor.save.encode import Packer
from monitor.save.saver import Saver
from monitor.save.store_session import StoreSession
from monitor.telemetry.drift_history import DriftHistory
from monitor.telemetry.trace import TraceRecorder
from store.names import Fragment, SaveId, Unit
from store.storage.local import Files
from tests.support.hooked import HookedFiles

_Listener = TypeVar("_Listener", bound=SaveListener)

LATER = SaveId(10**9, 1)
"""Newer than any save of a test."""


def job_of(ckpt: monitor.Checkpointer) -> JobContext:
    """Parts of the job that all components share: adapter, units, schedule, listeners."""
    return ckpt._job


def saver_of(ckpt: monitor.Checkpointer) -> Saver:
    """Return the saver of a job that does not only observe."""
    saver = ckpt._saver
    assert isinstance(saver, Saver)
    return saver


def packer_of(ckpt: monitor.Checkpointer) -> Packer:
    """Return what chooses bases and zstd levels."""
    return saver_of(ckpt)._packer


def base_bytes(packer: Packer) -> int:
    """Return the bytes of all bases that are kept for differences."""
    kept = [one for base in packer._bases.values() for one in (base, base.whole) if one is not None]
    return sum(chunk.nbytes for base in kept for chunk in base.chunks)


def session_of(ckpt: monitor.Checkpointer) -> StoreSession:
    """Return the open store."""
    session = ckpt._opened
    assert session is not None
    return session


def memory_of(ckpt: monitor.Checkpointer) -> MemoryTier | None:
    """Return the memory tier, None if it is not configured."""
    return ckpt._memory


def has_reference(meter: DriftMeter, unit: Unit) -> bool:
    """Return whether a meter knows a committed version of the unit."""
    own: Any = meter._of(unit) if isinstance(meter, BySlotMeter) else meter
    return unit in own._references


def signature_bytes(meter: SketchMeter) -> int:
    """Return the bytes of all signatures and samples that a meter holds."""
    measured = (*meter._measured.values(), *meter._staged_as.values())
    signatures = (*meter._references.values(), *(one.signature for one in measured))
    samples = (one.sample.nbytes for one in measured if one.sample is not None)
    return sum(one.values.nbytes for one in signatures) + sum(samples)


def board_bytes(meter: SketchMeter) -> int:
    """Return the bytes of the tables and accumulators of a meter."""
    parts = (part for board in meter._projection._boards.values() for part in vars(board).values())
    return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))


def history_bytes(history: DriftHistory | None) -> int:
    """Return the bytes of the signatures that a trace keeps."""
    return 0 if history is None else sum(decision.values.nbytes for decision in history._decisions.values())


def tracer_of(ckpt: monitor.Checkpointer) -> TraceRecorder:
    """Return the recorder of the drift trace."""
    return next(one for one in ckpt._job.listeners.all if isinstance(one, TraceRecorder))


def replace_files(ckpt: monitor.Checkpointer, make: Callable[[Files], Files]) -> None:
    """From now on saves go to ``make(files)``."""
    session = session_of(ckpt)
    session.files = make(session.files)


def hook_files(ckpt: monitor.Checkpointer) -> HookedFiles:
    """From now on saves go through hooks."""
    replace_files(ckpt, HookedFiles)
    files = session_of(ckpt).files
    assert isinstance(files, HookedFiles)
    return files


def hold_writer(ckpt: monitor.Checkpointer, release: threading.Event) -> None:
    """Keep the background thread from starting anything else until ``release`` is set."""

    def hold() -> None:
        assert release.wait(180)

    saver_of(ckpt).upkeep(hold, "holding the writer")


def staging_buffers(ckpt: monitor.Checkpointer) -> list[Unit]:
    """Units that a save has buffers for, of its own, and that are not in use."""
    stager = saver_of(ckpt)._stager
    together = [] if stager._free is None else stager._free.staged
    return [*(unit for unit, free in stager._pool._free.items() if free), *(one.unit for one in together)]


def buffers_of(ckpt: monitor.Checkpointer) -> dict[Unit, list[int]]:
    """Addresses of the buffers of the save under way."""
    task = saver_of(ckpt).task
    assert task is not None
    return {one.unit: [copy.data_ptr() for copy in one.copies] for one in task.staged}


def staged_copies(ckpt: monitor.Checkpointer) -> dict[Fragment, torch.Tensor]:
    """What the save under way is written from."""
    task = saver_of(ckpt).task
    assert task is not None
    return {
        fragment: copy.clone()
        for unit in task.staged
        for fragment, copy in zip(unit.fragments, unit.copies, strict=True)
    }


def settle_save(ckpt: monitor.Checkpointer, step: int) -> None:
    """Settle the finished save as the next decision would."""
    ckpt._saver.settle(step, False)


def decide_without_update(ckpt: monitor.Checkpointer) -> monitor.StepReport:
    """Count a step and decide, although the optimizer took none."""
    shift_step(ckpt, 1)
    return ckpt._decide(None, 0.0)


def shift_step(ckpt: monitor.Checkpointer, by: int) -> None:
    """Change the step count of this rank."""
    ckpt._step += by


def wait_for_snapshot(ckpt: monitor.Checkpointer) -> None:
    """Wait until the pending snapshot in memory is sealed."""
    memory = memory_of(ckpt)
    assert memory is not None and memory.wait(180)


def wait_for_replicas(ckpt: monitor.Checkpointer) -> None:
    """Wait until what this rank sends to other nodes has arrived or failed."""
    memory = memory_of(ckpt)
    sender = None if memory is None else memory._replication._sender
    assert sender is None or sender.wait(180)


def abandon(ckpt: monitor.Checkpointer) -> None:
    """Leave behind what a killed process leaves: finish the save, release locks, and report no end to anybody."""
    ckpt._closed = True
    ckpt.flush()
    saver, memory = saver_of(ckpt), memory_of(ckpt)
    assert memory is not None and memory.wait(180)
    saver._writer.stop()
    memory._writer.stop()
    arena = memory._buffers.arena
    assert arena is not None or memory._disabled
    if arena is not None:
        arena.close(remove=False)
    saver._session.release()
    tracer_of(ckpt).close(1.0)


def note_difference(ckpt: monitor.Checkpointer, text: str) -> None:
    """Let the last self-check have found a difference when it read the save back."""
    ckpt.flush()
    saver = saver_of(ckpt)
    saver._collect()
    saver.checker.differs = saver.checker._shown = (text,)


def listen(ckpt: monitor.Checkpointer, listener: _Listener) -> _Listener:
    """Add a listener to the job's."""
    listeners = ckpt._listeners
    listeners.all = (*listeners.all, listener)
    return listener


def wave_bytes(ckpt: monitor.Checkpointer) -> int:
    """Bytes of host memory that the waves of a save are copied into; 0 before the first one."""
    block = saver_of(ckpt)._stager._pool._block
    return 0 if block is None else block.nbytes
