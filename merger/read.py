"""Reading whole tensors, or any interval of one, out of the fragments that a plan names; every hash checked.

A fragment that lies inside the wanted interval is read straight into its place; one that straddles its edge is
read whole, because its hash covers all of it, and kept until the next one. Changes nothing in the store.
Used from one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from merger.plan import MergePlan, sources_of
from merger.tensors import memory_of, torch_dtype
from store.coverage import Copy, Source
from store.errors import DamagedError, MergeError, StorageError, UnsupportedError
from store.files import Files
from store.names import RAW, Fragment
from store.segments import read_entry
from store.versions import Bad

Progress = Callable[[int], None]
"""Told the number of payload bytes just read for the first time."""


class DamagedVersionError(DamagedError):
    """A version's bytes are not what was committed: plan again with :attr:`bad`."""

    def __init__(self, bad: Bad, reason: str) -> None:
        super().__init__(f"{bad.unit} of save {bad.save}: {reason}")
        self.bad = bad


class Reader:
    """The tensors of one plan."""

    def __init__(self, files: Files, plan: MergePlan, progress: Progress = lambda _: None) -> None:
        self._files = files
        self._plan = plan
        self._progress = progress
        self._seen: set[tuple[int, int]] = set()
        self._straddling: tuple[tuple[int, int], torch.Tensor] | None = None

    def shape(self, fqn: str) -> tuple[int, ...]:
        """Shape of a parameter or buffer. MergeError where the commit names none."""
        record = self._plan.tensors.get(fqn)
        if record is None:
            raise MergeError(f"commit {self._plan.save} names no parameter {fqn}: its facts and its tensors disagree")
        return record.shape

    def has(self, fqn: str, slot: str) -> bool:
        """Whether the slot is stored for the parameter."""
        return self._plan.index.dtype(fqn, slot) is not None

    def dtype(self, fqn: str, slot: str) -> torch.dtype:
        """The dtype in which the training state held the slot."""
        name = self._plan.index.dtype(fqn, slot)
        return torch_dtype(name if name is not None else self._plan.tensors[fqn].dtype)

    def tensor(self, fqn: str, slot: str) -> torch.Tensor:
        """The whole tensor, in its shape. MergeError for a hole, DamagedVersionError for wrong bytes."""
        shape = self.shape(fqn)
        out = torch.empty(math.prod(shape), dtype=self.dtype(fqn, slot))
        self.fill(Fragment(fqn, slot, 0, out.numel()), out)
        return out.view(shape)

    def fill(self, wanted: Fragment, out: torch.Tensor) -> None:
        """Fill ``out`` (1-d, contiguous, ``wanted.numel`` elements), casting where its dtype is another one."""
        try:
            copies = self._plan.index.cover(wanted)
        except DamagedError as error:
            raise MergeError(f"commit {self._plan.save}: {error}") from error
        for copy in copies:
            self._copy(copy, out.narrow(0, copy.target_start, copy.numel))

    def _copy(self, copy: Copy, target: torch.Tensor) -> None:
        entry = copy.source.entry
        if copy.numel == entry.numel and target.dtype == torch_dtype(entry.dtype):
            self._read(copy.source, memory_of(target))
            return
        target.copy_(self._whole(copy.source).narrow(0, copy.source_start, copy.numel))

    def _whole(self, source: Source) -> torch.Tensor:
        key = _key(source)
        if self._straddling is None or self._straddling[0] != key:
            out = torch.empty(source.entry.numel, dtype=torch_dtype(source.entry.dtype))
            self._read(source, memory_of(out))
            self._straddling = (key, out)
        return self._straddling[1]

    def _read(self, source: Source, target: memoryview) -> None:
        read_source(self._files, source, target)
        if _key(source) not in self._seen:
            self._seen.add(_key(source))
            self._progress(source.entry.nbytes)


def read_source(files: Files, source: Source, target: memoryview) -> None:
    """Fill ``target`` with the values of a stored fragment. DamagedVersionError where they are not whole."""
    if source.entry.encoding != RAW:
        raise UnsupportedError(
            f"{source.entry.fqn}/{source.entry.slot} is stored as {source.entry.encoding!r}, which this release cannot "
            "merge; it can merge 'raw'"
        )
    try:
        read_entry(files, source.part, source.entry, target)
    except (DamagedError, StorageError) as error:
        raise DamagedVersionError(Bad(source.part.save, source.entry.unit), str(error)) from error


def find_damage(files: Files, plan: MergePlan) -> dict[Bad, str]:
    """Every version of a plan whose bytes are not whole, and what is wrong. Reads all of it."""
    found: dict[Bad, str] = {}
    for source in sources_of(plan):
        if Bad(source.part.save, source.entry.unit) in found:
            continue
        try:
            read_source(files, source, memoryview(bytearray(source.entry.nbytes)))
        except DamagedVersionError as error:
            found[error.bad] = str(error)
    return found


def _key(source: Source) -> tuple[int, int]:
    return id(source.part), source.entry.offset
