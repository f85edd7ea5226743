"""Group an adapter's pieces into units, one per (layer, slot), and detect changes of the job. Training thread only.

Layers are found once; pieces are listed again at every decision, because optimizer state may appear after the first
step and parameters may be unfrozen."""

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from monitor.adapters.base import Adapter, Piece, StateVersions, TensorInfo
from monitor.adapters.identity import Identity, Integers, MemoryRegions
from monitor.adapters.module_tensors import dtype_name, unstorable
from monitor.distributed import Group
from monitor.observe.layers import Layer
from store.errors import UnstorableError, UnsupportedError, UsageError
from store.names import BUFFER, FROZEN, Fragment, Unit
from store.schema import LayerRecord, TensorRecord, members_digest

_log = logging.getLogger("driftpoint")

_RECORDED = ("shape", "dtype", "kind", "aliases")
_Members = dict[str, tuple[int, str, int]]  # fqn -> elements, dtype, bytes


@dataclass(frozen=True)
class UnitSize:
    """Size of a unit over all ranks."""

    numel: int
    nbytes: int  # raw bytes
    members: str = ""  # :func:`store.schema.members_digest` of its tensors
    boxes: bool = False  # whether any of its fragments is a box


@dataclass(frozen=True)
class UnitLayout:
    """This rank's pieces of a unit, without their memory. Equal if fragments and dtypes are."""

    fragments: tuple[Fragment, ...]
    dtypes: tuple[torch.dtype, ...]
    regions: MemoryRegions = field(compare=False)  # where the pieces lie
    nbytes: int  # raw bytes of all pieces
    spans: tuple[tuple[int, int], ...] | None = field(default=None, compare=False)
    """Where each piece lies: index in ``Identity.tensors``, and index of its first element in that tensor."""

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> "UnitLayout":
        tensors = [piece.tensor for piece in pieces]
        fragments, dtypes = (piece.fragment for piece in pieces), (tensor.dtype for tensor in tensors)
        regions = MemoryRegions.of(tensors)
        return cls(tuple(fragments), tuple(dtypes), regions, int(regions.sizes.sum()))

    @cached_property
    def firsts(self) -> Integers:
        """Of each piece: the byte at which it begins in the tensor that it lies in."""
        spans = self.spans or ((0, 0),) * len(self.dtypes)
        return np.array([at * dtype.itemsize for (_, at), dtype in zip(spans, self.dtypes, strict=True)], np.int64)

    @cached_property
    def members(self) -> _Members:
        members: _Members = {}
        for fragment, dtype in zip(self.fragments, self.dtypes, strict=True):
            _add(members, {fragment.fqn: (fragment.numel, dtype_name(dtype), fragment.numel * dtype.itemsize)})
        return members


class LocalUnit:
    """This rank's pieces of a unit, in a fixed order; possibly none.

    owners: tensors that the pieces lie in: those of the job's identity, or, if ``layout`` has no spans, one each."""

    __slots__ = ("_pieces", "layout", "owners", "unit")

    def __init__(
        self, unit: Unit, layout: UnitLayout, owners: Sequence[torch.Tensor], pieces: tuple[Piece, ...] | None = None
    ) -> None:
        self.unit, self.layout, self.owners, self._pieces = unit, layout, owners, pieces

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces, with their live memory."""
        if self._pieces is None:
            self._pieces = tuple(
                Piece(fragment, self.owners[index].detach().view(-1).narrow(0, first, fragment.numel))
                for (index, first), fragment in zip(self.layout.spans or (), self.layout.fragments, strict=True)
            )
        return self._pieces

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Live 1-d tensors."""
        return [piece.tensor for piece in self.pieces]

    @property
    def sources(self) -> Sequence[torch.Tensor]:
        """The tensor that each piece lies in."""
        spans = self.layout.spans
        return self.owners if spans is None else [self.owners[index] for index, _ in spans]


@dataclass(frozen=True)
class _Listing:
    """The layouts of a job's units, valid as long as its identity has the same layout. Holds no tensor."""

    identity: Any
    layouts: Mapping[Unit, UnitLayout]

    @classmethod
    def of(cls, local: Mapping[Unit, LocalUnit], identity: Identity | None) -> "_Listing | None":
        """Return None if a piece lies in no tensor of the identity, so that it cannot be found again."""
        if identity is None:
            return None
        begins = sorted((one.data_ptr(), index) for index, one in enumerate(identity.tensors) if one.numel())
        addresses, layouts = [begin for begin, _ in begins], {}
        for unit, part in local.items():
            spans = [_span(piece.tensor, begins, addresses, identity.tensors) for piece in part.pieces]
            known = tuple(span for span in spans if span is not None)
            if len(known) < len(spans):
                return None
            layouts[unit] = replace(part.layout, spans=known)
        return cls(identity.layout, layouts)

    def local(self, identity: Identity) -> dict[Unit, LocalUnit]:
        return {unit: LocalUnit(unit, layout, identity.tensors) for unit, layout in self.layouts.items()}


def _span(
    piece: torch.Tensor, begins: Sequence[tuple[int, int]], addresses: Sequence[int], tensors: Sequence[torch.Tensor]
) -> tuple[int, int] | None:
    place = bisect_right(addresses, piece.data_ptr()) - 1
    if place < 0:
        return None
    begin, index = begins[place]
    tensor = tensors[index]
    first, rest = divmod(piece.data_ptr() - begin, tensor.element_size())
    inside = tensor.is_contiguous() and not rest and first + piece.numel() <= tensor.numel()
    return (index, first) if inside and tensor.dtype == piece.dtype and tensor.device == piece.device else None


def _layouts(local: Mapping[Unit, LocalUnit]) -> dict[Unit, UnitLayout]:
    return {unit: part.layout for unit, part in local.items()}


class UnitTable:
    """The units of a job, on this rank and over all ranks."""

    def __init__(self, adapter: Adapter, layers: Sequence[Layer], group: Group) -> None:
        self._adapter = adapter
        self._group = group
        self.layers = tuple(layers)
        self._by_name = {layer.name: layer for layer in layers}
        self._layer_of = {fqn: layer for layer in layers for fqn in layer.fqns}
        self._last_layouts: dict[Unit, UnitLayout] | None = None  # this rank's, at the last agree() or resumed()
        self._due = True
        self._listing: _Listing | None = None
        self._infos: Mapping[str, TensorInfo] = {}
        self._records: Mapping[str, TensorRecord] = {}
        self.layer_records = tuple(LayerRecord(name=layer.name, block=layer.block) for layer in layers)
        self.sizes: Mapping[Unit, UnitSize] = {}
        self.rows: Sequence[tuple[Unit, Layer, UnitSize, bool]] = ()
        """Units in model order, their layers and sizes, and whether an optimizer updates them."""
        self.still: Sequence[Unit] = ()
        """Units that no optimizer updates, in model order."""
        self.lost: set[Unit] = set()
        """Units whose pieces changed: the distance to their version is unknown until saved. The same on all ranks."""

    def changed(self, local: Mapping[Unit, LocalUnit]) -> bool:
        """Return whether :meth:`agree` is due: at first, after a resume, and if pieces of this rank changed since."""
        return self._due or _layouts(local) != self._last_layouts

    def resumed(self, local: Mapping[Unit, LocalUnit]) -> None:
        """Note the pieces whose drift is measured from now on: those that change before :meth:`agree` are lost."""
        self._last_layouts, self._due = _layouts(local), True

    def local(self) -> dict[Unit, LocalUnit]:
        """Return the units with pieces on this rank.

        Raise UnsupportedError for tensors that cannot be saved, or that were added to the model after attaching, and
        UnstorableError for tensors that are not plain."""
        with self._adapter.cache_lookups():
            identity = self._adapter.identity()
            if identity is None or self._listing is None or self._listing.identity is not identity.layout:
                units = self._list()
                self._listing = _Listing.of(units, identity)
                return units
            return self._listing.local(identity)

    def _list(self) -> dict[Unit, LocalUnit]:
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
        return {
            unit: LocalUnit(unit, UnitLayout.of(pieces), [piece.tensor for piece in pieces], tuple(pieces))
            for unit, pieces in units.items()
        }

    def agree(self, local: Mapping[Unit, LocalUnit]) -> set[Unit]:
        """Gather the units and sizes of all ranks. Return the units whose pieces changed on any rank. Collective.

        Raises UnstorableError, on all ranks, if only some replicas have optimizer state of a parameter."""
        members_here = {unit: part.layout.members for unit, part in local.items()}
        before, now = self._last_layouts, _layouts(local)
        changed_here = set() if before is None else {u for u in before | now if before.get(u) != now.get(u)}
        boxed_here = {unit for unit, layout in now.items() if any(one.box is not None for one in layout.fragments)}
        totals: dict[Unit, _Members] = {}
        reshaped, boxed = set[Unit](), set[Unit]()
        gathered = self._group.all_gather((members_here, changed_here, boxed_here, self._adapter.replicated_keys()))
        if len({keys for *_, keys in gathered}) > 1:
            raise UnstorableError(
                "the optimizer keeps state of a parameter on some ranks only, as a Muon for several ranks does, and a "
                "resume brings back the same on all: let all keep it, or shard the model (fully_shard, DeepSpeed ZeRO)"
            )
        for members_by_unit, changed, boxed_there, _ in gathered:
            reshaped |= changed
            boxed |= boxed_there
            for unit, members in members_by_unit.items():
                _add(totals.setdefault(unit, {}), members)
        order = sorted(totals, key=lambda unit: (self.layer(unit).position, unit.slot))
        self.sizes = {unit: _size(totals[unit], unit in boxed) for unit in order}
        self.rows = [(unit, self.layer(unit), size, is_moving(unit)) for unit, size in self.sizes.items()]
        self.still = [unit for unit, _, _, moving in self.rows if not moving]
        self._last_layouts, self._due = now, False
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


def _add(total: _Members, more: _Members) -> None:
    for fqn, (numel, dtype, nbytes) in more.items():
        before = total.get(fqn, (0, dtype, 0))
        total[fqn] = (before[0] + numel, dtype if dtype == before[1] else "mixed", before[2] + nbytes)


def _size(members: _Members, boxes: bool) -> UnitSize:
    return UnitSize(
        sum(numel for numel, _, _ in members.values()),
        sum(nbytes for _, _, nbytes in members.values()),
        members_digest({fqn: (numel, dtype) for fqn, (numel, dtype, _) in members.items()}),
        boxes,
    )


@dataclass(frozen=True)
class Survey:
    """The units on this rank, or the reason why the job cannot be saved."""

    local: Mapping[Unit, LocalUnit] = field(default_factory=dict)
    trouble: str | None = None  # the reason; ``local`` is then empty
    permanent: bool = False  # the reason is a type that no save can hold


class Surveyor:
    """Checks before each decision that the job of this rank is the attached one, and lists its units.

    A parameter in the optimizer but not in the model, a module added later, a replaced optimizer: a commit would be
    partial and pass for complete. Nothing is saved while this lasts; the reason is reported and training continues. The
    caller exchanges reasons between ranks. Create it before training; call :meth:`mark` after weights were loaded."""

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
                self._require_same_optimizer()
            local = self._table.local()
            self.mark()
        except UsageError as error:
            return Survey(trouble=str(error), permanent=isinstance(error, UnstorableError))
        except Exception as error:  # noqa: BLE001 - errors of the user's own modules and optimizer: reported as trouble
            _log.error("the model and the optimizer cannot be inspected", exc_info=error)
            return Survey(trouble=f"the model and the optimizer cannot be inspected: {error!r}")
        return Survey(local)

    def _require_same_optimizer(self) -> None:
        """Raise UnsupportedError if another optimizer seems to update the weights. A heuristic.

        A script may bind ``optimizer`` to another object unnoticed. That the attached one took no step proves nothing
        (a gradient scaler skips steps), nor do changed weights (scripts clip or average them). Both together, with
        unchanged optimizer state, mean another optimizer: its moments would not be saved."""
        before = self._versions
        now = None if self._updates or before is None else self._adapter.state_versions()
        if before is None or now is None:
            return
        if now.weights != before.weights and now.state == before.state:
            self.mark()
            raise UnsupportedError(
                f"the attached {now.optimizer} took no step since the last decision, yet its parameters changed, so it "
                "was probably replaced by another, whose state would be lost: close() and attach that one. Where a "
                "scaler skipped the step, and the script wrote to the weights, the next save is made"
            )

    def _count(self) -> None:
        self._updates += 1
