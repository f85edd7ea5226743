"""The effective step: where the weights of a composite stand, and which save's run state is nearest to that.

Weights that are k steps old lack k updates, which a schedule that goes on at the newest step never gives back. So the
step that counts is the newest less the mean staleness of the weights, each layer weighted by what it lost in a step.
Pure: numbers and records in, numbers and save names out. It reads no file, and does not know what is resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from store.names import SaveId
from store.schema import GroupRecord
from store.versions import Resolution


@dataclass(frozen=True)
class Aged:
    """One layer's weights in a composite.

    numel: elements. staleness: steps behind the newest; below 0 where ahead of it (in a merge of several sources).
    moved: relative distance that training went since that version; None where nobody measured it."""

    numel: int
    staleness: int
    moved: float | None


Rule = Callable[[Sequence[Aged]], float]
"""Mean staleness in steps, between 0 and that of the oldest (or, where all are ahead, of the newest)."""


def newest(weights: Sequence[Aged]) -> float:
    """Nothing is stale: the newest step counts, whatever lacks updates."""
    del weights
    return 0.0


def oldest(weights: Sequence[Aged]) -> float:
    """The most stale weights count: no layer's progress is skipped, that of all others is done again."""
    return float(max((one.staleness for one in weights), default=0))


def by_elements(weights: Sequence[Aged]) -> float:
    """The mean over all elements."""
    return _mean(weights, [1.0] * len(weights))


def by_pace(weights: Sequence[Aged]) -> float:
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


def effective_step(step: int, weights: Sequence[Aged], rule: Rule = by_pace) -> float:
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


def _pace(one: Aged) -> float | None:
    return None if one.moved is None or one.staleness <= 0 else one.moved / one.staleness


def _mean(weights: Sequence[Aged], shares: Sequence[float]) -> float:
    """0 where nothing has any share; exact sums, so that the order of layers does not matter."""
    total = math.fsum(one.numel * share for one, share in zip(weights, shares, strict=True))
    if total == 0.0:
        return 0.0
    stale = math.fsum(one.numel * share * one.staleness for one, share in zip(weights, shares, strict=True)) / total
    counted = [one.staleness for one in weights]
    return min(max(stale, min(counted)), max(counted))
