"""A model as recipes name its parts: blocks by position, auxiliary layers by what they are, parameters by name.

Found from names, shapes and the order of layers, never by the name of an architecture. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cached_property

from merger.checkpoint import Checkpoint
from store.schema import LayerRecord, TensorRecord
from store.text import listed

ROLES = ("embeddings", "norm", "head")
"""What an auxiliary layer (one that is no block) can be. See :meth:`Model.role`."""


@dataclass(frozen=True)
class Model:
    """The tensors of a checkpoint and their layers."""

    tensors: Mapping[str, TensorRecord]
    layers: tuple[LayerRecord, ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Model:
        """The model whose state a checkpoint holds."""
        return cls(checkpoint.tensors, checkpoint.layers)

    @cached_property
    def members(self) -> Mapping[str, tuple[str, ...]]:
        """fqns by layer, in model order."""
        found: dict[str, list[str]] = {layer.name: [] for layer in self.layers}
        for fqn, record in self.tensors.items():
            found.setdefault(record.layer, []).append(fqn)
        return {name: tuple(fqns) for name, fqns in found.items()}

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Position of each block among the blocks, from 0. Layers inside one block (experts) share its position."""
        blocks = [layer.name for layer in self.layers if layer.block]
        known, places = set(blocks), dict[str, int]()
        return {name: places.setdefault(_outermost(name, known), len(places)) for name in blocks}

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(set(self.positions.values()))

    @cached_property
    def auxiliary(self) -> tuple[str, ...]:
        """Names of the layers that are no blocks."""
        return tuple(layer.name for layer in self.layers if not layer.block)

    @cached_property
    def role(self) -> Mapping[str, str]:
        """What each auxiliary layer is.

        ``norm``: all of its tensors have at most one dimension. Of the others, ``embeddings`` come before the
        first block, ``head`` after it.
        """
        first = next((i for i, layer in enumerate(self.layers) if layer.block), len(self.layers))
        return {
            layer.name: "norm" if self._flat(layer.name) else "embeddings" if i < first else "head"
            for i, layer in enumerate(self.layers)
            if not layer.block
        }

    def names(self, fqn: str) -> tuple[str, ...]:
        """All names of a tensor: tied ones have several."""
        return (fqn, *self.tensors[fqn].aliases)

    def below(self, path: str) -> tuple[str, ...]:
        """Layers at a module path or inside of it."""
        return tuple(layer.name for layer in self.layers if layer.name == path or layer.name.startswith(f"{path}."))

    def outline(self) -> str:
        """The layers in a few words, runs of blocks drawn together."""
        parts: list[str] = []
        run: list[str] = []
        for layer in (*self.layers, None):
            if layer is not None and layer.block:
                run.append(layer.name)
                continue
            if run:
                parts.append(run[0] if len(run) == 1 else f"{run[0]} … {run[-1]}")
                run = []
            if layer is not None:
                parts.append(layer.name)
        return listed(parts, 6)

    def _flat(self, layer: str) -> bool:
        return all(len(self.tensors[fqn].shape) < 2 for fqn in self.members[layer])


def _outermost(name: str, blocks: Set[str]) -> str:
    """The block that a block lies in, itself where it lies in none."""
    parts = name.split(".")
    paths = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next(path for path in paths if path in blocks)
