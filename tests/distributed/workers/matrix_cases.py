"""The matrix of merges: DeepSpeed's own checkpoints of every stage, world size and precision, written for every other.

Shared by the processes with driftpoint and without. The model is ``adapter_model.Tiny``: odd sizes, tied embeddings,
a frozen block, buffers, a parameter smaller than the world, two param groups, dropout, clipping, accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from adapter_model import engine

STAGES, WORLDS, PRECISIONS = (1, 2, 3), (1, 2, 3, 4), ("bf16", "fp32")
SAVED, LAST = 2, 7
LINEAR = {"memory_efficient_linear": False}
"""An engine of ZeRO-3 otherwise puts its own linear layer in the place of torch's, for every engine of the process: it
rounds in another order, so that losses would depend on which engines a process has built before."""


@dataclass(frozen=True)
class Cell:
    """An engine at a stage, on so many ranks, in a precision."""

    stage: int
    world: int
    precision: str

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"zero{self.stage}-on{self.world}-{self.precision}"


SOURCES = tuple(Cell(*one) for one in product(STAGES, WORLDS, PRECISIONS))


def targets(source: Cell) -> tuple[Cell, ...]:
    """Every stage and world size that a source is written for."""
    return tuple(Cell(stage, world, source.precision) for stage, world in product(STAGES, WORLDS))


def build(cell: Cell, seed: int) -> Any:
    """A fresh engine; other seeds give other weights."""
    return engine(seed, cell.stage, cell.precision, **LINEAR)


def universal_stage(source: Cell, world: int) -> int:
    """The stage at which a world loads a source's universal checkpoint: all of them come round."""
    return (source.stage + source.world + world) % 3 + 1
