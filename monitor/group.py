"""The ranks of a job, as far as a checkpointer must talk to them: small CPU collectives, main thread only.

A process group of its own on gloo, so that nothing here orders itself among the framework's own collectives on
the accelerator. Background threads never call into this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Group(Protocol):
    """Collectives that every rank calls in the same order."""

    rank: int
    world_size: int

    def largest(self, values: Sequence[int]) -> list[int]:
        """Element-wise maximum over ranks."""
        ...

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over ranks of a float64 tensor."""
        ...

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Plain data only."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in rank order. Plain data only."""
        ...

    def relay(self) -> Relay:
        """A new one; collective."""
        ...


class Relay(Protocol):
    """Passes a flag on from one call to the next, over all ranks."""

    def swap(self, flag: bool) -> bool:
        """Whether any rank gave True in the call before; then ``flag`` is not sent. Every rank calls it equally often.

        Waits for ranks that have not made the call before, and for none that has. RuntimeError where one is gone."""
        ...


class Alone:
    """A job of one process."""

    rank = 0
    world_size = 1

    def largest(self, values: Sequence[int]) -> list[int]:
        """See :class:`Group`."""
        return list(values)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """See :class:`Group`."""
        return values

    def from_first(self, value: Any) -> Any:
        """See :class:`Group`."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """See :class:`Group`."""
        return [value]

    def relay(self) -> Relay:
        """See :class:`Group`."""
        return _Direct()


class _Direct:
    """There is nobody to wait for."""

    def swap(self, flag: bool) -> bool:
        """See :class:`Relay`."""
        return flag


class Gloo:
    """All ranks of the default process group, over gloo. Making one is collective."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def largest(self, values: Sequence[int]) -> list[int]:
        """See :class:`Group`."""
        tensor = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor.tolist()]

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """See :class:`Group`."""
        summed = values.to(torch.float64).clone()
        dist.all_reduce(summed, op=dist.ReduceOp.SUM, group=self._group)
        return summed

    def from_first(self, value: Any) -> Any:
        """See :class:`Group`."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """See :class:`Group`."""
        boxes: list[Any] = [None] * self.world_size
        dist.all_gather_object(boxes, value, group=self._group)
        return boxes

    def relay(self) -> Relay:
        """See :class:`Group`. It has a process group of its own: its reductions outlast calls."""
        return _GlooRelay()


class _GlooRelay:
    """One reduction under way between two calls."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None

    def swap(self, flag: bool) -> bool:
        """See :class:`Relay`."""
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
        return Gloo()
    return Alone()
