"""Drift certificate and effective step.

The effective step: where the weights of a composite stand, and which save's run state is nearest to that.

Weights that are k steps old lack k updates, which a schedule that goes on at the newest step never gives back. So the
step that counts is the newest less the mean staleness of the weights, each layer weighted by what it lost in a step.
Pure: numbers and records in, numbers and save names out. It reads no file, and does not know what is resumed.

The drift certificate: how old and how far moved every layer of a rebuilt checkpoint is.

Pure: from a resolution to numbers. It is never called exact unless every moving (layer, slot) is of the
manifest's own step and was stored losslessly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from store.encoding import ENCODINGS, encoding_named
from store.names import WEIGHTS, SaveId, Unit
from store.resolve import Resolution, Version
from store.schema import GroupRecord


@dataclass(frozen=True)
class LayerAge:
    """One layer's weights in a composite.

    numel: elements. staleness: steps behind the newest; below 0 where ahead of it (in a merge of several sources).
    moved: relative distance that training went since that version; None where nobody measured it."""

    numel: int
    staleness: int
    moved: float | None


Rule = Callable[[Sequence[LayerAge]], float]
"""Mean staleness in steps, between 0 and that of the oldest (or, where all are ahead, of the newest)."""


def newest(weights: Sequence[LayerAge]) -> float:
    """Nothing is stale: the newest step counts, whatever lacks updates."""
    del weights
    return 0.0


def oldest(weights: Sequence[LayerAge]) -> float:
    """The most stale weights count: no layer's progress is skipped, that of all others is done again."""
    return float(max((one.staleness for one in weights), default=0))


def by_elements(weights: Sequence[LayerAge]) -> float:
    """The mean over all elements."""
    return _mean(weights, [1.0] * len(weights))


def by_pace(weights: Sequence[LayerAge]) -> float:
    """The mean over all elements, weighted by each layer's pace: how far a step moves it, relative to its norm.

    Drift alone would not do: what is fresh has none, so it would not count, and one stale layer of a hundred would
    take the schedule all the way back. Pace is drift by staleness; where nobody knows it (fresh layers, versions that a
    fallback found) the mean of the others stands in. A stale layer that did not move at all lost nothing, and counts
    for nothing."""
    paces = [_pace(one) for one in weights]
    top = max((pace for pace in paces if pace is not None), default=0.0)
    if top == 0.0:
        return _mean(weights, [1.0 if pace is None else 0.0 for pace in paces])
    known = [(one.numel, pace / top) for one, pace in zip(weights, paces, strict=True) if pace is not None]
    elements = sum(numel for numel, _ in known)
    usual = math.fsum(numel * pace for numel, pace in known) / elements if elements else 1.0
    return _mean(weights, [usual if pace is None else pace / top for pace in paces])


RULES: Mapping[str, Rule] = MappingProxyType(
    {"newest": newest, "oldest": oldest, "by_elements": by_elements, "by_pace": by_pace}
)
"""By name, for comparisons; a resume uses :func:`by_pace`."""


def effective_step(step: int, weights: Sequence[LayerAge], rule: Rule = by_pace) -> float:
    """Where a composite of ``step`` stands: ``step`` itself where no weights are stale."""
    return step - rule(weights)


def run_saves(resolution: Resolution, effective: float) -> dict[SaveId, GroupRecord]:
    """The saves whose run state a resume may go on with, best first, each with its segment group.

    Of those that the resolution reads anyway: they are in the store, no prune takes them, and every rank's run state is
    in them. The nearest to ``effective``, of two alike the older; the commit's own is the last that is ever needed."""
    own = resolution.manifest.save
    found = {own: resolution.manifest.groups[own.name]}
    for version in resolution.versions.values():
        found[version.save] = version.group
        found |= {SaveId.parse(name): group for name, group in version.bases.items()}
    usable = [save for save in found if save.step <= own.step]
    ordered = sorted(usable, key=lambda save: (abs(save.step - effective), save.step, -save.epoch))
    return {save: found[save] for save in ordered[: ordered.index(own) + 1]}


def _pace(one: LayerAge) -> float | None:
    return None if one.moved is None or one.staleness <= 0 else one.moved / one.staleness


def _mean(weights: Sequence[LayerAge], shares: Sequence[float]) -> float:
    """0 where nothing has any share; exact sums, so that the order of layers does not matter."""
    total = math.fsum(one.numel * share for one, share in zip(weights, shares, strict=True))
    if total == 0.0:
        return 0.0
    stale = math.fsum(one.numel * share * one.staleness for one, share in zip(weights, shares, strict=True)) / total
    counted = [one.staleness for one in weights]
    return min(max(stale, min(counted)), max(counted))


MEMORY = "memory"
"""Source of what a resume read from shared memory."""

PEER = "peer"
"""Source of what it read, at least in part, from replicas of the memory of nodes that are gone."""


@dataclass(frozen=True)
class CertifiedUnit:
    """One (layer, slot).

    drift: None where it is not known (after a fallback, or never finite). nbytes: as stored. error: relative distance
    of what was to be stored to what decoding gives, as measured when it was stored; 0 for lossless encodings, None
    where values were rounded later and nobody measured it. bases: the saves that it is stored as the difference to.
    source: where it is read from, for people; empty for the store at hand. numel: elements, 0 where nobody counted.
    """

    layer: str
    slot: str
    step: int
    save: str
    staleness: int
    encoding: str
    drift: float | None
    moving: bool
    fallback: bool
    nbytes: int
    source: str = ""
    error: float | None = 0.0
    bases: tuple[str, ...] = ()
    numel: int = 0


@dataclass(frozen=True)
class Certificate:
    """What a rebuilt checkpoint consists of."""

    store_id: str
    save: str
    step: int
    exact: bool
    units: tuple[CertifiedUnit, ...]
    problems: tuple[str, ...]

    @property
    def max_staleness(self) -> int:
        """In steps, over moving units."""
        return max((unit.staleness for unit in self.units if unit.moving), default=0)

    @property
    def lossy(self) -> tuple[str, ...]:
        """Names of the encodings in it that lose bits; one that this release does not know counts as such."""
        return tuple(dict.fromkeys(unit.encoding for unit in self.units if is_lossy(unit.encoding)))

    @property
    def max_error(self) -> float | None:
        """What encoding lost at most, over all units; None where any is unknown."""
        return max_or_none(unit.error for unit in self.units)

    @property
    def max_drift(self) -> float | None:
        """Over moving units; None where any of them is unknown."""
        return max_or_none(unit.drift for unit in self.units if unit.moving)

    @property
    def effective_step(self) -> float:
        """Where the weights stand, in steps; ``step`` itself where none are stale. See :mod:`store.certificate`."""
        return self.effective_by(by_pace)

    def effective_by(self, rule: Rule) -> float:
        """The same by another rule, for comparisons."""
        return effective_step(self.step, [_layer_age(unit) for unit in self.units if unit.slot == WEIGHTS], rule)

    def as_json(self) -> dict[str, Any]:
        """JSON object, bounds included."""
        bounds = {
            "effective_step": self.effective_step,
            "max_staleness": self.max_staleness,
            "max_drift": self.max_drift,
            "max_error": self.max_error,
        }
        return {**asdict(self), **bounds}


def max_or_none(values: Iterable[float | None]) -> float | None:
    """The largest, 0 of none; None where any of them is unknown."""
    found = list(values)
    known = [value for value in found if value is not None]
    return max(known, default=0.0) if len(known) == len(found) else None


def is_lossy(encoding: str) -> bool:
    """Whether an encoding may lose bits. True for a name that this release does not know."""
    known = ENCODINGS.get(encoding)
    return known is None or not known.lossless


def mark_memory_sources(certificate: Certificate, save: SaveId, replicas: Collection[Unit] = ()) -> Certificate:
    """The same, with what was read from the version ``save`` in memory marked as such. replicas: of these units
    something was read from what peers had kept."""
    marked = [
        replace(unit, source=PEER if Unit(unit.layer, unit.slot) in replicas else MEMORY)
        if unit.save == save.name
        else unit
        for unit in certificate.units
    ]
    return replace(certificate, units=tuple(marked))


def certify(resolution: Resolution) -> Certificate:
    """The certificate of the checkpoint that a resolution gives."""
    manifest = resolution.manifest
    units = tuple(_certified(manifest.step, version) for version in resolution.versions.values())
    return Certificate(
        store_id=manifest.store_id,
        save=manifest.save.name,
        step=manifest.step,
        exact=all(is_exact(unit, manifest.save.name) for unit in units),
        units=units,
        problems=resolution.problems,
    )


def _certified(step: int, version: Version) -> CertifiedUnit:
    record = version.record
    return CertifiedUnit(
        layer=record.layer,
        slot=record.slot,
        step=version.save.step,
        save=record.save,
        staleness=step - version.save.step,
        encoding=_encoding(version),
        drift=None if version.fallback else record.drift,
        moving=record.moving,
        fallback=version.fallback,
        nbytes=record.nbytes,
        error=record.error,
        bases=record.bases,
        numel=record.numel,
    )


def _layer_age(unit: CertifiedUnit) -> LayerAge:
    return LayerAge(unit.numel, unit.staleness, _moved(unit.drift, unit.error))


def _moved(drift: float | None, error: float | None) -> float | None:
    """How far training went of what ``drift`` says; None where that is mostly what encoding lost, or not known."""
    if drift is None or error is None:
        return None
    if error == 0.0:
        return drift
    return drift * math.sqrt(1.0 - (error / drift) ** 2) if drift > 2 * error else None


def _encoding(version: Version) -> str:
    """What the manifest names; a fragment of the unit that lost bits is not passed over for that."""
    named = version.record.encoding
    if encoding_named(named).lossless:
        return next((e for e in (s.entry.encoding for s in version.sources) if not encoding_named(e).lossless), named)
    return named


def is_exact(unit: CertifiedUnit, save: str) -> bool:
    """Whether a unit of the commit ``save`` is what training had when that was made, to the last bit.

    A step may have several saves: of a job that went back, or that saved it anew. Another one's values may differ."""
    if is_lossy(unit.encoding) or unit.error != 0:
        return False
    if unit.moving:
        return unit.save == save
    return not unit.fallback and unit.drift == 0
