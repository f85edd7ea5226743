"""What both families of ZeRO stages give: pieces of flat partitions, with the optimizer's state over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from merger.blocks import Extent
from merger.sources.deepspeed_files import comparable
from merger.sources.nest import Nest
from merger.sources.tensor import FileTensor, values
from store.errors import MergeError, UnsupportedError
from store.names import BUFFER, FROZEN, WEIGHTS
from store.text import counted


@dataclass(frozen=True)
class Shape:
    """A parameter that the optimizer holds."""

    fqn: str
    shape: tuple[int, ...]
    numel: int


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened parameter are those from ``offset`` of a flat partition."""

    fqn: str
    start: int
    stop: int
    offset: int


@dataclass
class Optimized:
    """What the optimizer's files say.

    groups: fqns and hyperparameters of each param group, in the optimizer's order. facts: of the stage's layout.
    problems: why it may not be what the engine held.
    """

    extents: list[Extent] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    slots: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def param_shapes(model: Nest) -> list[list[Shape]]:
    """Parameters of each (sub-)group, in the order in which they lie. MergeError where one is there twice."""
    groups, seen = [], set()
    for entry in model.at("param_shapes").entries():
        group = []
        for fqn, shape in entry.items():
            if fqn in seen:
                raise MergeError(f"{entry.where} names {fqn} for the second time")
            seen.add(fqn)
            sizes = shape.naturals()
            numel = 1
            for size in sizes:
                numel *= size
            group.append(Shape(fqn, sizes, numel))
        groups.append(group)
    return groups


def flat_state(ranks: Sequence[Nest], masters: Sequence[FileTensor], numel: int) -> FlatState:
    """The state that the optimizer keeps for one flat partition, on all ranks.

    ranks: its state on each rank. numel: of the partition. MergeError where ranks differ in what they keep or in
    scalars; UnsupportedError for state that has a shape of its own.
    """
    first = _kept(ranks[0], numel)
    for nest in ranks[1:]:
        other = _kept(nest, numel)
        if other[0] != first[0] or comparable(other[1]) != comparable(first[1]):
            raise MergeError(
                f"{ranks[0].where} and {nest.where} differ: they are of different saves; name a tag whose files are of "
                "one save"
            )
    tensors = [{WEIGHTS: master} for master in masters]
    for found, nest in zip(tensors, ranks, strict=True):
        found |= {slot: nest.at(slot).tensor() for slot in first[0]}
    return FlatState(tuple(first[0]), first[1], tensors)


@dataclass(frozen=True)
class FlatState:
    """A flat partition. tensors: by rank, the masters and the optimizer's slots, by name of the slot."""

    slots: tuple[str, ...]
    scalars: Mapping[str, Any]
    tensors: Sequence[Mapping[str, FileTensor]]

    def extents(self, rank: int, pieces: Sequence[Piece]) -> Iterator[Extent]:
        """Where the values of each piece lie, in every slot."""
        for slot, tensor in self.tensors[rank].items():
            for piece in pieces:
                if piece.start < piece.stop:
                    yield tensor.extent(piece.fqn, slot, piece.start, piece.stop, piece.offset)


def _kept(state: Nest, numel: int) -> tuple[list[str], dict[str, Any]]:
    """(slots, scalars) of a flat partition's state."""
    slots, scalars = [], scalars_of(state)
    for key, nest in state.items():
        if key in scalars:
            continue
        tensor = nest.tensor()
        if tensor.shape == (numel,) and key not in ("step", WEIGHTS, FROZEN, BUFFER):
            slots.append(key)
        else:
            raise UnsupportedError(
                f"{nest.where} has the shape {tensor.shape} for a flat partition of {counted(numel, 'element')}: it "
                "cannot be taken apart by parameter; optimizers with state per element, such as AdamW, are handled"
            )
    return sorted(slots), scalars


def scalars_of(state: Nest) -> dict[str, Any]:
    """What the base optimizer keeps for a flat partition besides tensors over its elements."""
    plain = {key: nest.value for key, nest in state.items()}
    return {
        key: values(value) for key, value in plain.items() if not isinstance(value, FileTensor) or value.shape == ()
    }


def base_groups(base: Nest) -> list[tuple[list[int], dict[str, Any]]]:
    """(indices of flat partitions, hyperparameters) of each of the base optimizer's param groups."""
    return [
        (
            list(group.at("params").naturals()),
            {key: values(value) for key, value in group.mapping().items() if key != "params"},
        )
        for group in base.at("param_groups").entries()
    ]


def require_same_groups(bases: Sequence[Nest]) -> None:
    """MergeError unless all ranks have the same param groups with the same hyperparameters."""
    first = comparable(bases[0].at("param_groups").value)
    for base in bases[1:]:
        if comparable(base.at("param_groups").value) != first:
            raise MergeError(
                f"{bases[0].where} and {base.where} differ in param_groups: they are of different saves; name a tag "
                "whose files are of one save"
            )


def state_of(base: Nest, index: int) -> Nest:
    """The base optimizer's state of a flat partition; empty where it keeps none."""
    states = base.at("state")
    return states.at(index) if index in states.mapping() else Nest({}, f"{states.where}, {index}")
