"""The tensors of the small job, how each unit is stored, and what a reader must get back.

PLAIN is stored raw. VARIED has a unit in every encoding, and each comes by turns unpacked, packed and as the
difference to an earlier save. Names differ, so that a name alone says which model a tensor is of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from store.encoding import ENCODINGS
from store.names import RAW, SaveId, Unit
from tests.support.reference_encodings import encode_chunk

RANKS = 2


@dataclass(frozen=True)
class Model:
    """tensors: fqn -> (layer, numel). encodings: of the units that are not stored as they are."""

    tensors: Mapping[str, tuple[str, int]]
    slots: tuple[str, ...]
    encodings: Mapping[Unit, str] = field(default_factory=dict)

    @property
    def units(self) -> tuple[Unit, ...]:
        return tuple(dict.fromkeys(Unit(layer, slot) for layer, _ in self.tensors.values() for slot in self.slots))

    @property
    def varied(self) -> bool:
        return bool(self.encodings)


PLAIN = Model(
    {"embed.weight": ("embed", 7), "block.0.weight": ("block.0", 9), "block.0.bias": ("block.0", 1),
     "block.1.weight": ("block.1", 9), "block.1.bias": ("block.1", 1)},
    ("fp32", "exp_avg"),
)  # fmt: skip

VARIED = Model(
    {"few.0.weight": ("few.0", 200), "few.1.weight": ("few.1", 300), "few.1.bias": ("few.1", 1)},
    ("fp32", "exp_avg", "exp_avg_sq"),
    {Unit("few.0", "fp32"): "bf16", Unit("few.0", "exp_avg"): "int8-shared-exponent",
     Unit("few.0", "exp_avg_sq"): "int8-log2", Unit("few.1", "fp32"): "bf16+int8",
     Unit("few.1", "exp_avg"): RAW, Unit("few.1", "exp_avg_sq"): "int16-shared-exponent"},
)  # fmt: skip

TENSORS = {**PLAIN.tensors, **VARIED.tensors}


def encoding_of(unit: Unit) -> str:
    """How a unit's values are stored."""
    return VARIED.encodings.get(unit, RAW)


def piece(fqn: str, rank: int) -> tuple[int, int]:
    """(start, numel) of the rank's fragment."""
    numel = TENSORS[fqn][1]
    start = numel * rank // RANKS
    return start, numel * (rank + 1) // RANKS - start


@cache
def content(fqn: str, slot: str, save: SaveId) -> bytes:
    """What a reader must get of a whole tensor in the version made by ``save``: fp32, little-endian."""
    if fqn in PLAIN.tensors:
        return hashlib.shake_128(f"{fqn}/{slot}/{save}".encode()).digest(4 * TENSORS[fqn][1])
    encoding = ENCODINGS[encoding_of(Unit(TENSORS[fqn][0], slot))]
    fragments = [values(fqn, slot, save, rank) for rank in range(RANKS)]
    return b"".join(encoding.decode(encode_chunk(encoding, own), own.size, "F32").tobytes() for own in fragments)


@cache
def values(fqn: str, slot: str, save: SaveId, rank: int) -> NDArray[np.float32]:
    """A rank's fragment before it is encoded. A quarter of it moves from save to save: differences are small."""
    start, numel = piece(fqn, rank)
    still = _random(f"{fqn}/{slot}").standard_normal(TENSORS[fqn][1]).astype(np.float32)[start : start + numel]
    moving = _random(f"{fqn}/{slot}/{rank}/{save}")
    moved = moving.random(numel) < 0.25
    moved[:1] = True
    changed = (still * np.where(moved, 1 + 0.2 * moving.random(numel), 1)).astype(np.float32)
    found = changed * changed if slot == "exp_avg_sq" else changed
    found.flags.writeable = False
    return found


def _random(seed: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.shake_128(seed.encode()).digest(8), "little"))
