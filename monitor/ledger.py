"""What is committed so far, and the next manifest: kept on rank 0, moved only by a commit.

Knows records, not tensors or files. The training thread owns the ledger; the background thread gets an
immutable :class:`CommitDraft` and gives a manifest back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from monitor.observe.drift_meter import drift_ratio
from monitor.observe.units import UnitSize, is_moving
from policies.base import Choice
from store.commit import Group
from store.encoding import encoding_named
from store.errors import DamagedError, NotFiniteError, SaveError
from store.fragments import covered_numel
from store.names import SaveId, Unit
from store.resolve import Resolution
from store.schema import (
    Entry,
    GroupRecord,
    LayerRecord,
    ManifestRecord,
    TensorRecord,
    UnitRecord,
    members_digest,
    members_of,
)


@dataclass(frozen=True)
class JobFacts:
    """What every manifest of this job says alike."""

    store_id: str
    framework: str
    policy: str
    layers: tuple[LayerRecord, ...]
    tensors: Mapping[str, TensorRecord]


@dataclass(frozen=True)
class CommitDraft:
    """A manifest but for what the segments tell.

    kept: the versions that stay where they are not replaced, drift and staleness as of this save.
    saved: the units of this save and why. sizes: of all units over all ranks."""

    facts: JobFacts
    save: SaveId
    world_size: int
    commits: int
    previous: SaveId | None
    kept: Mapping[Unit, UnitRecord]
    saved: Mapping[Unit, Choice]
    sizes: Mapping[Unit, UnitSize]
    groups: Mapping[str, GroupRecord]


@dataclass(frozen=True)
class PreparedCommit:
    """A manifest ready to be committed; units that the health gate held back; drift of each unit as staged."""

    manifest: ManifestRecord
    dropped: tuple[Unit, ...]
    drift: Mapping[Unit, float]


@dataclass
class Ledger:
    """The newest committed version of every unit, the groups they lie in, and how many commits there were."""

    versions: dict[Unit, UnitRecord] = field(default_factory=dict)
    groups: dict[str, GroupRecord] = field(default_factory=dict)
    commits: int = 0
    newest: SaveId | None = None

    def adopt(self, resolution: Resolution, step: int, *, renew: bool = True) -> None:
        """Stand where a resume put the state, fallbacks included. step: that the job goes on from.

        Where that lies before the commit's, versions ahead of it would pass for fresher than they are, so that they
        count for nothing. renew: nor does any other of what moves, so that the next save is full: as long as some were
        stale, the next resume might come back to the same step, and a job which fails often would never get on."""
        back = renew and step < resolution.manifest.step
        taken = [
            version
            for version in resolution.versions.values()
            if not (back and version.record.moving) and version.save.step <= step
        ]
        self.versions = {version.record.unit: version.record for version in taken}
        self.groups = {version.record.save: version.group for version in taken}
        for version in taken:
            self.groups.update(version.bases)
        self.commits = resolution.manifest.commits
        self.newest = resolution.manifest.save

    def forget(self) -> None:
        """No commit can be built on: the next save is a first one."""
        self.versions, self.groups, self.newest = {}, {}, None

    def advance(self, manifest: ManifestRecord) -> None:
        """A manifest was committed."""
        self.versions = {record.unit: record for record in manifest.units}
        self.groups = dict(manifest.groups)
        self.commits = manifest.commits
        self.newest = manifest.save

    def staleness(self, unit: Unit, step: int) -> int | None:
        """Steps since the step of the newest version; None where there is none."""
        record = self.versions.get(unit)
        # A version of a later step is no version any more: the job went back behind it.
        return None if record is None or record.version.step > step else step - record.version.step

    def kept(
        self, step: int, drift: Mapping[Unit, float | None], sizes: Mapping[Unit, UnitSize]
    ) -> dict[Unit, UnitRecord]:
        """The present versions, for units that still exist with the same elements, as of ``step``."""
        return {
            unit: record.model_copy(
                update={"drift": drift.get(unit), "staleness": step - record.version.step, "reason": ""}
            )
            for unit, record in self.versions.items()
            if unit in sizes and sizes[unit].members == record.members and record.version.step <= step
        }


def build_manifest(draft: CommitDraft, group: Group) -> PreparedCommit:
    """The manifest that commits a complete segment group.

    SaveError or DamagedError where the segments do not hold exactly what was decided, or where a unit would be
    left without any version because its values are not finite."""
    sick_layers, drift, errors = _measured(group)
    _require_whole_tensors(draft, group)
    stored = _stored(group)
    for unit in draft.saved:
        found, wanted = stored.get(unit), draft.sizes[unit]
        if found is None or (found.numel, found.members) != (wanted.numel, wanted.members):
            raise SaveError(f"save {draft.save}: the segments hold {found} of {unit}, not {wanted}")
    dropped = tuple(unit for unit in draft.saved if unit.layer in sick_layers)
    units = [_unit_record(draft, unit, dropped, stored, errors) for unit in draft.sizes]
    if len(dropped) == len(draft.saved):
        raise NotFiniteError(
            f"save {draft.save}: every layer to be saved has NaN or Inf; the versions before stay", dropped
        )
    reached = {name for record in units for name in (record.save, *record.bases)}
    groups = {name: record for name, record in draft.groups.items() if name in reached}
    groups[draft.save.name] = group.record
    written = sum(stored[unit].nbytes for unit in draft.saved)
    manifest = ManifestRecord(
        store_id=draft.facts.store_id,
        step=draft.save.step,
        epoch=draft.save.epoch,
        commits=draft.commits,
        world_size=draft.world_size,
        framework=draft.facts.framework,
        policy=draft.facts.policy,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        previous=draft.previous.name if draft.previous else None,
        # Frames take a few bytes: a small state that does not pack comes out a little larger than it is.
        bytes_avoided=max(0, sum(size.nbytes for size in draft.sizes.values()) - written),
        layers=draft.facts.layers,
        tensors=dict(draft.facts.tensors),
        groups=groups,
        units=tuple(units),
    )
    return PreparedCommit(manifest, dropped, drift)


def _unit_record(
    draft: CommitDraft,
    unit: Unit,
    dropped: tuple[Unit, ...],
    stored: Mapping[Unit, _Stored],
    errors: Mapping[Unit, float],
) -> UnitRecord:
    choice = draft.saved.get(unit)
    if choice is None or unit in dropped:
        record = draft.kept.get(unit)
        if record is None:
            raise NotFiniteError(
                f"save {draft.save}: {unit} has NaN or Inf and no version yet, so nothing complete can be saved",
                dropped,
            )
        return record.model_copy(update={"drift": None}) if unit in dropped else record
    found = stored[unit]
    error = errors.get(unit, 0.0)
    return UnitRecord(
        layer=unit.layer,
        slot=unit.slot,
        save=draft.save.name,
        encoding=found.encoding,
        numel=found.numel,
        nbytes=found.nbytes,
        drift=error,
        staleness=0,
        moving=is_moving(unit),
        error=error,
        bases=found.bases,
        reason=choice.reason,
        members=found.members,
    )


def _require_whole_tensors(draft: CommitDraft, group: Group) -> None:
    found: dict[tuple[str, str], int] = {}
    for part in group.parts:
        for entry in part.entries:
            found[entry.fqn, entry.slot] = found.get((entry.fqn, entry.slot), 0) + entry.numel
    for (fqn, slot), numel in found.items():  # every slot is of its parameter's shape
        shape = draft.facts.tensors[fqn].shape if fqn in draft.facts.tensors else None
        if shape is None or math.prod(shape) != numel:
            raise SaveError(
                f"save {draft.save}: the segments hold {numel} elements of {fqn}/{slot}, of shape {shape}: the "
                "ranks do not hold the same tensors, or optimizer state exists on some of them only"
            )


def _measured(group: Group) -> tuple[set[str], dict[Unit, float], dict[Unit, float]]:
    """Layers with values that are not finite; drift, as staged, and error of encoding, of the units of the others."""
    sick: set[str] = set()
    squares: dict[Unit, list[float]] = {}
    for part in group.parts:
        for found in part.measures:
            if not found.finite:
                sick.add(found.layer)
            total = squares.setdefault(found.unit, [0.0] * 4)
            for i, more in enumerate((found.moved_sq, found.reference_sq, found.error_sq, found.decoded_sq)):
                total[i] += more
    sound = {unit: total for unit, total in squares.items() if unit.layer not in sick}
    drift = {unit: drift_ratio(moved, reference) for unit, (moved, reference, _, _) in sound.items()}
    return sick, drift, {unit: drift_ratio(error, decoded) for unit, (_, _, error, decoded) in sound.items()}


@dataclass(frozen=True)
class _Stored:
    """A unit as the segments of a save hold it."""

    numel: int
    nbytes: int
    members: str
    encoding: str
    bases: tuple[str, ...]


def _stored(group: Group) -> dict[Unit, _Stored]:
    entries: dict[Unit, list[Entry]] = {}
    for part in group.parts:
        for entry in part.entries:
            entries.setdefault(entry.unit, []).append(entry)
    # Without overlaps, as many elements as the unit has means that no element is missing.
    return {
        unit: _Stored(
            covered_numel(found),
            sum(entry.nbytes for entry in found),
            members_digest(members_of(found)),
            _encoding_of(found),
            tuple(sorted({entry.base for entry in found if entry.base is not None})),
        )
        for unit, found in entries.items()
    }


def _encoding_of(entries: Sequence[Entry]) -> str:
    """What the unit was encoded in. Fragments that it could not hold, or did not apply to, are raw."""
    names = {entry.encoding for entry in entries}
    lossy = sorted(name for name in names if not encoding_named(name).lossless)
    if len(lossy) > 1:
        raise DamagedError(f"{entries[0].unit} was stored in several encodings at once: {', '.join(lossy)}")
    return lossy[0] if lossy else sorted(names)[0]
