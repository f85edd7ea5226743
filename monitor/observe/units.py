"""(layer, slot) units on this rank and over all ranks; change detection.

From the pieces of an adapter to units: which live memory makes up each (layer, slot), here and over all ranks.

Layers are found once; pieces are listed anew at every decision, because optimizer state may appear after the
first step and parameters may be unfrozen. Used from the training thread only.

Before each decision: is the job still what was attached, and which units does it have?

A parameter in the optimizer but not in the model, a module added later, an optimizer that was replaced: what is known
of such a job is not all of it, and a commit of a part would pass for the whole. So nothing is saved while it lasts,
the reason is told, and training goes on. Training thread; the ranks learn of each other's trouble from the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from monitor.adapters.base import Adapter, Piece, StateVersions
from monitor.adapters.module_tensors import dtype_name
from monitor.distributed import Group
from monitor.observe.layers import Layer
from store.errors import UnsupportedError, UsageError
from store.names import BUFFER, FROZEN, Fragment, Unit
from store.schema import LayerRecord, TensorRecord, members_digest

_Shape = dict[Unit, tuple[tuple[Fragment, torch.dtype], ...]]


@dataclass(frozen=True)
class UnitSize:
    """A unit over all ranks: elements, raw bytes, and :func:`store.schema.members_digest` of its tensors."""

    numel: int
    nbytes: int
    members: str = ""


@dataclass(frozen=True)
class LocalUnit:
    """This rank's pieces of a unit, in a fixed order; possibly none."""

    unit: Unit
    pieces: tuple[Piece, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The live 1-d tensors."""
        return [piece.tensor for piece in self.pieces]


class UnitTable:
    """The units of a job."""

    def __init__(self, adapter: Adapter, layers: Sequence[Layer], group: Group) -> None:
        self._adapter = adapter
        self._group = group
        self.layers = tuple(layers)
        self._by_name = {layer.name: layer for layer in layers}
        self._layer_of = {fqn: layer for layer in layers for fqn in layer.fqns}
        self._shape: _Shape | None = None
        self.sizes: Mapping[Unit, UnitSize] = {}
        self.lost: set[Unit] = set()
        """Units whose distance to their version cannot be told since their pieces changed, until they are saved.
        The same on all ranks."""

    def changed(self, local: Mapping[Unit, LocalUnit]) -> bool:
        """Whether this rank's pieces are others than when :meth:`agree` was last called."""
        return _shape_of(local) != self._shape

    def local(self) -> dict[Unit, LocalUnit]:
        """This rank's units that have pieces here. UnsupportedError for tensors that cannot be saved, or that no layer
        has since they were added after attaching."""
        for fqn in self._adapter.tensors():
            self._layer_named(fqn)
        found: dict[Unit, list[Piece]] = {}
        for piece in self._adapter.owned():
            if piece.fragment.numel:
                unit = Unit(self._layer_named(piece.fragment.fqn), piece.fragment.slot)
                dtype_name(piece.tensor.dtype, f"{piece.fragment.fqn} ({unit.slot})")
                found.setdefault(unit, []).append(piece)
        return {unit: LocalUnit(unit, tuple(pieces)) for unit, pieces in found.items()}

    def agree(self, local: Mapping[Unit, LocalUnit]) -> set[Unit]:
        """Learn the units and sizes over all ranks. Returns those whose pieces changed on any rank. Collective."""
        mine = {unit: _members(part) for unit, part in local.items()}
        totals: dict[Unit, _Members] = {}
        reshaped: set[Unit] = set()
        for theirs, changed in self._group.all_gather((mine, self._changed_units(local))):
            reshaped |= changed
            for unit, members in theirs.items():
                _add(totals.setdefault(unit, {}), members)
        self.sizes = {unit: _size(totals[unit]) for unit in sorted(totals, key=self._order)}
        self._shape = _shape_of(local)
        self.lost = (self.lost | reshaped) & set(self.sizes)
        return reshaped

    def _changed_units(self, local: Mapping[Unit, LocalUnit]) -> set[Unit]:
        before, now = self._shape, _shape_of(local)
        if before is None:
            return set()
        return {unit for unit in before.keys() | now.keys() if before.get(unit) != now.get(unit)}

    def _layer_named(self, fqn: str) -> str:
        if fqn not in self._layer_of:
            raise UnsupportedError(
                f"{fqn} was added to the model after monitor.attach: add it before, or close() and "
                "attach anew to another `store:`"
            )
        return self._layer_of[fqn].name

    def layer(self, unit: Unit) -> Layer:
        """The layer of a unit."""
        return self._by_name[unit.layer]

    def layer_records(self) -> tuple[LayerRecord, ...]:
        """The layers as the manifest has them."""
        return tuple(LayerRecord(name=layer.name, block=layer.block) for layer in self.layers)

    def tensor_records(self) -> dict[str, TensorRecord]:
        """The model's tensors as the manifest has them."""
        return {
            fqn: TensorRecord(
                layer=self._layer_named(fqn),
                shape=info.shape,
                dtype=info.dtype,
                kind=info.kind,
                aliases=info.aliases,
            )
            for fqn, info in self._adapter.tensors().items()
        }

    def _order(self, unit: Unit) -> tuple[int, str]:
        return self.layer(unit).position, unit.slot


def is_moving(unit: Unit) -> bool:
    """Whether an optimizer updates the unit. Buffers are not its business; they are saved when they changed."""
    return unit.slot not in (FROZEN, BUFFER)


_Members = dict[str, tuple[int, str, int]]
"""fqn -> elements, dtype, bytes."""


def _members(part: LocalUnit) -> _Members:
    members: _Members = {}
    for piece in part.pieces:
        nbytes = piece.tensor.numel() * piece.tensor.element_size()
        _add(members, {piece.fragment.fqn: (piece.fragment.numel, dtype_name(piece.tensor.dtype), nbytes)})
    return members


def _add(total: _Members, more: _Members) -> None:
    for fqn, (numel, dtype, nbytes) in more.items():
        before = total.get(fqn, (0, dtype, 0))
        total[fqn] = (before[0] + numel, dtype if dtype == before[1] else "mixed", before[2] + nbytes)


def _size(members: _Members) -> UnitSize:
    return UnitSize(
        sum(numel for numel, _, _ in members.values()),
        sum(nbytes for _, _, nbytes in members.values()),
        members_digest({fqn: (numel, dtype) for fqn, (numel, dtype, _) in members.items()}),
    )


def _shape_of(local: Mapping[Unit, LocalUnit]) -> _Shape:
    return {unit: tuple((p.fragment, p.tensor.dtype) for p in part.pieces) for unit, part in local.items()}


_log = logging.getLogger("driftpoint")


@dataclass(frozen=True)
class Survey:
    """What there is on this rank. trouble: why it cannot be saved; then ``local`` is empty."""

    local: Mapping[Unit, LocalUnit] = field(default_factory=dict)
    trouble: str | None = None


class Surveyor:
    """Looks at the job of one rank. Attach it before training, :meth:`mark` after weights were loaded."""

    def __init__(self, adapter: Adapter, table: UnitTable) -> None:
        self._adapter = adapter
        self._table = table
        self._updates = 0
        self._trail: StateVersions | None = None
        adapter.before_update(self._count)
        self.mark()

    def mark(self) -> None:
        """From now on weights change only by the optimizer."""
        self._trail, self._updates = self._adapter.state_versions(), 0

    def survey(self, stepped: bool) -> Survey:
        """Look. ``stepped``: the training loop says that it took optimizer steps since the last time."""
        try:
            self._adapter.check_attached()
            if stepped:
                self._require_in_use()
            local = self._table.local()
            self.mark()
        except UsageError as error:
            return Survey(trouble=str(error))
        except Exception as error:  # noqa: BLE001 - the edge to the user's own modules and optimizer: told as trouble
            _log.error("the model and the optimizer cannot be looked at", exc_info=error)
            return Survey(trouble=f"the model and the optimizer cannot be looked at: {error!r}")
        return Survey(local)

    def _require_in_use(self) -> None:
        """A heuristic: only seen from here, nobody tells that ``optimizer`` was bound to another object.

        That the attached one took no step is no proof (a gradient scaler leaves steps out), nor that weights changed
        (scripts clip them, average them). Both together, with a state that stood still, are another optimizer's work:
        its moments are nowhere, and a resume would go on with the old ones."""
        before = self._trail
        now = None if self._updates or before is None else self._adapter.state_versions()
        if before is None or now is None:
            return
        if now.weights != before.weights and now.state == before.state:
            self.mark()
            raise UnsupportedError(
                f"the attached {now.optimizer} took no step since the last decision, yet its parameters changed: was "
                "it replaced by another optimizer, whose state would be lost? close() and attach the one that trains"
            )

    def _count(self) -> None:
        self._updates += 1
