"""A tensor of an output file that is only planned: which elements of which parameters it will hold.

Layouts put these where the framework's own files have tensors; :mod:`merger.transfer` fills them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from merger.checkpoint import Checkpoint
from merger.tensors import torch_dtype
from store.names import Fragment


@dataclass(frozen=True)
class Placed:
    """``fragment`` goes to the elements from ``offset`` of a flattened tensor."""

    fragment: Fragment
    offset: int


@dataclass(frozen=True, eq=False)
class Stored:
    """A contiguous tensor to be written, by its place in the file only. Zeros wherever nothing is placed.

    The same object at two places of a file is one tensor under two names, as tied weights are.
    stays_finite: a finite value that ``dtype`` cannot hold ends the merge, in place of becoming infinite.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    placed: tuple[Placed, ...]
    stays_finite: bool = False

    def __post_init__(self) -> None:
        end = 0
        for one in self.placed:
            if one.offset < end:
                raise ValueError("what is placed in a tensor must be sorted and must not overlap")
            end = one.offset + one.fragment.numel
        if end > self.numel:
            raise ValueError(f"{end} elements do not fit into a tensor of {self.numel}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


def whole(checkpoint: Checkpoint, fqn: str, slot: str, dtype: torch.dtype | None = None) -> Stored:
    """All of a (fqn, slot) in its own shape; in ``dtype`` if one is given, else as the training state held it."""
    shape, numel = checkpoint.record(fqn).shape, checkpoint.numel(fqn)
    placed = (Placed(Fragment(fqn, slot, 0, numel), 0),) if numel else ()
    return Stored(tuple(shape), dtype or torch_dtype(checkpoint.dtype(fqn, slot)), placed)


def flat(numel: int, dtype: torch.dtype, placed: Iterable[Placed]) -> Stored:
    """A one-dimensional tensor of ``numel`` elements; ``placed`` in any order, empty fragments left out."""
    found = sorted((one for one in placed if one.fragment.numel), key=lambda one: one.offset)
    return Stored((numel,), dtype, tuple(found))
