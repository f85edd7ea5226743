"""Group an adapter's pieces into units, one per (layer, slot), and detect changes of the job. Training thread only.

Layers are found once; pieces are listed again at every decision, because optimizer state may appear after the first
step and parameters may be unfrozen.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from monitor.adapters.base import Adapter, Piece, StateVersions, TensorInfo
from monitor.adapters.module_tensors import dtype_name, unstorable
from monitor.distributed import Group
from monitor.observe.layers import Layer
from store.errors import UnstorableError, UnsupportedError, UsageError
from store.names import BUFFER, FROZEN, Fragment, Unit
from store.schema import LayerRecord, TensorRecord, members_digest

_log = logging.getLogger("driftpoint")

_Shape = dict[Unit, tuple[tuple[Fragment, torch.dtype], ...]]
_RECORDED = ("shape", "dtype", "kind", "aliases")
_Members = dict[str, tuple[int, str, int]]
"""fqn -> elements, dtype, bytes."""


@dataclass(frozen=True)
class UnitSize:
    """Size of a unit over all ranks."""

    numel: int
    nbytes: int
    """Raw bytes."""
    members: str = ""
    """:func:`store.schema.members_digest` of its tensors."""


class LocalUnit(NamedTuple):
    """This rank's pieces of a unit, in a fixed order; possibly none."""

    unit: Unit
    pieces: tuple[Piece, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Live 1-d tensors."""
        return [piece.tensor for piece in self.pieces]


class UnitTable:
    """The units of a job, on this rank and over all ranks."""

    def __init__(self, adapter: Adapter, layers: Sequence[Layer], group: Group) -> None:
        self._adapter = adapter
        self._group = group
        self.layers = tuple(layers)
        self._by_name = {layer.name: layer for layer in layers}
        self._layer_of = {fqn: layer for layer in layers for fqn in layer.fqns}
        self._shape: _Shape | None = None
        self._infos: Mapping[str, TensorInfo] = {}
        self._records: Mapping[str, TensorRecord] = {}
        self.layer_records = tuple(LayerRecord(name=layer.name, block=layer.block) for layer in layers)
        self.sizes: Mapping[Unit, UnitSize] = {}
        self.lost: set[Unit] = set()
        """Units whose distance to their version is unknown since their pieces changed, until they are saved.
        The same on all ranks."""

    def changed(self, local: Mapping[Unit, LocalUnit]) -> bool:
        """Return whether this rank's pieces differ from those at the last call of :meth:`agree`."""
        return _shapes(local) != self._shape

    def local(self) -> dict[Unit, LocalUnit]:
        """Return the units with pieces on this rank.

        Raise UnsupportedError for tensors that cannot be saved, or that were added to the model after attaching, and
        UnstorableError for tensors that are not plain."""
        for fqn, info in self._adapter.tensors().items():
            self._layer_named(fqn)
            if info.special is not None:
                advice = "train with plain tensors"
                if info.kind == "frozen":
                    advice += ", or load it in the script and leave it out with `frozen: skip`"
                raise unstorable(fqn, info.special, advice)
        units: dict[Unit, list[Piece]] = {}
        for piece in self._adapter.owned():
            if piece.fragment.numel:
                unit = Unit(self._layer_named(piece.fragment.fqn), piece.fragment.slot)
                dtype_name(piece.tensor.dtype, f"{piece.fragment.fqn} ({unit.slot})")
                units.setdefault(unit, []).append(piece)
        return {unit: LocalUnit(unit, tuple(pieces)) for unit, pieces in units.items()}

    def agree(self, local: Mapping[Unit, LocalUnit]) -> set[Unit]:
        """Gather the units and sizes of all ranks. Return the units whose pieces changed on any rank. Collective."""
        own = {unit: _members(part) for unit, part in local.items()}
        before, now = self._shape, _shapes(local)
        differing = () if before is None else before.items() ^ now.items()
        changed_here = {unit for unit, _ in differing}
        totals: dict[Unit, _Members] = {}
        reshaped: set[Unit] = set()
        for members_by_unit, changed in self._group.all_gather((own, changed_here)):
            reshaped |= changed
            for unit, members in members_by_unit.items():
                _add(totals.setdefault(unit, {}), members)
        order = sorted(totals, key=lambda unit: (self.layer(unit).position, unit.slot))
        self.sizes = {unit: _size(totals[unit]) for unit in order}
        self._shape = now
        self.lost = (self.lost | reshaped) & set(self.sizes)
        return reshaped

    def _layer_named(self, fqn: str) -> str:
        if fqn not in self._layer_of:
            raise UnsupportedError(
                f"{fqn} was added to the model after monitor.attach: add it before, or close() and "
                "attach again with another `store:`"
            )
        return self._layer_of[fqn].name

    def layer(self, unit: Unit) -> Layer:
        """Return the layer of a unit."""
        return self._by_name[unit.layer]

    def tensor_records(self) -> Mapping[str, TensorRecord]:
        """Return the model's tensors as recorded in the manifest."""
        infos = self._adapter.tensors()
        if infos != self._infos:
            self._records = {
                fqn: TensorRecord(layer=self._layer_named(fqn), **{key: getattr(info, key) for key in _RECORDED})
                for fqn, info in infos.items()
            }
            self._infos = infos  # after an error they do not count as recorded
        return self._records


def is_moving(unit: Unit) -> bool:
    """Return whether an optimizer updates the unit. Buffers do not count; they are saved when they changed."""
    return unit.slot not in (FROZEN, BUFFER)


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


def _shapes(local: Mapping[Unit, LocalUnit]) -> _Shape:
    return {unit: tuple((p.fragment, p.tensor.dtype) for p in part.pieces) for unit, part in local.items()}


@dataclass(frozen=True)
class Survey:
    """The units on this rank, or the reason why the job cannot be saved."""

    local: Mapping[Unit, LocalUnit] = field(default_factory=dict)
    trouble: str | None = None
    """The reason; ``local`` is then empty."""
    permanent: bool = False  # the reason is a type that no save can hold


class Surveyor:
    """Checks before each decision that the job of this rank is the attached one, and lists its units.

    A parameter in the optimizer but not in the model, a module added later, an optimizer that was replaced: a commit of
    such a job would be partial and pass for complete. So nothing is saved while the problem lasts; the reason is
    reported and training continues. The caller exchanges the reasons between ranks. Create it before training, and
    call :meth:`mark` after weights were loaded.
    """

    def __init__(self, adapter: Adapter, table: UnitTable) -> None:
        self._adapter = adapter
        self._table = table
        self._updates = 0
        self._versions: StateVersions | None = None
        adapter.before_update(self._count)
        self.mark()

    def mark(self) -> None:
        """Note the current versions: from now on only the optimizer changes the weights."""
        self._versions, self._updates = self._adapter.state_versions(), 0

    def local(self) -> Mapping[Unit, LocalUnit]:
        """Return the units on this rank; none if the job cannot be saved, which :meth:`survey` tells all ranks."""
        with suppress(Exception):
            return self._table.local()
        return {}

    def survey(self, stepped: bool) -> Survey:
        """Check the job and list its units. ``stepped``: whether the loop took optimizer steps since the last time."""
        try:
            self._adapter.check_attached()
            if stepped:
                self._require_in_use()
            local = self._table.local()
            self.mark()
        except UsageError as error:
            return Survey(trouble=str(error), permanent=isinstance(error, UnstorableError))
        except Exception as error:  # noqa: BLE001 - errors of the user's own modules and optimizer: reported as trouble
            _log.error("the model and the optimizer cannot be inspected", exc_info=error)
            return Survey(trouble=f"the model and the optimizer cannot be inspected: {error!r}")
        return Survey(local)

    def _require_in_use(self) -> None:
        """Raise UnsupportedError if another optimizer seems to update the weights. A heuristic.

        A script may bind ``optimizer`` to another object unnoticed. That the attached one took no step proves nothing
        (a gradient scaler skips steps), nor that weights changed (scripts clip or average them). Both together, with
        unchanged optimizer state, mean another optimizer: its moments would not be saved."""
        before = self._versions
        now = None if self._updates or before is None else self._adapter.state_versions()
        if before is None or now is None:
            return
        if now.weights != before.weights and now.state == before.state:
            self.mark()
            raise UnsupportedError(
                f"the attached {now.optimizer} took no step since the last decision, yet its parameters changed, so it "
                "was probably replaced by another optimizer, whose state would be lost: close() and attach that one"
            )

    def _count(self) -> None:
        self._updates += 1
