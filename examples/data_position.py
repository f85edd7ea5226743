"""Keep a job's place in its data as one number, the samples that all ranks took, so that it fits any number of ranks.

Copy this file beside your training script; ``docs/data.md`` shows it at work. It needs torch, and takes torchdata's
``StatefulDataLoader``. Pass the :class:`DataPosition` in ``state={"data": ...}`` of ``monitor.attach``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


class GlobalOrder(Sampler[int]):
    """This rank's samples of a map-style dataset, from a position on.

    The data is one endless row: a permutation of the dataset for every epoch, one after the other. A batch of all ranks
    is its next ``batch_size * world_size`` samples, and each rank takes ``batch_size`` of them. The last batch of an
    epoch takes what it lacks from the next one. So nothing is repeated or left out, wherever the number of ranks
    changes, and while ``batch_size * world_size`` stays the same, each step gets the same samples.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        started = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if started else 0
        self.world_size = world_size if world_size is not None else dist.get_world_size() if started else 1
        if min(length, batch_size) < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"{length} samples in batches of {batch_size} for rank {self.rank} of {self.world_size}: give a "
                "dataset with samples, a batch size of at least 1, and a data rank below the number of data ranks"
            )
        self.length, self.batch_size, self.seed, self.shuffle = length, batch_size, seed, shuffle
        self.position = 0  # samples that all ranks took before the next iteration
        self._known: dict[int, list[int]] = {}

    @property
    def step(self) -> int:
        """Samples in a batch of all ranks."""
        return self.batch_size * self.world_size

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self.position // self.length

    def __len__(self) -> int:
        left = (self.epoch + 1) * self.length - self.position
        return -(-left // self.step) * self.batch_size

    def __iter__(self) -> Iterator[int]:
        first = self.position + self.rank * self.batch_size
        for batch in range(len(self) // self.batch_size):
            at = first + batch * self.step
            yield from map(self.sample, range(at, at + self.batch_size))

    def sample(self, at: int) -> int:
        """Return the index in the dataset of a place in the endless row."""
        epoch, place = divmod(at, self.length)
        if not self.shuffle:
            return place
        if epoch not in self._known:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._known = {key: order for key, order in self._known.items() if key >= epoch - 1}
            self._known[epoch] = torch.randperm(self.length, generator=generator).tolist()
        return self._known[epoch][place]


class DataPosition:
    """A data loader that is iterated in the loader's place, and knows how far the training has come.

    Iterate it once for every epoch; after a ``break``, the next iteration of map-style data is the rest of the epoch.
    What was iterated when the state is saved counts as taken, also where workers of the loader are ahead.

    Args:
        loader: torchdata's ``StatefulDataLoader``.
        order: its sampler, of map-style data. Without one, data is iterable, and each rank's place is the loader's
            alone: with another number of ranks, samples would be repeated or left out, so a resume is refused.
    """

    def __init__(self, loader: Any, order: GlobalOrder | None = None) -> None:
        if order is not None and getattr(loader, "batch_size", None) != order.batch_size:
            raise ValueError(
                f"the loader has batches of {getattr(loader, 'batch_size', None)}, the order of {order.batch_size}: "
                "give both the same batch_size"
            )
        if order is not None and getattr(loader, "sampler", order) is not order:
            raise ValueError("the loader takes its samples in another order: give it sampler=order")
        self.loader, self.order = loader, order
        self._batches = 0  # taken in this iteration, or in the one that goes on with the next
        self._begin_with: Any = None  # state of the loader for the next iteration
        self._iterating = False

    @property
    def samples(self) -> int:
        """Samples that all ranks have taken, of all epochs; of iterable data, batches of this iteration."""
        if self.order is None:
            return self._batches
        return self.order.position + self._batches * self.order.step

    def __len__(self) -> int:
        return len(self.loader) - self._batches

    def __iter__(self) -> Iterator[Any]:
        if self._begin_with is None:
            if self.order is not None:
                self.order.position = self.samples  # after a break
            self._batches = 0
        self._begin_with, self._iterating = None, True
        for batch in self.loader:
            self._batches += 1
            yield batch
        if self.order is not None:
            self.order.position = self.samples
        self._batches, self._iterating = 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return plain data. Between two epochs the loader is not asked: it would start its workers."""
        return {
            "samples": self.samples,
            "begun_at": 0 if self.order is None else self.order.position,
            "row": self._row(),
            "ranks": self._ranks(),
            "loader": self.loader.state_dict() if self._iterating else self._begin_with,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go to a saved place. With the same ranks and batch size, the loader restores its own state as well.

        ValueError for iterable data of another number of ranks, and for data of another length, seed or shuffling.
        """
        if saved.get("row", self._row()) != self._row():
            raise ValueError(
                f"the data had (length, seed, shuffle) = {saved['row']} when the place was saved and has {self._row()} "
                "now, so the place means other samples: give it the same, or pass {'data': None} and choose a place"
            )
        same = list(saved["ranks"]) == self._ranks()
        if self.order is None and not same:
            raise ValueError(
                f"iterable data was saved by rank {saved['ranks'][0]} of {saved['ranks'][1]}, and this is rank "
                f"{self._ranks()[0]} of {self._ranks()[1]}: each rank's place is its own, so samples would be repeated "
                "or left out. Resume with as many ranks, or pass {'data': None} and go to a place of your own"
            )
        self._batches, self._begin_with, self._iterating = 0, None, False
        self.loader.load_state_dict({})  # drops an iteration that has begun
        if self.order is not None:
            self.order.position = saved["samples"]
        if same and saved["loader"] is not None:
            self.loader.load_state_dict(saved["loader"])
            self._begin_with, self._batches = saved["loader"], saved["samples"]
            if self.order is not None:
                self.order.position = saved["begun_at"]
                self._batches = (saved["samples"] - saved["begun_at"]) // self.order.step

    def _row(self) -> list[Any] | None:
        order = self.order
        return None if order is None else [order.length, order.seed, order.shuffle]

    def _ranks(self) -> list[int]:
        if self.order is not None:
            return [self.order.rank, self.order.world_size, self.order.batch_size]
        started = dist.is_available() and dist.is_initialized()
        return [dist.get_rank(), dist.get_world_size()] if started else [0, 1]
