"""Newest valid version of every unit.

Which stored fragment another one is the difference to. One level deep: a base is never a difference itself.

Which version of every unit a resume or a merge takes: the newest committed one that is whole.

A bad unit falls back to its own previous version, found through the older manifests, not to the previous
checkpoint. A version is known bad from its records (missing part, wrong size) or because a reader found bytes
that do not match their hash and asks again with that version in ``bad``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from store.catalog import Catalog, LoadedGroup
from store.encoding import encoding_named
from store.errors import DamagedError, MissingError, NothingToResumeError, StorageError, UnreachableError
from store.fragments import FragmentIndex, Source, covered_numel
from store.layout import segment_dir
from store.marks import resume_order
from store.names import Fragment, SaveId, Unit
from store.schema import Entry, GroupRecord, ManifestRecord, PartRecord, UnitRecord
from store.text import listed

Key = tuple[str, str, str, int, int, str, str]
"""A save, and what is the same for the same fragment encoded in the same way."""


def with_bases(stored: Sequence[tuple[PartRecord, Entry]], groups: Iterable[LoadedGroup]) -> tuple[Source, ...]:
    """Stored fragments of one unit, each with its base from ``groups``. DamagedError where one is not to be found."""
    units = {entry.unit for _, entry in stored if entry.base is not None}
    bases = index_bases(pair for group in groups for unit in units for pair in group.by_unit.get(unit, ()))
    return tuple(Source(part, entry, _base_of(part, entry, bases)) for part, entry in stored)


def index_bases(stored: Iterable[tuple[PartRecord, Entry]]) -> dict[Key, Source]:
    """The fragments that may be bases, by the :func:`base_key` of those that are differences to them."""
    return {whole_key(part, entry): Source(part, entry) for part, entry in stored if entry.base is None}


def base_key(entry: Entry) -> Key | None:
    """Where :func:`index_bases` has what the entry is the difference to. None where it is stored whole itself."""
    return None if entry.base is None else _key(entry.base, entry)


def whole_key(part: PartRecord, entry: Entry) -> Key:
    """Where :func:`index_bases` has the entry itself."""
    return _key(part.save.name, entry)


def _base_of(part: PartRecord, entry: Entry, bases: Mapping[Key, Source]) -> Source | None:
    key = base_key(entry)
    if key is None:
        return None
    if key not in bases:
        raise DamagedError(
            f"save {part.save} holds elements {entry.start} to {entry.stop} of {entry.fqn}/{entry.slot} as the "
            f"difference to {entry.base}, where they are not to be found as {entry.encoding}"
        )
    return bases[key]


def _key(save: str, entry: Entry) -> Key:
    return save, entry.fqn, entry.slot, entry.start, entry.numel, entry.dtype, entry.encoding


@dataclass(frozen=True)
class RejectedVersion:
    """A version found to be damaged: of one unit, or (unit None) the run state of a save.

    fragment: the only one of the unit's stored fragments that is. Without it, whatever is stored as a difference to
    any fragment of that version is taken to be lost; with it, only what is the difference to that one."""

    save: SaveId
    unit: Unit | None = None
    fragment: Fragment | None = None


@dataclass(frozen=True)
class Version:
    """A unit's version and the stored fragments that hold it.

    record: as in the manifest that was asked for, or, after a fallback, in the older manifest it was found in.
    group: the segment group it lies in. fallback: older than the manifest names, because that one is damaged.
    bases: the groups of ``record.bases``.
    """

    record: UnitRecord
    group: GroupRecord
    sources: tuple[Source, ...]
    fallback: bool
    bases: Mapping[str, GroupRecord] = field(default_factory=dict)

    @property
    def save(self) -> SaveId:
        return self.record.version


@dataclass(frozen=True)
class Resolution:
    """One manifest with a whole version for every unit, and the parts that hold its run state by rank."""

    manifest: ManifestRecord
    versions: Mapping[Unit, Version]
    run_parts: Mapping[int, PartRecord]
    problems: tuple[str, ...]

    @property
    def fallbacks(self) -> tuple[Version, ...]:
        """Versions that are older than the manifest names."""
        return tuple(version for version in self.versions.values() if version.fallback)

    def sources(self) -> Iterable[Source]:
        """All stored fragments of all versions."""
        for version in self.versions.values():
            yield from version.sources


def resolve(catalog: Catalog, save: SaveId, bad: Set[RejectedVersion] = frozenset()) -> Resolution:
    """Whole versions for every unit of a manifest. DamagedError where one has none, or its run state is gone."""
    manifest = catalog.manifest(save)
    problems: list[str] = []
    versions: dict[Unit, Version] = {}
    for record in manifest.units:
        found = _whole(catalog, manifest, record, bad, problems)
        versions[record.unit] = found or _previous(catalog, manifest, record, bad, problems)
    run_parts = _run_parts(catalog, manifest, bad)
    # Units of different versions must not hold the same elements: then it is not one state.
    FragmentIndex(source for version in versions.values() for source in version.sources)
    return Resolution(manifest, versions, run_parts, tuple(dict.fromkeys(problems)))


def newest_resumable(
    catalog: Catalog, bad: Set[RejectedVersion] = frozenset(), skip: Set[SaveId] = frozenset()
) -> tuple[Resolution, tuple[str, ...]]:
    """The newest manifest that resolves, and what was wrong with those before it. NothingToResumeError if none does;
    UnreachableError where that cannot be known now.

    Those that jobs died of come last, see :func:`store.marks.resume_order`."""
    suspects = catalog.suspects()
    passed_over: list[str] = list(suspects.problems)
    saves = catalog.saves()
    for save in resume_order(saves, suspects.saves, catalog.proven()):
        if save in skip:
            continue
        try:
            return resolve(catalog, save, bad), (*passed_over, *suspects.told(save, saves))
        except UnreachableError:
            raise
        except (DamagedError, StorageError) as error:
            passed_over.append(f"{save}: {error}")
    if passed_over:
        raise NothingToResumeError("no commit can be resumed; " + listed(passed_over, 4, "; "))
    raise NothingToResumeError("the store holds no commit yet")


def _whole(
    catalog: Catalog, manifest: ManifestRecord, record: UnitRecord, bad: Set[RejectedVersion], problems: list[str]
) -> Version | None:
    # A later release's name is no reason to fall back.
    encoding_named(record.encoding, f"manifest {manifest.save}: {record.unit}")
    if RejectedVersion(record.version, record.unit) in bad:
        problems.append(f"{record.unit}: version {_unfit(catalog, record.version)}")
        return None
    damaged = [base for base in record.bases if RejectedVersion(SaveId.parse(base), record.unit) in bad]
    if damaged:
        base = _unfit(catalog, SaveId.parse(damaged[0]), base=True)
        problems.append(f"{record.unit}: version {record.save} is the difference to {base}")
        return None
    group_record = _group_record(manifest, record.version)
    group = catalog.group(record.version, group_record)
    base_records = {name: _group_record(manifest, SaveId.parse(name)) for name in record.bases}
    bases = [catalog.group(SaveId.parse(name), found) for name, found in base_records.items()]
    try:
        sources = with_bases(group.by_unit.get(record.unit, ()), bases)
        _require_covered(record, sources)
        _require_undamaged(catalog, record, sources, bad)
    except DamagedError as error:
        problems += [problem for one in (group, *bases) for problem in one.problems]
        problems.append(str(error))
        return None
    return Version(record, group_record, sources, fallback=False, bases=base_records)


def _require_covered(record: UnitRecord, sources: tuple[Source, ...]) -> None:
    covered = covered_numel(source.entry for source in sources)
    if covered != record.numel:
        raise DamagedError(f"{record.unit}: version {record.save} has {covered} of its {record.numel} elements")


def _require_undamaged(
    catalog: Catalog, record: UnitRecord, sources: tuple[Source, ...], bad: Set[RejectedVersion]
) -> None:
    if not bad:
        return
    for source in sources:
        if RejectedVersion(source.part.save, record.unit, source.entry.fragment) in bad:
            raise DamagedError(f"{record.unit}: version {_unfit(catalog, source.part.save)}")
        if (
            source.base is not None
            and RejectedVersion(source.base.part.save, record.unit, source.entry.fragment) in bad
        ):
            base = _unfit(catalog, source.base.part.save, base=True)
            raise DamagedError(f"{record.unit}: version {record.save} is the difference to {base}")


def _unfit(catalog: Catalog, save: SaveId, *, base: bool = False) -> str:
    """A save that a reader found to be of no use, and why: it may have been pruned while it was read."""
    try:
        catalog.files.list_dir(segment_dir(save))
    except MissingError:
        return f"{save}, which is gone" if base else f"{save} is gone"
    except StorageError:
        pass  # whoever reads on is told what is refused
    return f"{save}, which is damaged" if base else f"{save} does not match its hashes"


def _previous(
    catalog: Catalog, manifest: ManifestRecord, record: UnitRecord, bad: Set[RejectedVersion], problems: list[str]
) -> Version:
    tried = {record.version}
    for candidate_manifest in _ancestors(catalog, manifest, problems):
        candidate = next((u for u in candidate_manifest.units if u.unit == record.unit), None)
        if candidate is None or not _alike(candidate, record) or candidate.version in tried:
            continue
        tried.add(candidate.version)
        found = _whole(catalog, candidate_manifest, candidate, bad, problems)
        if found is not None:
            return replace(found, fallback=True)
    raise DamagedError(f"{record.unit} has no version that is whole; " + "; ".join(dict.fromkeys(problems)))


def _alike(older: UnitRecord, record: UnitRecord) -> bool:
    return (older.numel, older.members) == (record.numel, record.members)


def _ancestors(catalog: Catalog, manifest: ManifestRecord, problems: list[str]) -> Iterator[ManifestRecord]:
    """Older manifests that the commit continues, newest first.

    What lies between a commit and the one it continues was given up by going back, so it is nobody's past.
    Where that one is pruned or damaged the next older one stands in, unless it is ahead in steps.
    """
    previous = manifest.previous
    for save in catalog.saves():
        if previous is None or save > SaveId.parse(previous) or save.step > manifest.step:
            continue
        try:
            older = catalog.manifest(save)
        except UnreachableError:
            raise
        except (DamagedError, StorageError) as error:
            problems.append(str(error))
            continue
        previous = older.previous
        yield older


def _group_record(manifest: ManifestRecord, save: SaveId) -> GroupRecord:
    record = manifest.groups.get(save.name)
    if record is None:
        raise DamagedError(f"manifest {manifest.save} names save {save} but not its segment group")
    return record


def _run_parts(catalog: Catalog, manifest: ManifestRecord, bad: Set[RejectedVersion]) -> Mapping[int, PartRecord]:
    group = catalog.group(manifest.save, _group_record(manifest, manifest.save))
    if RejectedVersion(manifest.save) in bad or len(group.parts) != manifest.world_size:
        raise DamagedError(f"the run state of {manifest.save} is damaged; " + "; ".join(group.problems))
    return group.parts
