"""Compare the ranks of a job: tensors that several hold whole, and the hyperparameters of every optimizer step.

A save has these of one rank. It is exact only if the ranks are alike."""

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from monitor.adapters.hyperparameters import hyperparameters_digest
from monitor.adapters.identity import Hook
from monitor.adapters.module_tensors import bits_of, compare_hashes, compare_shards, dtype_name
from monitor.context import JobContext
from monitor.ledger import UNLIKE
from store.names import BUFFER, Fragment
from store.schema import digest
from store.text import listed

_log = logging.getLogger("driftpoint")

_BLOCKS, _WIDTH = 64, 16  # of a larger tensor, a sample has this many blocks of this many elements
_UNCOMPARED = "the ranks took steps that differ, and `self_check: false` does not compare them"


@dataclass(frozen=True)
class Sample:
    """Some elements of a 1-d tensor: evenly spaced blocks, the first and last ones among them. All of a small one."""

    dtype: str
    numel: int
    data: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> "Sample":
        """Copy elements of a flattened tensor to the host. dtype: rounds them."""
        values, numel = tensor.detach().contiguous().view(-1), tensor.numel()
        if numel > _BLOCKS * _WIDTH:
            shape, stride = (_BLOCKS - 1, _WIDTH), (_stride(numel), 1)
            blocks = values.as_strided(shape, stride, int(values.storage_offset()))
            values = torch.cat((blocks.reshape(-1), values[-_WIDTH:]))
        values = values.to(dtype or values.dtype)
        return cls(dtype_name(values.dtype), numel, bits_of(values).tobytes())

    def select(self, chunks: Iterable[np.ndarray[Any, Any]]) -> bytes:
        """Return the same elements of decoded chunks."""
        starts, width = [0], self.numel
        if self.numel > _BLOCKS * _WIDTH:
            starts = [block * _stride(self.numel) for block in range(_BLOCKS - 1)] + [self.numel - _WIDTH]
            width = _WIDTH
        size = len(self.data) // len(starts)  # of a block, in bytes
        out, position = bytearray(len(self.data)), 0
        for chunk in chunks:
            values = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
            for block, start in enumerate(starts):
                begin = start * (size // width)
                first, after = max(begin, position), min(begin + size, position + values.size)
                if first < after:
                    target = block * size + first - begin
                    out[target : target + after - first] = values[first - position : after - position].tobytes()
            position += values.size
        return bytes(out)


def _stride(numel: int) -> int:
    return (numel - _WIDTH) // (_BLOCKS - 1)


class RankComparison:
    """Compares the ranks of a job, and says what differs."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self.unlike: tuple[str, ...] = ()  # why no save is exact now; the same on all ranks
        self.differing: list[str] = []  # what the last comparison found, on rank 0; its error, on its own rank
        self.seconds = 0.0  # that it took
        self._sizes: Any = None  # the units of the job when the ranks were compared last
        self._due = False  # whether the next save compares them, as after a resume; the same on all ranks
        self._apart = False  # whether they differed; the same on all ranks
        self._step, self._history = 0, ""  # digest of the steps since then, and of the hyperparameters of each update
        for number, optimizer in enumerate(job.adapter.optimizers() if job.group.world_size > 1 else ()):
            optimizer.register_step_pre_hook(Hook(job.adapter.hooks, partial(self._updated, number)))

    def _updated(self, number: int, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._history = digest(f"{self._history} {number} {hyperparameters_digest(optimizer.param_groups)}".encode())

    def stepped(self, step: int) -> None:
        """Take note of a step, with or without an update of the optimizer. The same on all ranks."""
        self._step, self._history = step, digest(f"{self._history} {step}".encode())

    def resumed(self) -> None:
        """Begin anew: a resume made the ranks alike. The next save compares them."""
        self._due, self._apart, self.unlike, self.differing, self._history = True, False, (), [], ""

    @property
    def _present(self) -> str:
        return hyperparameters_digest(group for one in self._job.adapter.optimizers() for group in one.param_groups)

    @property
    def mark(self) -> str:
        """What parts of one version in memory, or of the journal, have in common.

        "" in a pipeline, and once the ranks are known to differ: then a version says so."""
        several = self._apart or len(self._job.adapter.leaders) > 1
        return "" if several else digest(f"{self._history} {self._present} {self._probe(wait=False)}".encode())

    def _probe(self, *, wait: bool) -> str:
        found = self._job.adapter.probe(self._step, wait=wait) if self._job.group.world_size > 1 else None
        return "" if found is None else digest(Sample.of(found).data)

    def trained(self) -> tuple[str, str, str, str]:
        """Return digests: of the names in this rank's pipeline stage, its hyperparameters, its updates, a parameter."""
        local = self._job.adapter.local
        stage = "" if local is None else digest(repr(list(local)).encode())
        return stage, self._present, self._history, self._probe(wait=True)

    def compare_trained(self, ranks: Sequence[tuple[str, str, str, str]]) -> None:
        """Compare what :meth:`trained` returned on all ranks. The same on all ranks."""
        stages = len({stage for stage, *_ in ranks})
        if len({one[:2] for one in ranks}) > stages:
            if not self.unlike:
                self._tell(f"{UNLIKE}: until they are alike, nothing that is saved is exact")
            self.unlike = (UNLIKE,)  # their tensors are compared once they are alike
            return
        self.unlike = ()
        alike = len({one[:3:2] for one in ranks}) == stages
        if self._apart or (alike and len({one[::3] for one in ranks if one[3]}) <= stages):
            return
        if self._job.config.self_check:
            self._due = True
        else:
            self._tell(f"{_UNCOMPARED}, so commits are not exact from now on")
            self._apart, self.differing, self._history = True, [_UNCOMPARED], ""

    def _tell(self, text: str) -> None:
        if self._job.group.rank == 0:
            _log.error("%s", text)

    def compare(self) -> bool:
        """Compare what several ranks hold whole, if that is due or the units changed. Return whether. Collective.

        Scalars of ranks that differ, beside shards, are saved for each rank from then on."""
        job, began = self._job, time.perf_counter()
        whole, shards, scalars = dict[str, int](), dict[Fragment, int](), dict[str, int]()
        if not job.config.self_check or ((self._sizes,) == (job.table.sizes,) and not self._due):
            return False
        self._sizes, self._due, self._history, self.differing = job.table.sizes, False, "", []
        try:
            numels = {fqn: math.prod(info.shape) for fqn, info in job.adapter.tensors().items()}
            for one, tensor, _ in job.adapter.held() if job.group.world_size > 1 else ():
                value = 0 if one.slot == BUFFER else int(digest(Sample.of(tensor).data)[:15], 16)
                if one.numel != numels[one.fqn]:
                    shards[one] = value
                else:
                    whole[f"{one.fqn}/{one.slot}"] = value  # 0 for buffers, which may differ
            scalars = job.rank_buffers.scalar_hashes() if job.group.world_size > 1 else {}
        except Exception as error:  # noqa: BLE001 - of one rank, while the others are in the collective: a difference
            self.differing = [f"the tensors of this rank cannot be compared with those of others: {error!r}"]
        names = [*compare_hashes(job.group, whole)[1], *compare_shards(job.group, shards)]
        job.rank_buffers.every_scalar |= bool(compare_hashes(job.group, scalars)[1])
        self._apart = bool(names)
        if names and job.group.rank == 0:
            self.differing.append(f"the ranks differ in {listed(names)}: a save holds one rank's, or parts of each")
        self.seconds = time.perf_counter() - began
        return True
