"""Run small CPU collectives, execute actions on all ranks or none, and identify nodes.

Collectives use a gloo group of their own, so they never interleave with the framework's collectives on the accelerator.
They wait for a late rank as long as the job's own collectives do. Training thread only, except ``AsyncSum.start``."""

import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from monitor.background import run_in_background
from store import errors
from store.errors import CollectiveError, DriftpointError
from store.memory.layout import Tier


class Group:
    """Collectives of a job with a single process; :class:`GlooGroup` implements them over ranks. Values are plain data.

    Every rank calls them in the same order. They raise CollectiveError if a rank is gone, or later than the job's
    timeout. No collective works after that: call :meth:`leave`, so that other ranks do not wait for this one."""

    rank = 0
    world_size = 1

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise maximum over ranks."""
        return list(values)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise sum over ranks of a float64 tensor."""
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value."""
        return value

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        return [value]

    def async_sum(self) -> "AsyncSum | None":
        """Create an :class:`AsyncSum`. Return None in a job of one process. Collective."""
        return None

    def barrier(self, timeout: float) -> Callable[[], bool]:
        """Create a function that waits until all ranks call it. It returns False if a rank is late or gone.

        It has its own process group, so after one failure it never works again. Collective."""
        del timeout
        return lambda: True

    def leave(self) -> None:
        """Make the collectives fail from now on, here and on the ranks that wait in one. Not collective.

        It ends the threads of all process groups: one that still holds a tensor at exit aborts the process."""


class GlooGroup(Group):
    """All ranks of the default process group, over gloo. Construction is collective."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = _new_group()
        self._sums: list[AsyncSum] = []
        self._barriers: list[list[dist.ProcessGroup]] = []  # one process group each, none after leave()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        tensor = torch.tensor(list(values), dtype=torch.int64, device="cpu")
        with _collective(self._group, self.leave):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor.tolist()]

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        summed = values.to(torch.float64).clone()
        with _collective(self._group, self.leave):
            dist.all_reduce(summed, op=dist.ReduceOp.SUM, group=self._group)
        return summed

    def broadcast(self, value: Any) -> Any:
        sent = pickle.dumps(value) if self.rank == 0 else b""

        def send(message: torch.Tensor) -> list[torch.Tensor]:
            dist.broadcast(message, src=0, group=self._group)
            return [message]

        with _collective(self._group, self.leave):
            (received,) = _exchange(sent, _BROADCAST, send)
        return value if self.rank == 0 else pickle.loads(received)

    def all_gather(self, value: Any) -> list[Any]:
        def send(message: torch.Tensor) -> list[torch.Tensor]:
            messages = [torch.empty_like(message) for _ in range(self.world_size)]
            dist.all_gather(messages, message, group=self._group)
            return messages

        with _collective(self._group, self.leave):
            received = _exchange(pickle.dumps(value), _GATHER, send)
        return [pickle.loads(message) for message in received]

    def async_sum(self) -> "AsyncSum":
        """Create a sum with its own process group, since its reductions outlast calls."""
        self._sums.append(AsyncSum())
        return self._sums[-1]

    def barrier(self, timeout: float) -> Callable[[], bool]:
        """Create a barrier with rank 0's ``timeout`` in seconds, at least 1."""
        bound = timedelta(seconds=max(1.0, self.broadcast(timeout)))
        # The group needs the same timeout: the other ranks wait for rank 0 as long as that.
        groups = [dist.new_group(backend="gloo", timeout=bound)]
        self._barriers.append(groups)

        def meet() -> bool:
            _require_member(self._group)
            try:
                dist.monitored_barrier(groups[0], timeout=bound)
            except (RuntimeError, ValueError, AssertionError):  # the last two: the process group is destroyed
                return False
            return True

        return meet

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            _destroy(group)
        for async_sum in self._sums:
            async_sum.leave()
        for groups in self._barriers:
            while groups:
                _destroy(groups.pop())


class AsyncSum:
    """Sums over ranks without waiting. All ranks must call :meth:`start` and :meth:`finish` equally often, in turn.

    It has a process group of its own. Construction is collective. Any thread may call :meth:`start`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # or a rank that leaves meanwhile would have torch take the default group
        self._group: dist.ProcessGroup | None = _new_group()
        self._values = torch.zeros(0, device="cpu")
        self._work: dist.Work | None = None

    @property
    def under_way(self) -> bool:
        """Whether a sum was begun and not returned."""
        return self._work is not None

    @property
    def done(self) -> bool:
        """Whether :meth:`finish` would return a sum without waiting. False if it would raise."""
        with suppress(RuntimeError):  # value() raises where the sum failed; torch warns of exception()
            return self._work is not None and self._work.is_completed() and self._work.get_future().value() is not None
        return False

    def start(self, values: torch.Tensor) -> None:
        """Begin to sum ``values``, in place: the caller must not use it again. Raises CollectiveError."""
        with self._lock, _collective(self._group, self.leave):
            self._values = values
            self._work = dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self._group, async_op=True)

    def finish(self) -> torch.Tensor | None:
        """Return the sum begun last; None if it was returned, or none was begun.

        It waits only for ranks that have not begun it yet. Raises CollectiveError if another rank is late or gone."""
        if self._work is None:
            return None
        with _collective(self._group, self.leave):
            self._work.wait()
        self._work = None
        return self._values

    def leave(self) -> None:
        """Leave as :meth:`Group.leave` does. A sum under way is first waited for, in the background."""
        locked = self._lock.acquire(timeout=_BEGINNING)
        try:
            group, work, self._group, self._work = self._group, self._work, None, None
        finally:
            if locked:
                self._lock.release()
        if group is not None and work is not None and not work.is_completed():
            with suppress(RuntimeError):  # at exit, no thread can be started
                run_in_background("driftpoint-leave", partial(_destroy, group, work))
        elif group is not None:
            _destroy(group)


_LENGTH = 8  # bytes that tell the length of a message
_GATHER, _BROADCAST = 1 << 10, 1 << 14  # message bytes in the first collective; longer messages need a second one


def _exchange(sent: bytes, size: int, send: Callable[[torch.Tensor], list[torch.Tensor]]) -> list[bytes]:
    """Return the messages that ``send``, a collective over tensors of one size, delivers. size: bytes at first.

    Messages are pickled, as torch's object collectives do, so ranks must trust each other."""
    received = send(_message(sent, size))
    longest = max(int(one[:_LENGTH].view(torch.int64)) for one in received)
    if longest > size:
        received = send(_message(sent, longest))
    return [one[_LENGTH : _LENGTH + int(one[:_LENGTH].view(torch.int64))].numpy().tobytes() for one in received]


def _message(data: bytes, size: int) -> torch.Tensor:
    """Return the length of ``data`` and its first ``size`` bytes, zero-padded, as one tensor."""
    text = (len(data).to_bytes(_LENGTH, sys.byteorder) + data)[: _LENGTH + size]
    return torch.frombuffer(bytearray(text.ljust(_LENGTH + size, b"\0")), dtype=torch.uint8)


def _destroy(group: dist.ProcessGroup, work: dist.Work | None = None) -> None:
    """Close the group's connections, and end its threads once the caller drops it.

    Not before ``work`` is over, which would hold the interpreter. It never waits in C++, where a thread that is left at
    exit aborts the process."""
    while work is not None and not work.is_completed():
        time.sleep(_POLL)
    with suppress(ValueError):  # the job destroyed all groups
        dist.destroy_process_group(group)


@contextmanager
def _collective(group: dist.ProcessGroup | None, leave: Callable[[], None]) -> Iterator[None]:
    """Raise torch's error about ranks that are late or gone as CollectiveError, after calling ``leave``.

    A failed collective may leave data in the connections that blocks the next one until its timeout."""
    _require_member(group)
    try:
        yield
    except RuntimeError as error:
        leave()
        raise CollectiveError(f"another rank is later than the job's timeout, or gone: {error}") from error


def _require_member(group: dist.ProcessGroup | None) -> None:
    if group is None:  # torch would take None for the default group
        raise CollectiveError("this rank has left the collectives")


_POLL = 0.02  # seconds
_BEGINNING = 5.0  # most seconds to begin a sum, which waits for all ranks with TORCH_DISTRIBUTED_DEBUG=DETAIL
_SHORTEST_TIMEOUT = timedelta(minutes=30)
"""torch's default for gloo. Ranks may be this late even if the timeout of the accelerator's backend is shorter."""

_UNKNOWN_TIMEOUT = timedelta(days=7)
"""Used if the job's timeout cannot be found. So long, because a late rank must not end training."""


def _new_group() -> dist.ProcessGroup:
    """Make a gloo group of all ranks, with the timeout of the job's default process group. Collective."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_job_timeout())
    return group


def _job_timeout() -> timedelta:
    """Return the longest timeout of the default process group's backends, at least ``_SHORTEST_TIMEOUT``."""
    timeouts: list[timedelta] = []
    try:
        world: Any = dist.group.WORLD
        for device in world._device_types:  # torch has no public access to a group's timeout
            timeouts.append(world._get_backend(device).options._timeout)
    except (AttributeError, RuntimeError, TypeError):
        timeouts.append(_UNKNOWN_TIMEOUT)
    return max(_SHORTEST_TIMEOUT, *timeouts) if timeouts else _UNKNOWN_TIMEOUT


def current_group() -> Group:
    """Return the group of this job: all ranks of the default process group, or this process alone."""
    return GlooGroup() if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else Group()


T = TypeVar("T")


def run_on_all_ranks(group: Group, action: Callable[[], T]) -> T:
    """Run ``action`` on all ranks and return this rank's result, or raise on all ranks if any rank fails.

    The failing rank raises its own exception; the others raise the same error type if it is a DriftpointError, else
    DriftpointError. Without this, the other ranks would block in their next collective. Collective."""
    result, local_error = _attempt(action)
    try:
        errors_by_rank = group.all_gather(_pack_error(local_error))
    except CollectiveError as error:
        raise error from (local_error or error.__cause__)
    if local_error is not None:
        raise local_error
    failed = [(rank, packed) for rank, packed in enumerate(errors_by_rank) if packed is not None]
    if failed:
        rank, (kind, message) = failed[0]
        raise _unpack_error(kind, f"rank {rank}: {message}")
    return result  # type: ignore[return-value]


def run_on_rank0(group: Group, action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 and return its result, or raise its error, on all ranks. Collective.

    The result must be plain data."""
    result, local_error = _attempt(action) if group.rank == 0 else (None, None)
    result, failed = group.broadcast((result, _pack_error(local_error)))
    if local_error is not None:
        raise local_error
    if failed is not None:
        raise _unpack_error(*failed)
    return result  # type: ignore[no-any-return]


def collect_messages(group: Group, message: str | None) -> str:
    """Join the distinct messages of all ranks, each with the first rank that has it. Collective."""
    first_rank: dict[str, int] = {}
    for rank, text in enumerate(group.all_gather(message)):
        if text is not None:
            first_rank.setdefault(text, rank)
    return "; ".join(f"rank {rank}: {text}" if group.world_size > 1 else text for text, rank in first_rank.items())


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - this rank's edge: raised again once the others know
        return None, error


def _pack_error(error: Exception | None) -> tuple[str, str] | None:
    if error is None:
        return None
    own = isinstance(error, DriftpointError)  # others need their class: str(KeyError('n')) is just 'n'
    return type(error).__name__, str(error) if own else repr(error)


def _unpack_error(kind: str, message: str) -> DriftpointError:
    error_type = getattr(errors, kind, DriftpointError)
    known = isinstance(error_type, type) and issubclass(error_type, DriftpointError)
    return error_type(message) if known else DriftpointError(message)


def node_id(tier: Tier) -> str:
    """Return an id that is equal for ranks that share memory, and only for those.

    Several containers on one machine are several nodes; they are lost together (see :func:`machine_id`)."""
    return f"{socket.gethostname()} {machine_id()} {tier.folder} {_mount(tier)}"


def machine_id() -> str:
    """Return an id that is equal for all processes on one machine; empty if the machine has no boot id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _mount(tier: Tier) -> str:
    """Return the device and inode of the memory mount: containers may share a host name but not their memory."""
    try:
        status = tier.base.stat()
    except OSError:
        return ""
    return f"{status.st_dev} {status.st_ino}"
