"""Define units, fragments and save ids, and the names of slots. Pure values."""

import re
from dataclasses import dataclass
from functools import lru_cache, total_ordering
from typing import NamedTuple

WEIGHTS = "fp32"
"""Slot of the weights that the optimizer updates: the fp32 master weights if there are any, otherwise the parameter
itself. The dtype stored with each fragment tells which."""

FROZEN = "frozen"  # slot of parameters without gradient. They never move, so one version is enough

LEFT_OUT = "frozen_left_out"  # key in run states and facts: frozen parameters that the script loads and the store lacks

BUFFER = "buffer"  # slot of a module's persistent buffers
RAW = "raw"  # encoding: the bytes as they are
_SAVE_NAME = re.compile(r"(\d{8,12})-(\d{6,9})\Z")


class Unit(NamedTuple):
    """One (layer, slot): the unit of decision, of version and of drift."""

    layer: str
    slot: str

    def __str__(self) -> str:
        return f"{self.layer}/{self.slot}"


class _Fragment(NamedTuple):
    fqn: str
    slot: str
    start: int
    numel: int


class Fragment(_Fragment):
    """A contiguous piece of a flattened (row-major) parameter: elements [start, start + numel)."""

    __slots__ = ()

    def __new__(cls, fqn: str, slot: str, start: int, numel: int) -> "Fragment":
        if start < 0 or numel < 0:
            raise ValueError(f"fragment of {fqn}: start {start} and numel {numel} must be >= 0")
        return super().__new__(cls, fqn, slot, start, numel)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@total_ordering
@dataclass(frozen=True)
class SaveId:
    """Identifies one save by its optimizer step and the epoch that made it.

    Ordered by epoch, then by step, and by no clock: a commit that an older incarnation of the job still makes after it
    was fenced is never newer than those of the newer incarnation."""

    step: int
    epoch: int

    @property
    def name(self) -> str:
        """As in file names: ``00000120-000003``."""
        return f"{self.step:08d}-{self.epoch:06d}"

    @staticmethod
    @lru_cache(1 << 14)
    def parse(name: str) -> "SaveId":
        """Parse a :attr:`name`. Raises ValueError for other text."""
        match = _SAVE_NAME.match(name)
        if match is None:
            raise ValueError(f"{name!r} is not a save name such as 00000120-000003")
        save = SaveId(int(match[1]), int(match[2]))
        if save.name != name:
            raise ValueError(f"{name!r} is not the canonical form {save.name!r}")
        return save

    def __lt__(self, other: "SaveId") -> bool:
        return (self.epoch, self.step) < (other.epoch, other.step)

    def __str__(self) -> str:
        return self.name
