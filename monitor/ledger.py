"""Track the committed version of every unit on rank 0, and build the manifest of the next commit.

The training thread owns the ledger; only a commit advances it. The background thread gets an immutable
:class:`CommitDraft` and returns a manifest."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property

from monitor.observe.drift_meter import drift_ratio
from monitor.observe.units import UnitSize, is_moving
from policies.base import Choice
from store import schema
from store.commit import Group
from store.encoding import encoding_named
from store.errors import DamagedError, NotFiniteError, SaveError
from store.fragments import covered_numel
from store.names import RAW, SaveId, Unit, group_by_key
from store.resolve import Resolution
from store.segment import partial_tensor
from store.text import listed

AS_RESUMED = "the state is as it was resumed, which was not exact: the optimizer took no step since"
UNLIKE = "the ranks have different hyperparameters, such as learning rates, and a save holds those of one rank"
"""Entries of a commit's ``differs`` that do not carry over to later commits."""


@dataclass(frozen=True)
class JobFacts:
    """Fields of :class:`store.schema.ManifestRecord` that are equal in all manifests of a job."""

    store_id: str
    framework: str
    policy: str
    layers: tuple[schema.LayerRecord, ...]
    tensors: dict[str, schema.TensorRecord]
    began: float | None = None  # by time.monotonic(); in no manifest


@dataclass(frozen=True)
class CommitDraft:
    """A manifest without the facts that come from the segments."""

    facts: JobFacts
    save: SaveId
    world_size: int
    commits: int
    previous: SaveId | None
    find_kept: Callable[[], Mapping[Unit, schema.UnitRecord]]  # any thread may call it
    saved: Mapping[Unit, Choice]
    sizes: Mapping[Unit, UnitSize]  # of all units, over all ranks
    groups: Mapping[str, schema.GroupRecord]
    partial: bool = True  # whether layers with NaN or Inf may be left out

    @cached_property
    def kept(self) -> Mapping[Unit, schema.UnitRecord]:
        """Committed versions, with drift and staleness as of this save. Units in ``saved`` get new ones."""
        return self.find_kept()


@dataclass(frozen=True)
class PreparedCommit:
    """A manifest ready to commit, the units dropped by the health gate, and the drift of each unit as staged."""

    manifest: schema.ManifestRecord
    dropped: tuple[Unit, ...]
    drift: Mapping[Unit, float]


@dataclass
class Ledger:
    """The newest committed version of every unit, the segment groups that hold them, and the number of commits."""

    versions: dict[Unit, schema.UnitRecord] = field(default_factory=dict)
    groups: dict[str, schema.GroupRecord] = field(default_factory=dict)
    commits: int = 0
    newest: SaveId | None = None
    differs: tuple[str, ...] = ()  # of the newest commit: why it is not exact, as far as later ones inherit it
    full_after_rollback: bool = True  # False where a budget limits what a save may write
    life: int = 0  # most differences that a version may need; 0: there are no differences
    expected: dict[Unit, int] = field(default_factory=dict)  # with differences: bytes that the next version may take
    whole: dict[Unit, int] = field(default_factory=dict)  # with differences: bytes of the newest whole version

    def adopt(self, resolution: Resolution, step: int) -> None:
        """Reset to a resumed commit, fallbacks included; the job continues from ``step``.

        Versions after it are dropped: they would count as fresher than they are. If ``step`` is before the commit's
        step and ``full_after_rollback``, all versions of moving units are dropped, so that the next save is full.
        Otherwise the next resume may return to the same step, and a job that fails often would never advance."""
        back = self.full_after_rollback and step < resolution.manifest.step
        taken = [
            version
            for version in resolution.versions.values()
            if not (back and version.record.moving) and version.save.step <= step
        ]
        self.versions = {version.record.unit: version.record for version in taken}
        self.groups = {version.record.save: version.group for version in taken}
        for version in taken:
            self.groups.update(version.bases)
        self.expected = {one.record.unit: one.record.nbytes for one in taken if one.record.bases}
        self.whole = {}  # no difference is taken to a version from before
        self.commits = resolution.manifest.commits
        self.newest = resolution.manifest.save
        self.differs = _inherited_differs(resolution.manifest)

    def forget(self) -> None:
        """Drop all versions, so that the next save is a first one."""
        self.versions, self.groups, self.newest, self.differs = {}, {}, None, ()

    def leave(self, step: int) -> None:
        """Drop the versions of ``step`` and later steps: the job went back and will take these steps again."""
        self.versions = {unit: record for unit, record in self.versions.items() if record.version.step < step}
        self.whole = {}

    def drop(self, saves: Collection[str]) -> None:
        """Drop the versions that need segments of these saves, so that the next save writes the units anew."""
        self.versions = {
            unit: record for unit, record in self.versions.items() if {record.save, *record.bases}.isdisjoint(saves)
        }
        self.groups = {name: group for name, group in self.groups.items() if name not in saves}

    def advance(self, manifest: schema.ManifestRecord) -> None:
        """Make a committed manifest the newest."""
        for record in manifest.units if self.life else ():
            if record.moving and record.save == manifest.save.name:
                unit = record.unit
                self.expected[unit] = _expected_bytes(self.expected.get(unit), self.versions.get(unit), record)
                if not record.bases:
                    self.whole[unit] = record.nbytes
        self.versions = dict(manifest.versions)
        self.groups = dict(manifest.groups)
        self.commits = manifest.commits
        self.newest = manifest.save
        self.differs = _inherited_differs(manifest)

    def staleness(self, unit: Unit, step: int) -> int | None:
        """Return the steps since the newest version; None if there is none."""
        return staleness_of(self.versions.get(unit), step)

    def reserve(self) -> float:
        """Return the bytes to keep back, so that whole versions do not leave a debt: a share for each difference."""
        return sum(
            max(0, whole - self.expected[unit]) * min(1.0, len(self.versions[unit].bases) / self.life)
            for unit, whole in self.whole.items()
            if unit in self.versions
        )

    def kept(
        self, step: int, drift: Mapping[Unit, float | None], sizes: Mapping[Unit, UnitSize]
    ) -> dict[Unit, schema.UnitRecord]:
        """Return the committed versions, as of ``step``, of units that still exist with the same elements."""
        return {
            unit: record.replace(drift=drift.get(unit), staleness=step - record.version.step, reason="")
            for unit, record in self.versions.items()
            if unit in sizes and sizes[unit].members == record.members and record.version.step <= step
        }


def _expected_bytes(before: int | None, last: schema.UnitRecord | None, new: schema.UnitRecord) -> int:
    """Return the bytes of the version after ``new``. before: expected until now. last: the version before ``new``.

    Every few dozen versions one is whole, which says little about the next. Lossless differences are little smaller."""
    known = before if last is not None and last.encoding == new.encoding else None
    if new.bases:
        return new.nbytes if known is None else (known + new.nbytes) // 2
    twice = last is not None and not last.bases and last.version.epoch == new.version.epoch  # so differences do not pay
    return new.nbytes if twice or encoding_named(new.encoding).lossless else known or new.nbytes // 2


def _inherited_differs(manifest: schema.ManifestRecord) -> tuple[str, ...]:
    return tuple(text for text in manifest.differs if text not in (AS_RESUMED, UNLIKE))


def staleness_of(record: schema.UnitRecord | None, step: int) -> int | None:
    """Return the steps since a version; None for a version of a later step, left over from before a rollback."""
    age = -1 if record is None else step - record.version.step
    return age if age >= 0 else None


def build_manifest(draft: CommitDraft, group: Group) -> PreparedCommit:
    """Build the manifest that commits a complete segment group.

    Raises SaveError if the segments do not hold exactly the units that were decided, DamagedError if a unit was stored
    in several lossy encodings at once, and NotFiniteError if no layer to be saved is finite, a unit with NaN or Inf has
    no version yet, or ``draft.partial`` is False."""
    nonfinite, drift, errors = _combine_measures(group)
    if found := partial_tensor(group.parts, draft.facts.tensors):
        raise SaveError(f"save {draft.save}: the segments hold {found}")
    stored = _stored_units(group)
    for unit in draft.saved:
        actual, expected = stored.get(unit), draft.sizes[unit]
        if actual is None or (actual.size.numel, actual.size.members) != (expected.numel, expected.members):
            raise SaveError(f"save {draft.save}: the segments hold {actual} of {unit}, expected {expected}")
    dropped = tuple(unit for unit in draft.saved if unit.layer in nonfinite)
    units = [_unit_record(draft, unit, dropped, stored, errors) for unit in draft.sizes]
    if len(dropped) == len(draft.saved) or (dropped and not draft.partial):
        which = "all layers to be saved" if len(dropped) == len(draft.saved) else listed(sorted(nonfinite))
        raise NotFiniteError(f"save {draft.save}: {which} have NaN or Inf; the previous versions stay", dropped)
    written = sum(stored[unit].size.nbytes for unit in draft.saved)
    # Compression frames take a few bytes: a small state that does not compress grows a little.
    avoided = max(0, sum(size.nbytes for size in draft.sizes.values()) - written)
    differs = tuple(dict.fromkeys(text for part in group.parts for text in part.differs))
    manifest = manifest_of(draft, units, {**draft.groups, draft.save.name: group.record}, avoided, differs)
    return PreparedCommit(manifest, dropped, drift)


def manifest_of(
    draft: CommitDraft,
    units: Sequence[schema.UnitRecord],
    groups: Mapping[str, schema.GroupRecord],
    bytes_avoided: int,
    differs: tuple[str, ...],
) -> schema.ManifestRecord:
    """Build the manifest of ``units``. Of ``groups``, it lists those that the units refer to."""
    referenced = {name for record in units for name in (record.save, *record.bases)}
    facts = {name: value for name, value in vars(draft.facts).items() if name != "began"}
    return schema.ManifestRecord(
        **facts,
        step=draft.save.step,
        epoch=draft.save.epoch,
        commits=draft.commits,
        world_size=draft.world_size,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        uptime=None if draft.facts.began is None else time.monotonic() - draft.facts.began,
        previous=draft.previous.name if draft.previous else None,
        bytes_avoided=bytes_avoided,
        groups={name: record for name, record in groups.items() if name in referenced},
        units=tuple(units),
        differs=differs,
    )


def _unit_record(
    draft: CommitDraft,
    unit: Unit,
    dropped: tuple[Unit, ...],
    stored: "Mapping[Unit, _StoredUnit]",
    errors: Mapping[Unit, float],
) -> schema.UnitRecord:
    choice = draft.saved.get(unit)
    if choice is None or unit in dropped:
        record = draft.kept.get(unit)
        if record is None:
            raise NotFiniteError(
                f"save {draft.save}: {unit} has NaN or Inf and no earlier version, so a commit would be incomplete",
                dropped,
            )
        return record.replace(drift=None) if unit in dropped else record
    actual, error = stored[unit], errors.get(unit, 0.0)
    record = new_version(unit, draft.save, actual.size, choice.reason, encoding=actual.encoding, error=error)
    return record.replace(drift=error, bases=actual.bases)


def new_version(
    unit: Unit, save: SaveId, size: UnitSize, reason: str, *, encoding: str = RAW, error: float = 0.0
) -> schema.UnitRecord:
    """Return the record of a unit that ``save`` stores in ``size.nbytes`` bytes, with drift and staleness 0."""
    return schema.UnitRecord(
        **unit._asdict(),
        **vars(size),
        save=save.name,
        encoding=encoding,
        drift=0.0,
        staleness=0,
        moving=is_moving(unit),
        error=error,
        reason=reason,
    )


def _combine_measures(group: Group) -> tuple[set[str], dict[Unit, float], dict[Unit, float]]:
    """Return the layers with NaN or Inf, and the drift as staged and encoding error of the other layers' units."""
    nonfinite: set[str] = set()
    squares: dict[Unit, list[float]] = {}
    for part in group.parts:
        for measure in part.measures:
            if not measure.finite:
                nonfinite.add(measure.layer)
            total = squares.setdefault(measure.unit, [0.0] * 4)
            for i, more in enumerate((measure.moved_sq, measure.reference_sq, measure.error_sq, measure.decoded_sq)):
                total[i] += more
    finite = {unit: total for unit, total in squares.items() if unit.layer not in nonfinite}
    drift = {unit: drift_ratio(moved, reference) for unit, (moved, reference, _, _) in finite.items()}
    return nonfinite, drift, {unit: drift_ratio(error, decoded) for unit, (_, _, error, decoded) in finite.items()}


@dataclass(frozen=True)
class _StoredUnit:
    size: UnitSize  # nbytes: as stored
    encoding: str
    bases: tuple[str, ...]


def _stored_units(group: Group) -> dict[Unit, _StoredUnit]:
    by_unit = group_by_key((entry.unit, entry) for part in group.parts for entry in part.entries)
    # Fragments do not overlap, so if their elements add up to the unit's number, none is missing.
    stored, bases = {}, dict[Unit, set[str]]()
    for measure in (one for part in group.parts for one in part.measures if one.bases):
        bases.setdefault(measure.unit, set()).update(measure.bases)
    for unit, entries in by_unit.items():
        needed = {entry.base for entry in entries if entry.base is not None} | bases.get(unit, set())
        members = schema.members_digest(schema.members_of(entries))
        boxes = any(entry.box is not None for entry in entries)
        size = UnitSize(covered_numel(entries), sum(entry.nbytes for entry in entries), members, boxes)
        stored[unit] = _StoredUnit(size, _encoding_of(entries), tuple(sorted(needed)))
    return stored


def _encoding_of(entries: Sequence[schema.Entry]) -> str:
    """Return the unit's encoding. Single fragments may be raw, if the encoding does not apply to them."""
    names = {entry.encoding for entry in entries}
    lossy = sorted(name for name in names if not encoding_named(name).lossless)
    if len(lossy) > 1:
        raise DamagedError(f"{entries[0].unit} was stored in several encodings at once: {', '.join(lossy)}")
    return lossy[0] if lossy else sorted(names)[0]
