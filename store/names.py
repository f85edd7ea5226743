"""The words everything shares: unit, fragment, save id, and the names of slots and encodings.

Pure values. Nothing here touches a file or a tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering

WEIGHTS = "fp32"
"""Slot of the weights that the optimizer updates: the fp32 master weights where there are any,
otherwise the parameter itself. The dtype stored with each fragment says which."""

FROZEN = "frozen"
"""Slot of parameters that take no gradient. They never move, so one version serves for good."""

LEFT_OUT = "frozen_left_out"
"""Key in run states and facts: frozen parameters that the script brings and the store has not."""

BUFFER = "buffer"
"""Slot of a module's persistent buffers."""

RAW = "raw"
"""Encoding: the bytes as they are."""

_SAVE_NAME = re.compile(r"(\d{8,12})-(\d{6,9})\Z")


@dataclass(frozen=True, order=True)
class Unit:
    """One (layer, slot): the unit of decision, of version and of drift."""

    layer: str
    slot: str

    def __str__(self) -> str:
        return f"{self.layer}/{self.slot}"


@dataclass(frozen=True, order=True)
class Fragment:
    """A contiguous piece of a flattened (row-major) parameter: elements [start, start + numel)."""

    fqn: str
    slot: str
    start: int
    numel: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.numel < 0:
            raise ValueError(f"fragment of {self.fqn}: start {self.start} and numel {self.numel} must be >= 0")

    @property
    def stop(self) -> int:
        return self.start + self.numel


@total_ordering
@dataclass(frozen=True)
class SaveId:
    """Names one save: the optimizer step and the epoch that made it.

    Newer means a later epoch, then a later step: what an older incarnation of the job still commits
    after it was fenced never outranks what the newer incarnation committed. No clock is consulted.
    """

    step: int
    epoch: int

    @property
    def name(self) -> str:
        """As in file names: ``00000120-000003``."""
        return f"{self.step:08d}-{self.epoch:06d}"

    @classmethod
    def parse(cls, name: str) -> SaveId:
        """The inverse of :attr:`name`. Raises ValueError for anything else."""
        match = _SAVE_NAME.match(name)
        if match is None:
            raise ValueError(f"{name!r} is not a save name such as 00000120-000003")
        found = cls(int(match[1]), int(match[2]))
        if found.name != name:
            raise ValueError(f"{name!r} is not the canonical form {found.name!r}")
        return found

    def __lt__(self, other: SaveId) -> bool:
        return (self.epoch, self.step) < (other.epoch, other.step)

    def __str__(self) -> str:
        return self.name
