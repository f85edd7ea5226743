"""Process group wrapper, all-or-none execution, node identity.

The ranks of a job, as far as a checkpointer must talk to them: small CPU collectives, main thread only.

A process group of its own on gloo, so that nothing here orders itself among the framework's own collectives on
the accelerator. Background threads never call into this module.

All ranks or none: run something on every rank (or on rank 0) and let an error on any of them be everybody's.

Without this, the rank that failed raises while the others wait in a collective for good. That goes for any error,
also one that nobody raises on purpose: the rank that has it raises it as it is, the others a DriftpointError.

What a node is called, so that ranks can tell whether they are on the same one: whether they see the same memory.

Several nodes in this sense may be containers on one machine, and are lost together.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from store import errors
from store.errors import DriftpointError
from store.memory.layout import Tier


class Group(Protocol):
    """Collectives that every rank calls in the same order."""

    rank: int
    world_size: int

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """Element-wise maximum over ranks."""
        ...

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over ranks of a float64 tensor."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Plain data only."""
        ...

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in rank order. Plain data only."""
        ...

    def async_flag(self) -> AsyncFlag:
        """A new one; collective."""
        ...


class AsyncFlag(Protocol):
    """Passes a flag on from one call to the next, over all ranks."""

    def exchange(self, flag: bool) -> bool:
        """Whether any rank gave True in the call before; then ``flag`` is not sent. Every rank calls it equally often.

        Waits for ranks that have not made the call before, and for none that has. RuntimeError where one is gone."""
        ...


class SingleProcessGroup:
    """A job of one process."""

    rank = 0
    world_size = 1

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """See :class:`Group`."""
        return list(values)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """See :class:`Group`."""
        return values

    def broadcast(self, value: Any) -> Any:
        """See :class:`Group`."""
        return value

    def all_gather(self, value: Any) -> list[Any]:
        """See :class:`Group`."""
        return [value]

    def async_flag(self) -> AsyncFlag:
        """See :class:`Group`."""
        return _ImmediateFlag()


class _ImmediateFlag:
    """There is nobody to wait for."""

    def exchange(self, flag: bool) -> bool:
        """See :class:`AsyncFlag`."""
        return flag


class GlooGroup:
    """All ranks of the default process group, over gloo. Making one is collective."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """See :class:`Group`."""
        tensor = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor.tolist()]

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """See :class:`Group`."""
        summed = values.to(torch.float64).clone()
        dist.all_reduce(summed, op=dist.ReduceOp.SUM, group=self._group)
        return summed

    def broadcast(self, value: Any) -> Any:
        """See :class:`Group`."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def all_gather(self, value: Any) -> list[Any]:
        """See :class:`Group`."""
        boxes: list[Any] = [None] * self.world_size
        dist.all_gather_object(boxes, value, group=self._group)
        return boxes

    def async_flag(self) -> AsyncFlag:
        """See :class:`Group`. It has a process group of its own: its reductions outlast calls."""
        return _GlooAsyncFlag()


class _GlooAsyncFlag:
    """One reduction under way between two calls."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None

    def exchange(self, flag: bool) -> bool:
        """See :class:`AsyncFlag`."""
        if self._work is not None:
            self._work.wait()
            if int(self._flag.item()):
                self._work = None
                return True
        self._flag[0] = int(flag)
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return False


def current_group() -> Group:
    """The ranks of this job: those of the default process group, or this process alone."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return GlooGroup()
    return SingleProcessGroup()


T = TypeVar("T")


def run_on_all_ranks(group: Group, action: Callable[[], T]) -> T:
    """The action's result on this rank, once it succeeded on every rank. Else an error on every rank."""
    result: T | None = None
    mine: Exception | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - this rank's edge: raised again once the others know
        mine = error
    told = group.all_gather(None if mine is None else _packed(mine))
    if mine is not None:
        raise mine
    failed = [(rank, packed) for rank, packed in enumerate(told) if packed is not None]
    if failed:
        rank, (kind, message) = failed[0]
        raise _unpacked(kind, f"rank {rank}: {message}")
    return result  # type: ignore[return-value]


def run_on_rank0(group: Group, action: Callable[[], T]) -> T:
    """Rank 0's result on every rank, or rank 0's error on every rank. The result must be plain data."""
    packed: tuple[T | None, tuple[str, str] | None] = (None, None)
    mine: Exception | None = None
    if group.rank == 0:
        try:
            packed = (action(), None)
        except Exception as error:  # noqa: BLE001 - this rank's edge: raised again once the others know
            mine = error
            packed = (None, _packed(error))
    result, failed = group.broadcast(packed)
    if mine is not None:
        raise mine
    if failed is not None:
        raise _unpacked(*failed)
    return result  # type: ignore[no-any-return]


def collect_messages(group: Group, mine: str | None) -> str:
    """What any rank has to say, and which; collective. Alike on all of them, most of the time."""
    told: dict[str, int] = {}
    for rank, text in enumerate(group.all_gather(mine)):
        if text is not None:
            told.setdefault(text, rank)
    return "; ".join(f"rank {rank}: {text}" if group.world_size > 1 else text for text, rank in told.items())


def _packed(error: Exception) -> tuple[str, str]:
    named = isinstance(error, DriftpointError)  # others say little without their class: KeyError('n') says 'n'
    return type(error).__name__, str(error) if named else repr(error)


def _unpacked(kind: str, message: str) -> DriftpointError:
    found = getattr(errors, kind, DriftpointError)
    known = isinstance(found, type) and issubclass(found, DriftpointError)
    return found(message) if known else DriftpointError(message)


def node_id(tier: Tier) -> str:
    """Alike for ranks that share memory, and for no others."""
    return f"{socket.gethostname()} {machine_id()} {tier.folder} {_mount(tier)}"


def machine_id() -> str:
    """Alike for all that is lost when a machine is, and for nothing else; empty where that cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _mount(tier: Tier) -> str:
    """Tells containers apart that share a machine and a host name, but not their memory."""
    try:
        status = tier.base.stat()
    except OSError:
        return ""
    return f"{status.st_dev} {status.st_ino}"
