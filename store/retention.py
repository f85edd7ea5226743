"""Retention rules and pruning.

Which commits to keep: the last few, every N steps, and ever sparser ones further back. Pure.

Silent corruption is found late, so ages are covered in powers of two. The newest proven commit always stays. Suspects
count as little as if they were not there, but for the newest commit of all.

Pruning: drop commits that retention does not keep, then what no commit reaches. Planned first, then done.

Order: manifests go first and their directory is synced before any segment goes, so a manifest never points to
what was deleted, wherever a crash cuts in. What is not recognised is reported and stays. Only the owner of the
store may prune (the lock, the newest epoch); segments newer than the newest commit belong to a save in progress
and stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass

from store.catalog import Catalog, LoadedGroup
from store.errors import ConfigError, DamagedError, MissingError, StorageError
from store.layout import (
    FOREIGN,
    MANIFESTS,
    PROVEN,
    SEGMENTS,
    SUSPECT,
    TOP_LEVEL,
    manifest_path,
    parse_rank_file,
    parse_save_dir,
    parse_save_file,
    proven_path,
    segment_dir,
    suspect_path,
)
from store.names import SaveId
from store.resolve import with_bases
from store.schema import ManifestRecord
from store.storage.atomic import final_name, is_temporary, remove_all
from store.storage.local import Files


@dataclass(frozen=True)
class Retention:
    """keep_last: newest commits to keep, at least 1. keep_every: also one in each stretch of so many steps.

    log_spaced: also the oldest in each age range [2^i, 2^(i+1)) steps behind the newest commit.
    """

    keep_last: int = 3
    keep_every: int | None = None
    log_spaced: bool = True

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ConfigError(f"retention.keep_last is {self.keep_last}: at least 1 commit must stay")
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"retention.keep_every is {self.keep_every}: give a number of steps, or leave it out")


def select_retained(
    saves: Iterable[SaveId], proven: Set[SaveId], retention: Retention, suspects: Set[SaveId] = frozenset()
) -> set[SaveId]:
    """The commits to keep of those given. All must be whole: a damaged one must not push out a good one.

    Nor may a suspect: whatever is kept is chosen among the others, and the newest commit stays besides."""
    everything = sorted(saves, reverse=True)
    newest_first = [save for save in everything if save not in suspects] or everything
    keep = {*everything[:1], *newest_first[: retention.keep_last]}
    keep.update(sorted(proven & set(newest_first), reverse=True)[:1])
    if retention.keep_every is not None:
        keep |= _oldest_in_each(newest_first, [save.step // retention.keep_every for save in newest_first])
    if retention.log_spaced and newest_first:
        newest = newest_first[0].step
        keep |= _oldest_in_each(newest_first, [abs(newest - save.step).bit_length() for save in newest_first])
    return keep


def _oldest_in_each(newest_first: Sequence[SaveId], buckets: Sequence[int]) -> set[SaveId]:
    return set(dict(zip(buckets, newest_first, strict=True)).values())


@dataclass(frozen=True)
class PrunePlan:
    """What would go and what stays, and why nothing goes where ``blocked`` says so."""

    keep: tuple[SaveId, ...]
    manifests: tuple[SaveId, ...]
    groups: tuple[SaveId, ...]
    temporaries: tuple[str, ...]
    unrecognised: tuple[str, ...]
    freed_bytes: int
    blocked: str | None = None


def plan_prune(catalog: Catalog, retention: Retention) -> PrunePlan:
    """Look at the store and decide. Writes nothing."""
    commits = _commits(catalog)
    groups, strange = _groups(catalog.files)
    known = TOP_LEVEL | FOREIGN
    strange += [name for name in catalog.files.list_dir("") if name not in known and not is_temporary(name)]
    strange += [f"{MANIFESTS}/{name}" for name in _names(catalog.files, MANIFESTS) if not _known_record(name)]
    if commits.refused or commits.unreadable or not commits.whole:
        # What a damaged manifest reaches is not known, so nothing may be called garbage. What storage refused to
        # read may be whole: a passing error must not get a good commit deleted.
        blocked = f"{_why_blocked(commits)}: nothing is deleted"
        return PrunePlan(tuple(sorted(commits.readable)), (), (), (), tuple(strange), 0, blocked)
    # Damaged commits do not count as kept ones; but those newer than all whole ones may still be resumed in part.
    newest_whole = max(commits.whole)
    keep = select_retained(commits.whole, catalog.proven(), retention, catalog.suspects().saves)
    keep |= {save for save in commits.readable if save > newest_whole}
    keep |= _apart(catalog, commits.whole)
    reachable = {group for save in keep for group in _reached(catalog.manifest(save))}
    newest = max(commits.readable)
    dead = tuple(sorted(group for group in groups if group not in reachable and group < newest))
    dropped = tuple(sorted(set(commits.readable) - keep))
    quiet = sorted(group for group in groups if group < newest and group not in dead)
    temporaries = tuple(_temporaries(catalog.files, quiet, newest, keep, set(commits.readable)))
    strange += [path for group in dead for path in _strange_in(catalog.files, group)]
    freed = sum(_group_bytes(catalog.files, group) for group in dead)
    return PrunePlan(tuple(sorted(keep)), dropped, dead, temporaries, tuple(strange), freed)


def _apart(catalog: Catalog, whole: Sequence[SaveId]) -> set[SaveId]:
    """The newest commit that rests on no base of the newest: damage of one base must not take all that is kept."""
    newest_first = sorted(whole, reverse=True)
    bases = {base for unit in catalog.manifest(newest_first[0]).units for base in unit.bases}
    if not bases:
        return set()
    for save in newest_first[1:]:
        units = catalog.manifest(save).units
        if not any(bases.intersection((unit.save, *unit.bases)) for unit in units):
            return {save}
    return set()


def execute(files: Files, plan: PrunePlan) -> None:
    """Carry a plan out. It may be interrupted anywhere and run again.

    The manifests that stay are made durable first, and the absence of the others before any segment goes, even
    where the plan drops no manifest: what the plan saw may be the work of a process killed before it synced.
    """
    if plan.blocked is not None:
        return
    files.sync_dir(MANIFESTS)
    for save in plan.manifests:
        with suppress(MissingError):
            files.unlink(manifest_path(save))
    files.sync_dir(MANIFESTS)
    for save in plan.manifests:
        with suppress(MissingError):
            files.unlink(proven_path(save))
        with suppress(MissingError):
            files.unlink(suspect_path(save))
    for path in plan.temporaries:
        with suppress(MissingError):
            files.unlink(path)
    for group in plan.groups:
        _remove_group(files, group)
    if plan.groups:
        files.sync_dir(SEGMENTS)


@dataclass(frozen=True)
class _Commits:
    """``unreadable``: damaged manifests. ``refused``: why storage did not give a record, '' where it gave all."""

    whole: tuple[SaveId, ...]
    readable: tuple[SaveId, ...]
    unreadable: tuple[SaveId, ...]
    refused: str


def _commits(catalog: Catalog) -> _Commits:
    readable, unreadable, refused = [], [], ""
    for save in catalog.saves():
        try:
            catalog.manifest(save)
        except DamagedError:
            unreadable.append(save)
        except StorageError as error:
            refused = str(error)
        else:
            readable.append(save)
    hurt = {save: [group for group in _groups_of(catalog, save) if group.problems] for save in readable}
    refused = next((group.problems[-1] for groups in hurt.values() for group in groups if group.refused), refused)
    whole = tuple(save for save in readable if not hurt[save] and _well_based(catalog, catalog.manifest(save)))
    return _Commits(whole, tuple(readable), tuple(unreadable), refused)


def _reached(manifest: ManifestRecord) -> set[SaveId]:
    """Every group that a commit needs: of its units, of the saves that those are differences to, and its own."""
    return {SaveId.parse(name) for name in manifest.groups}


def _well_based(catalog: Catalog, manifest: ManifestRecord) -> bool:
    """Whether everything is there that its units are stored as differences to. Sizes and bytes are not looked at."""
    groups = {name: catalog.group(SaveId.parse(name), record) for name, record in manifest.groups.items()}
    for unit in manifest.units:
        if not {unit.save, *unit.bases} <= groups.keys():
            return False
        stored = groups[unit.save].by_unit.get(unit.unit, ())
        if any(entry.base is not None for _, entry in stored):
            try:
                with_bases(stored, [groups[name] for name in unit.bases])
            except DamagedError:
                return False
    return True


def _why_blocked(commits: _Commits) -> str:
    if commits.refused:
        return commits.refused
    if commits.unreadable:
        return f"commit {commits.unreadable[0]} cannot be read (move its manifest away once you looked at it)"
    return "no commit is whole" if commits.readable else "there is no commit"


def _groups_of(catalog: Catalog, save: SaveId) -> list[LoadedGroup]:
    return [catalog.group(SaveId.parse(name), record) for name, record in catalog.manifest(save).groups.items()]


def _groups(files: Files) -> tuple[set[SaveId], list[str]]:
    groups, strange = set(), []
    for name in _names(files, SEGMENTS):
        save = parse_save_dir(name)
        if save is None:
            strange.append(f"{SEGMENTS}/{name}")
        else:
            groups.add(save)
    return groups, strange


def _temporaries(
    files: Files, quiet: Sequence[SaveId], newest: SaveId, keep: Set[SaveId], readable: Set[SaveId]
) -> Iterator[str]:
    # Never one that may be in use: of the commit after the newest, or a mark that is being set on a kept commit.
    for name in _names(files, MANIFESTS):
        save = parse_save_file(final_name(name) or "")
        if save is not None and save <= newest:
            yield f"{MANIFESTS}/{name}"
    for marks in (PROVEN, SUSPECT):
        for name in _names(files, marks):
            save = parse_save_file(final_name(name) or "")
            if save is not None and save <= newest and save not in keep:
                yield f"{marks}/{name}"
    for name in _names(files, SUSPECT):  # of what is gone: a commit whose prune was cut off, or a version in memory
        save = parse_save_file(name)
        if save is not None and save < newest and save not in readable:
            yield f"{SUSPECT}/{name}"
    for folder in map(segment_dir, quiet):
        yield from (f"{folder}/{name}" for name in _names(files, folder) if is_temporary(name))


def _strange_in(files: Files, group: SaveId) -> list[str]:
    folder = segment_dir(group)
    return [f"{folder}/{name}" for name in _names(files, folder) if not _is_segment_file(name)]


def _remove_group(files: Files, group: SaveId) -> None:
    folder = segment_dir(group)
    names = _names(files, folder)
    remove_all(files, [f"{folder}/{name}" for name in names if _is_segment_file(name)])
    if all(_is_segment_file(name) for name in names):
        with suppress(MissingError):
            files.remove_dir(folder)


def _group_bytes(files: Files, group: SaveId) -> int:
    folder = segment_dir(group)
    return sum(files.size(f"{folder}/{name}") for name in _names(files, folder) if parse_rank_file(name))


def _names(files: Files, folder: str) -> list[str]:
    try:
        return files.list_dir(folder)
    except MissingError:
        return []


def _is_segment_file(name: str) -> bool:
    return parse_rank_file(name) is not None or is_temporary(name)


def _known_record(name: str) -> bool:
    return parse_save_file(final_name(name) or name) is not None
