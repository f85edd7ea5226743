"""Resolve a commit: find the newest whole version of every unit, with the bases of its fragments.

A damaged unit falls back to its own previous version, found through older manifests, and not to the previous
checkpoint. A version is damaged by its records (missing part, wrong size), or because a reader found bytes that do not
match their hash and resolves again with that version in ``bad``. A base may be a difference itself."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from store.catalog import Catalog, LoadedGroup, noting, resume_order
from store.encoding import encoding_named
from store.errors import DamagedError, MissingError, NothingToResumeError, StorageError
from store.fragments import FragmentIndex, Source, covered_numel
from store.names import Box, Fragment, SaveId, Unit, segment_dir
from store.schema import Entry, GroupRecord, ManifestRecord, PartRecord, UnitRecord
from store.text import listed

Key = tuple[str, str, str, int, int, Box | None, str, str]
"""A save name, and the fields a fragment has in common with its base."""

Stored = tuple[PartRecord, Entry]

LONGEST_CHAIN = 64  # of differences to differences: far more than are written, so only forged records reach it


def with_bases(stored: Sequence[tuple[PartRecord, Entry]], groups: Iterable[LoadedGroup]) -> tuple[Source, ...]:
    """Return stored fragments of one unit with their bases from ``groups``. Raises DamagedError if one is missing."""
    units = {entry.unit for _, entry in stored if entry.base is not None}
    bases = index_bases(pair for group in groups for unit in units for pair in group.by_unit.get(unit, ()))
    return tuple(with_base(part, entry, bases.get) for part, entry in stored)


def index_bases(stored: Iterable[Stored]) -> dict[Key, Stored]:
    """Index fragments by the :func:`base_key` of the differences to them."""
    return {own_key(part, entry): (part, entry) for part, entry in stored}


def base_key(entry: Entry) -> Key | None:
    """Return the key of the entry's base in :func:`index_bases`, None if it has no base."""
    return None if entry.base is None else _key(entry.base, entry)


def own_key(part: PartRecord, entry: Entry) -> Key:
    """Return the key of the entry itself in :func:`index_bases`."""
    return _key(part.save.name, entry)


def with_base(part: PartRecord, entry: Entry, find: Callable[[Key], Stored | None]) -> Source:
    """Return a stored fragment with its base, that one's base, and so on. Raises DamagedError if one is missing."""
    chain = [(part, entry)]
    while (key := base_key(entry)) is not None:
        found = find(key)
        if found is None or len(chain) > LONGEST_CHAIN:
            raise DamagedError(
                f"save {part.save} holds elements {entry.start} to {entry.stop} of {entry.fqn}/{entry.slot} as the "
                f"difference to {entry.base}, which does not hold them as {entry.encoding}"
            )
        chain.append(found)
        part, entry = found
    source = Source(*chain.pop())
    while chain:
        source = Source(*chain.pop(), source)
    return source


def _key(save: str, entry: Entry) -> Key:
    return save, entry.fqn, entry.slot, entry.start, entry.numel, entry.box, entry.dtype, entry.encoding


@dataclass(frozen=True)
class RejectedVersion:
    """A damaged version of one unit, or (``unit`` None) the damaged run state of a save."""

    save: SaveId
    unit: Unit | None = None
    fragment: Fragment | None = None  # damaged alone, with the differences to it; None: the whole version, with those
    why: str = field(default="", compare=False)  # for people


@dataclass(frozen=True)
class Version:
    """A unit's version and the stored fragments that hold it."""

    record: UnitRecord  # from the resolved manifest, or after a fallback from an older manifest
    group: GroupRecord  # segment group that holds the version
    sources: tuple[Source, ...]  # its stored fragments
    fallback: bool  # whether it is older than the resolved manifest's version, because that one is damaged
    bases: Mapping[str, GroupRecord] = field(default_factory=dict)  # groups of ``record.bases``

    @property
    def save(self) -> SaveId:
        return self.record.version


@dataclass(frozen=True)
class Resolution:
    """A manifest with a whole version of every unit, and the parts with its run state by rank."""

    manifest: ManifestRecord
    versions: Mapping[Unit, Version]
    run_parts: Mapping[int, PartRecord]
    problems: tuple[str, ...]

    @property
    def fallbacks(self) -> tuple[Version, ...]:
        """Versions older than those that the manifest names."""
        return tuple(version for version in self.versions.values() if version.fallback)

    @cached_property
    def index(self) -> FragmentIndex[Source]:
        """All stored fragments by name. Raises DamagedError if versions of different units hold the same elements."""
        return FragmentIndex(self.sources())

    def sources(self) -> Iterable[Source]:
        for version in self.versions.values():
            yield from version.sources

    def slots(self) -> dict[str, dict[str, str]]:
        """Return the stored slots of each parameter, with their dtypes."""
        slots: dict[str, dict[str, str]] = {}
        for source in self.sources():
            slots.setdefault(source.fqn, {})[source.slot] = source.dtype
        return slots


def resolve(catalog: Catalog, save: SaveId, bad: Set[RejectedVersion] = frozenset()) -> Resolution:
    """Find a whole version of every unit of a manifest. Raises DamagedError if a unit or the run state has none."""
    manifest = catalog.manifest(save)
    problems: list[str] = []
    versions: dict[Unit, Version] = {}
    for record in manifest.units:
        version = _load_version(catalog, manifest, record, bad, problems)
        versions[record.unit] = version or _previous_version(catalog, manifest, record, bad, problems)
    run = catalog.group(save, _group_record(manifest, save))
    if RejectedVersion(save) in bad or len(run.parts) != manifest.world_size:
        raise DamagedError("; ".join([f"the run state of {save} is damaged", *run.problems]))
    resolution = Resolution(manifest, versions, run.parts, tuple(dict.fromkeys(problems)))
    _ = resolution.index  # versions that hold the same elements would not be one state
    return resolution


def newest_resumable(
    catalog: Catalog, bad: Set[RejectedVersion] = frozenset(), skip: Set[SaveId] = frozenset()
) -> tuple[Resolution, tuple[str, ...]]:
    """Resolve the first possible manifest in :func:`store.catalog.resume_order`; also return problems of skipped ones.

    Raises NothingToResumeError if none resolves, UnreachableError if an object store does not answer."""
    suspects = catalog.suspects()
    passed_over: list[str] = list(suspects.problems)
    lost, saves = () if skip else catalog.lost(), catalog.saves()
    for save in resume_order(saves, suspects.saves, catalog.proven()):
        if save in skip:
            continue
        with noting(passed_over, f"{save}: "):
            if catalog.manifest(save).weights_only:
                raise DamagedError("it holds weights only: export it (`driftpoint export`), it cannot be resumed")
            return resolve(catalog, save, bad), (*lost, *passed_over, *suspects.messages(save, saves))
    if passed_over:
        raise NothingToResumeError(
            f"no commit can be resumed: {listed(passed_over, 4, '; ')}. Run `driftpoint verify STORE` for details"
        )
    raise NothingToResumeError("the store holds no commit yet")


def _load_version(
    catalog: Catalog, manifest: ManifestRecord, record: UnitRecord, bad: Set[RejectedVersion], problems: list[str]
) -> Version | None:
    # Raises NewerFormatError: an unknown encoding is no damage, and no reason to fall back.
    encoding_named(record.encoding, f"manifest {manifest.save}: {record.unit}")
    if RejectedVersion(record.version, record.unit) in bad:
        problems.append(f"{record.unit}: version {_describe_rejected(catalog, record.version)}")
        return None
    damaged = [base for base in record.bases if RejectedVersion(SaveId.parse(base), record.unit) in bad]
    if damaged:
        base = _describe_rejected(catalog, SaveId.parse(damaged[0]), base=True)
        problems.append(f"{record.unit}: version {record.save} is the difference to {base}")
        return None
    group_record = _group_record(manifest, record.version)
    group = catalog.group(record.version, group_record)
    base_records = {name: _group_record(manifest, SaveId.parse(name)) for name in record.bases}
    bases = [catalog.group(SaveId.parse(name), found) for name, found in base_records.items()]
    try:
        sources = with_bases(group.by_unit.get(record.unit, ()), bases)
        covered = covered_numel(source.entry for source in sources)
        if covered != record.numel:
            raise DamagedError(f"{record.unit}: version {record.save} has {covered} of its {record.numel} elements")
        for source in sources:
            tensor = manifest.tensors.get(source.fqn)
            if source.box is not None and (tensor is None or tensor.shape != source.box.shape):
                raise DamagedError(f"{record.unit}: version {record.save} has {source.fqn} in another shape")
        _require_undamaged(catalog, record, sources, bad)
    except DamagedError as error:
        problems += [problem for one in (group, *bases) for problem in one.problems]
        problems.append(str(error))
        return None
    return Version(record, group_record, sources, fallback=False, bases=base_records)


def _require_undamaged(
    catalog: Catalog, record: UnitRecord, sources: tuple[Source, ...], bad: Set[RejectedVersion]
) -> None:
    if not bad:
        return
    for source in sources:
        if RejectedVersion(source.part.save, record.unit, source.entry.fragment) in bad:
            raise DamagedError(f"{record.unit}: version {_describe_rejected(catalog, source.part.save)}")
        for base in islice(source.chain(), 1, None):
            if RejectedVersion(base.part.save, record.unit, source.entry.fragment) in bad:
                described = _describe_rejected(catalog, base.part.save, base=True)
                raise DamagedError(f"{record.unit}: version {record.save} is the difference to {described}")


def _describe_rejected(catalog: Catalog, save: SaveId, *, base: bool = False) -> str:
    """Return the name of a rejected save and the reason: it may have been pruned while it was read."""
    try:
        catalog.files.list_dir(segment_dir(save))
    except MissingError:
        return f"{save}, which is gone" if base else f"{save} is gone"
    except StorageError:
        pass  # a later read raises it
    return f"{save}, which is damaged" if base else f"{save} does not match its hashes"


def _previous_version(
    catalog: Catalog, manifest: ManifestRecord, record: UnitRecord, bad: Set[RejectedVersion], problems: list[str]
) -> Version:
    tried = {record.version}
    for candidate_manifest in ancestors(catalog, manifest, problems):
        candidate = next((u for u in candidate_manifest.units if u.unit == record.unit), None)
        if candidate is None or candidate.version in tried:
            continue
        if (candidate.numel, candidate.members) != (record.numel, record.members):
            continue
        tried.add(candidate.version)
        version = _load_version(catalog, candidate_manifest, candidate, bad, problems)
        if version is not None:
            return replace(version, fallback=True)
    raise DamagedError(f"{record.unit} has no version that is whole; " + "; ".join(dict.fromkeys(problems)))


def ancestors(catalog: Catalog, manifest: ManifestRecord, problems: list[str]) -> Iterator[ManifestRecord]:
    """Yield the older manifests that the commit continues, newest first.

    Commits between one and the commit it continues were abandoned by a rollback and are not ancestors. If that commit
    is pruned or damaged, the next older one takes its place, unless it is ahead in steps."""
    previous = manifest.previous
    for save in catalog.saves():
        if previous is None or save > SaveId.parse(previous) or save.step > manifest.step:
            continue
        with noting(problems):
            older = catalog.manifest(save)
            previous = older.previous
            yield older


def left_branches(catalog: Catalog) -> Callable[[SaveId], bool | None]:
    """Return whether a save or record is of a branch that the job left by going back; None if that is unknown.

    The branch holds the epoch of the newest commit. The first commit of that epoch names an earlier one, which it
    continues: of that one's epoch, the branch holds all up to there. And so on, as long as those commits are there."""
    saves, ends, end, whole = catalog.saves(), dict[int, float](), math.inf, False
    newest = epoch = saves[0].epoch
    while epoch not in ends:
        ends[epoch] = end
        first = min((one for one in saves if one.epoch == epoch and one.step <= end), default=None)
        with suppress(DamagedError):
            previous = "" if first is None else catalog.manifest(first).previous
            whole = previous is None
            if first is not None and previous is not None:
                before = SaveId.parse(previous)
                epoch, end = before.epoch, max(before.step, first.step)

    def left(save: SaveId) -> bool | None:
        if save.epoch in ends or save.epoch > newest:
            return save.step > ends.get(save.epoch, math.inf)
        return True if whole or save.epoch > min(ends) else None

    return left


def _group_record(manifest: ManifestRecord, save: SaveId) -> GroupRecord:
    record = manifest.groups.get(save.name)
    if record is None:
        raise DamagedError(f"manifest {manifest.save} names save {save} but not its segment group")
    return record
