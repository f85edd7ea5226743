"""Compute the drift certificate of a rebuilt checkpoint and its effective step. Pure functions of records.

A certificate is exact only if every moving (layer, slot) is of the manifest's own save and was stored losslessly, and
the job's self-check found no state that a resume would change.

Weights that are k steps old lack k updates, which a schedule that continues at the newest step never makes up for. So
the effective step is the newest less the mean staleness of the weights, each layer weighted by its loss per step."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from store.encoding import ENCODINGS, encoding_named
from store.names import BUFFER, WEIGHTS, SaveId, Unit
from store.resolve import Resolution, Version
from store.schema import GroupRecord, ManifestRecord, UnitRecord


@dataclass(frozen=True)
class LayerAge:
    """One layer's weights in a composite."""

    numel: int
    staleness: int  # steps behind the newest; negative if ahead of it (in a merge of several sources)
    moved: float | None  # relative distance that training moved the layer since that version; None if unknown


def by_pace(weights: Sequence[LayerAge]) -> float:
    """Return the mean staleness over all elements, weighted by each layer's pace: its relative movement per step.

    Pace is drift divided by staleness; where it is unknown (fresh layers, versions found by a fallback), it is the mean
    of the other layers. docs/effective-step.md says why."""
    paces = [None if one.moved is None or one.staleness <= 0 else one.moved / one.staleness for one in weights]
    top = max((pace for pace in paces if pace is not None), default=0.0)
    if top == 0.0:
        return _mean(weights, [1.0 if pace is None else 0.0 for pace in paces])
    known = [(layer.numel, pace / top) for layer, pace in zip(weights, paces, strict=True) if pace is not None]
    elements = sum(numel for numel, _ in known)
    usual = math.fsum(numel * pace for numel, pace in known) / elements if elements else 1.0
    return _mean(weights, [usual if pace is None else pace / top for pace in paces])


def effective_step(step: int, weights: Sequence[LayerAge]) -> float:
    """Return the effective step of a composite of ``step``: ``step`` itself if no weights are stale."""
    return step - by_pace(weights)


def run_saves(resolution: Resolution, effective: float) -> dict[SaveId, GroupRecord]:
    """Return the saves whose run state may be resumed, best first, each with its segment group.

    Only saves that the resolution reads anyway: they are in the store, pruning keeps them, and they hold every rank's
    run state. Not those of a branch that the job left. The save nearest to ``effective`` comes first, the older of two
    equally near ones; the commit's own save comes last."""
    commit = resolution.manifest.save
    groups = {commit: resolution.manifest.groups[commit.name]}
    for version in resolution.versions.values():
        groups[version.save] = version.group
        groups |= {SaveId.parse(name): group for name, group in version.bases.items()}
    # One of a later epoch at an earlier step shows that the job went back to before a save.
    left = {save for save in groups for one in groups if one.epoch > save.epoch and one.step < save.step}
    usable = [save for save in groups if save.step <= commit.step and save not in left]
    ordered = sorted(usable, key=lambda save: (abs(save.step - effective), save.step, -save.epoch))
    return {save: groups[save] for save in ordered[: ordered.index(commit) + 1]}


def _mean(weights: Sequence[LayerAge], shares: Sequence[float]) -> float:
    """Return the weighted mean staleness, 0 if all shares are 0; exact sums make the order of layers irrelevant."""
    sizes = [layer.numel * share for layer, share in zip(weights, shares, strict=True)]
    total = math.fsum(sizes)
    if total == 0.0:
        return 0.0
    ages = [layer.staleness for layer in weights]
    mean = math.fsum(size * age for size, age in zip(sizes, ages, strict=True)) / total
    return min(max(mean, min(ages)), max(ages))


MEMORY = "memory"  # source of units that a resume read from shared memory
PEER = "peer"  # source of units read, at least in part, from replicas of the memory of lost nodes


@dataclass(frozen=True)
class CertifiedUnit:
    """One (layer, slot)."""

    layer: str
    slot: str
    step: int
    save: str
    staleness: int
    encoding: str
    drift: float | None  # None if unknown (after a fallback, or never finite)
    moving: bool
    fallback: bool
    nbytes: int  # as stored
    source: str = ""  # where the unit is read from, for people; empty for the store at hand
    error: float | None = 0.0  # relative distance to the decoded form, measured when stored; None if not measured
    bases: tuple[str, ...] = ()  # saves that the unit is stored as the difference to
    numel: int = 0  # elements; 0 if unknown


@dataclass(frozen=True)
class Certificate:
    """The versions that a rebuilt checkpoint consists of. Never both exact and as found."""

    store_id: str
    save: str
    step: int
    exact: bool  # whether all of it is the training state of one step, bit for bit, and hashes vouch for that
    units: tuple[CertifiedUnit, ...]
    problems: tuple[str, ...]
    as_found: bool = False  # exact if all imported files are of one save, which no hash proves
    unvouched: int = 0  # number of stored tensors (weights, and each moment) whose origin nothing proves

    @property
    def whole(self) -> bool:
        """Whether nothing is known to be older, rounded or doubtful: it is exact, or as found."""
        return self.exact or self.as_found

    @property
    def max_staleness(self) -> int:
        """Largest staleness of the moving units, in steps."""
        return max((unit.staleness for unit in self.units if unit.moving), default=0)

    @property
    def lossy(self) -> tuple[str, ...]:
        """Names of the lossy encodings in it; an encoding unknown to this release counts as lossy."""
        return tuple(dict.fromkeys(unit.encoding for unit in self.units if is_lossy(unit.encoding)))

    @property
    def max_error(self) -> float | None:
        """Largest encoding error over all units; None if any is unknown."""
        return max_or_none(unit.error for unit in self.units)

    @property
    def max_drift(self) -> float | None:
        """Largest drift over the moving units; None if any is unknown."""
        return max_or_none(unit.drift for unit in self.units if unit.moving)

    @property
    def effective_step(self) -> float:
        """Step whose progress the weights hold; ``step`` itself if none are stale."""
        weights = [unit for unit in self.units if unit.slot == WEIGHTS]
        ages = [LayerAge(unit.numel, unit.staleness, _moved(unit.drift, unit.error)) for unit in weights]
        return effective_step(self.step, ages)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object with all fields and bounds."""
        bounds = ("effective_step", "max_staleness", "max_drift", "max_error")
        return {**asdict(self), **{name: getattr(self, name) for name in bounds}}


def max_or_none(values: Iterable[float | None]) -> float | None:
    """Return the largest value, 0 if there are none, None if any is None."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return max(known, default=0.0) if len(known) == len(listed) else None


def is_lossy(encoding: str) -> bool:
    """Return whether an encoding may lose bits; True for a name that this release does not know."""
    known = ENCODINGS.get(encoding)
    return known is None or not known.lossless


def mark_memory_sources(certificate: Certificate, save: SaveId, replicas: Collection[Unit] = ()) -> Certificate:
    """Return the certificate with the source of units read from the in-memory version ``save``.

    ``replicas`` names the units that were read, at least in part, from replicas on other nodes."""
    marked = [
        replace(unit, source=PEER if Unit(unit.layer, unit.slot) in replicas else MEMORY)
        if unit.save == save.name
        else unit
        for unit in certificate.units
    ]
    return replace(certificate, units=tuple(marked))


JOURNAL = "journal"  # source of units that were brought to a later step by the steps in the journal


def certify_replayed(certificate: Certificate, save: SaveId, *, as_saved: bool) -> Certificate:
    """Return the certificate of a commit whose units were all brought to the step ``save`` by their optimizer.

    as_saved: whether the job found that all that it saved comes back."""
    moved = [
        replace(unit, step=save.step, save=save.name, staleness=0, drift=0.0, fallback=False, source=JOURNAL)
        if unit.moving or unit.slot == BUFFER
        else unit
        for unit in certificate.units
    ]
    whole = as_saved and all(is_exact(unit, save.name) for unit in moved)
    exact, as_found = whole and not certificate.as_found, whole and certificate.as_found
    return replace(certificate, units=tuple(moved), save=save.name, step=save.step, exact=exact, as_found=as_found)


def certify(resolution: Resolution) -> Certificate:
    """Build the certificate of a resolution."""
    manifest = resolution.manifest
    changes: dict[bool, dict[str, Any]] = {True: {"fallback": True, "drift": None}, False: {}}
    units = tuple(
        certify_record(manifest.step, one.record, encoding=_encoding(one), **changes[one.fallback])
        for one in resolution.versions.values()
    )
    return Certificate(
        store_id=manifest.store_id,
        save=manifest.save.name,
        step=manifest.step,
        exact=all(is_exact(unit, manifest.save.name) for unit in units) and not manifest.differs,
        units=units,
        problems=(*resolution.problems, *(f"{FOUND} {text}" for text in manifest.differs)),
    )


FOUND = "as the job found when it saved:"  # of problems that a commit was made with
IMPORT = "import"  # policy name in the manifest of an imported commit
AS_FOUND = "as found: imported, and no hash proves that all files were of one save"
IMPORTED_AS_FOUND = "imported as found"  # reason of units of an inexact import. Early releases name its kind


def imported_as_found(manifest: ManifestRecord) -> bool:
    """Return whether a commit was imported from foreign files: hashes prove its bytes only since the import."""
    early = (f"imported from a {kind} checkpoint" for kind in ("deepspeed", "universal", "trainer"))
    foreign = (IMPORTED_AS_FOUND, *early)
    return manifest.policy == IMPORT and any(unit.reason.startswith(foreign) for unit in manifest.units)


def certify_stored(resolution: Resolution) -> Certificate:
    """Build the certificate of a resolution, as found if it was imported so."""
    certificate = certify(resolution)
    foreign = certificate.exact and imported_as_found(resolution.manifest)
    return replace(certificate, exact=False, as_found=True) if foreign else certificate


def certify_record(step: int, record: UnitRecord, **found: Any) -> CertifiedUnit:
    """Return a unit as the manifest of ``step`` records it, except for what was ``found`` otherwise."""
    same = {"layer", "slot", "save", "encoding", "drift", "moving", "nbytes", "error", "bases", "numel"}
    written = record.version.step
    recorded = {name: getattr(record, name) for name in same}
    return CertifiedUnit(**{**recorded, "step": written, "staleness": step - written, "fallback": False, **found})


def _moved(drift: float | None, error: float | None) -> float | None:
    """Return the part of ``drift`` that is not encoding error; None if that is unknown or below the error."""
    if drift is None or error is None:
        return None
    if error == 0.0:
        return drift
    return drift * math.sqrt(1.0 - (error / drift) ** 2) if drift > 2 * error else None


def _encoding(version: Version) -> str:
    """Return the manifest's encoding, or the first lossy one of the fragments if the manifest's is lossless."""
    names = [version.record.encoding, *(source.entry.encoding for source in version.sources)]
    return next((name for name in names if not encoding_named(name).lossless), names[0])


def is_exact(unit: CertifiedUnit, save: str) -> bool:
    """Return whether a unit of the commit ``save`` is bit-identical to the training state at that save.

    Saves of the same step may differ: a job may have gone back, or saved the step again."""
    if is_lossy(unit.encoding) or unit.error != 0:
        return False
    return unit.save == save if unit.moving else not unit.fallback and unit.drift == 0
