"""Select the commits to retain, and prune the others with the segments that no commit needs.

Silent corruption is detected late, so old commits are retained at ages in powers of two. The newest proven commit
always stays; suspect commits are ignored, except the newest of all. Of a range of steps, a commit that the newest one
continues is retained before one of a branch that a rollback abandoned.

If the disk has no room for another full save, commits that the rule retains are dropped, too: the oldest first, only as
many as needed, and never the newest whole commit nor the newest proven one.

Manifests are removed first and their directory is synced before any segment is removed, so after a crash no manifest
points to a deleted segment. Unrecognised files are reported and stay. Only the owner of the store (the lock, the newest
epoch) may prune. Segments of its epoch that are newer than the newest commit belong to a save in progress and stay."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, takewhile

from store import names as paths
from store.catalog import Catalog, CommitSummary, CommitSurvey, LoadedGroup, find_lineage, newest_first, open_catalog
from store.errors import ConfigError, DamagedError, FencedError, MissingError, StorageError
from store.location import free_bytes
from store.names import SaveId, group_by_key
from store.resolve import with_bases
from store.schema import ManifestRecord, UnitRecord
from store.session import newest_epoch, require_newest
from store.storage.atomic import final_name, is_temporary, remove_all
from store.storage.local import Files, LocalFiles, list_or_empty
from store.weights import keep_weights, read_weights, remove_weights

_KEPT_EPOCHS = 64  # newest epoch records that stay, needed or not: interruptions are counted from them


@dataclass(frozen=True)
class Retention:
    """Rules for the commits to retain, besides the newest, the newest that is not suspect and the newest proven one."""

    keep_last: int = 3  # newest commits to retain, at least 1
    keep_every: int | None = None  # also retain one commit in each range of so many steps
    log_spaced: bool = True  # also retain the oldest commit in each age range [2^i, 2^(i+1)) steps behind the newest
    max_share: float | None = None  # of the disk, less what others use, with the next full save; None: all of it
    weights_every: int | None = None  # also retain the weights alone of one commit in each range of so many steps
    weights_last: int = 10  # newest of these weights-only commits to retain

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ConfigError(f"retention.keep_last is {self.keep_last}: at least 1 commit must stay")
        for name in ("keep_every", "weights_every", "weights_last"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ConfigError(f"retention.{name} is {number}: give a number from 1, or leave it out")


_Saves = Set[SaveId]
_RECORDS = 1 << 16  # bytes for the records of a save, besides 2 % of its payload
EVERYTHING = 1 << 62  # more bytes than any store has


def select_retained(
    saves: Iterable[SaveId],
    proven: _Saves,
    retention: Retention,
    suspects: _Saves = frozenset(),
    lineage: _Saves = frozenset(),
) -> set[SaveId]:
    """Return the commits to retain of ``saves``, which must all be whole.

    A damaged or suspect commit must not displace a good one: suspects are left out, and the newest commit always stays.
    ``lineage``: commits that are preferred in their ranges."""
    all_saves = sorted(saves, reverse=True)
    newest_first = [save for save in all_saves if save not in suspects] or all_saves
    keep = {*all_saves[:1], *newest_first[: retention.keep_last]}
    if len(newest_first) <= retention.keep_last:
        return keep
    keep.update(sorted(proven & set(newest_first), reverse=True)[:1])
    best_last = sorted(newest_first, key=lineage.__contains__)
    if retention.keep_every is not None:
        keep |= _last_in_each(best_last, [save.step // retention.keep_every for save in best_last])
    if retention.log_spaced and newest_first:
        newest = newest_first[0].step
        keep |= _last_in_each(best_last, [abs(newest - save.step).bit_length() for save in best_last])
    return keep


@cache
def most_commits(retention: Retention, every: int, saves: int = 1000) -> int:
    """Return the most commits that exist at a time in a run of ``saves`` saves, with the one being written."""
    held: set[SaveId] = set()
    most = 0
    for number in range(1, saves + 1):
        held = select_retained(held | {SaveId(number * every, 1)}, frozenset(), retention)
        most = max(most, len(held))
    return most + 1 + 2 * (retention.weights_every is not None)  # two stay until the weights of one are copied


def _last_in_each(saves: Sequence[SaveId], buckets: Sequence[int]) -> set[SaveId]:
    return set(dict(zip(buckets, saves, strict=True)).values())


@dataclass(frozen=True)
class PrunePlan:
    """Files to remove and commits to keep. ``blocked``: why nothing may be removed, None if pruning is possible."""

    keep: tuple[SaveId, ...]
    manifests: tuple[SaveId, ...]
    groups: tuple[SaveId, ...]
    temporaries: tuple[str, ...]
    unrecognised: tuple[str, ...]
    freed_bytes: int
    epoch: int  # epoch of the store's owner; a newer one stops the prune
    blocked: str | None = None
    given_up: tuple[SaveId, ...] = ()  # those of ``manifests`` that the rule retains, and that make room
    to_copy: tuple[SaveId, ...] = ()  # those of ``keep`` whose weights are copied before they, or the next ones, go
    weights: tuple[SaveId, ...] = ()  # weights-only commits to remove
    read: Mapping[SaveId, CommitSummary] = field(default_factory=dict, compare=False, repr=False)
    """Commits that the plan was made for."""


def bytes_to_free(catalog: Catalog, retention: Retention, *, failed: bool = False, saves: int = 1) -> int:
    """Return the bytes that the store must free until so many full saves fit; 0 if they fit, or if that is unknown.

    ``failed``: whether a save failed for want of space. Then something must be freed even if there seems to be room: a
    quota, for example, is not seen in advance."""
    least, free, commits = int(failed), free_bytes(catalog.files), catalog.survey_commits(_summary)
    if not commits.readable:
        return 0
    if free is None:
        return least
    payload = next(iter(commits.readable.values())).full_bytes
    needed = saves * (payload + payload // 50 + _RECORDS)
    short = needed - free
    if retention.max_share is not None:
        held = sum(commits.groups.values())
        short = max(short, needed + held - int(retention.max_share * (free + held)))
    return max(short, least)


def remove_failed(files: Files, save: SaveId, epoch: int) -> None:
    """Remove the segments of a save that failed on all ranks and was not committed, before the next one begins."""
    if paths.manifest_path(save).rpartition("/")[2] not in files.list_dir(paths.MANIFESTS):
        require_newest(files, epoch)
        _remove_group(files, save)


def plan_prune(
    catalog: Catalog,
    retention: Retention,
    epoch: int | None = None,
    make_room: int = 0,
    continued: SaveId | None = None,
    *,
    commits: CommitSurvey | None = None,
    groups: Set[SaveId] = frozenset(),
    least: int = 1,
    ended: bool = False,
) -> PrunePlan:
    """Plan a prune without writing anything.

    Args:
        epoch: Epoch of the job that prunes. None: the newest one, where no job owns the store.
        make_room: Bytes to free, if need be by dropping commits that the rule retains, the oldest first.
        continued: Commit that the running job continues; it stays, even if newer ones are whole.
        commits: ``catalog.survey``, which :func:`bytes_to_free` just made. None, or of no commit: it is made here.
        groups: Segment groups that the next commit refers to; they and the commits through which they are found stay.
        least: Newest commits that stay however much room is wanted.
        ended: Whether the job of ``epoch`` has ended for certain, so that no save is in progress."""
    epoch = newest_epoch(catalog.files) if epoch is None else epoch
    files = catalog.files
    commits = commits if commits and commits.names else catalog.survey_commits(_summary)
    folders = {name: paths.parse_save_dir(name) for name in list_or_empty(files, paths.SEGMENTS)}
    unrecognised = [f"{paths.SEGMENTS}/{name}" for name, group in folders.items() if group is None]
    known = paths.TOP_LEVEL | paths.FOREIGN
    unrecognised += [name for name in files.list_dir("") if name not in known and not is_temporary(name)]
    in_weights = {name: paths.parse_save_dir(name) for name in list_or_empty(files, paths.KEPT_WEIGHTS)}
    unrecognised += [f"{paths.KEPT_WEIGHTS}/{name}" for name, save in in_weights.items() if save is None]
    aged = {save for save in in_weights.values() if save is not None}
    unrecognised += [
        f"{paths.MANIFESTS}/{name}" for name in commits.others if paths.parse_save_file(final_name(name) or "") is None
    ]
    if commits.refused or commits.unreadable or not commits.whole:
        # The groups of a damaged manifest are unknown, so no group is garbage. A record that storage refused to read
        # may be whole: a temporary error must not get a good commit deleted.
        blocked = f"{_why_blocked(commits)}: nothing is deleted"
        return PrunePlan(tuple(reversed(commits.readable)), (), (), (), tuple(unrecognised), 0, epoch, blocked)
    readable = commits.readable
    # Damaged commits are not retained, except those newer than all whole ones, which may be resumed in part.
    newest_whole, newest = commits.whole[0], next(iter(readable))
    marks = {folder: list_or_empty(files, folder) for folder in (paths.PROVEN, paths.SUSPECT)}
    proven = set(newest_first(marks[paths.PROVEN]))
    suspects = catalog.suspects().saves if marks[paths.SUSPECT] else frozenset()
    fenced = epoch + ended  # saves of an epoch before this one cannot be committed any more
    found = {one for one in folders.values() if one is not None} - groups
    garbage = _Garbage(files, commits, found, lambda one: one < newest or one.epoch < fenced)
    needed = {*takewhile(newest_whole.__lt__, readable), *(readable.keys() & {continued})}
    elsewhere = groups - garbage.reachable(needed & {continued})
    needed |= {save for save in readable if elsewhere & readable[save].groups.keys()} if elsewhere else set()
    other_bases = _with_other_bases(readable, commits.whole)
    weights = read_weights(catalog) if retention.weights_every else {}
    sound = {save: name for save, name in weights.items() if save not in catalog.damaged_weights}
    lineage: _Saves = frozenset()
    if len(commits.whole) > retention.keep_last or retention.weights_every:  # else all commits stay
        lineage = find_lineage(newest, {**sound, **{save: one.previous for save, one in readable.items()}})
    keep = select_retained(commits.whole, proven, retention, suspects, lineage) | needed | other_bases
    to_copy, following, stay = _select_weights(catalog, retention, commits, keep, suspects=suspects, lineage=lineage)
    gone = {save for save in aged - stay - following if save in weights or save not in keep}  # one may just be written
    old_weights = gone if retention.weights_every else set()  # what another configuration retained stays
    keep |= to_copy | (following & readable.keys())
    given_up: set[SaveId] = set()
    if make_room:
        fewest = Retention(keep_last=least, log_spaced=False)
        minimum = select_retained(commits.whole, proven, fewest, suspects) | needed
        minimum |= other_bases if least > 1 else set()
        spare = sorted(keep - minimum, key=lambda save: (save in other_bases, save in to_copy, save))
        given_up = _give_up(garbage, keep, spare, make_room)
        keep -= given_up
    reachable = garbage.reachable(keep)
    dead = garbage.groups(reachable)
    catalog.swept &= reachable
    finished = sorted(group for group in reachable - catalog.swept if group < newest)
    temporaries = (
        *_temporaries({paths.MANIFESTS: commits.others, **marks}, newest, keep | (aged - old_weights)),
        *_unfinished(catalog, finished),
        *_old_epochs(files, keep | reachable),
    )
    unrecognised += [
        f"{paths.segment_dir(one)}/{name}" for one in dead for name in garbage.names(one) if not _is_segment_file(name)
    ]
    return PrunePlan(
        keep=tuple(filter(keep.__contains__, reversed(readable))),
        manifests=tuple(sorted(readable.keys() - keep)),
        groups=dead,
        temporaries=temporaries,
        unrecognised=tuple(unrecognised),
        freed_bytes=sum(map(garbage.size, dead)) + sum(_weights_bytes(files, save) for save in old_weights),
        epoch=epoch,
        given_up=tuple(sorted(given_up)),
        to_copy=tuple(sorted(to_copy & keep)),
        weights=tuple(sorted(old_weights)),
        read=readable,
    )


def _select_weights(
    catalog: Catalog, retention: Retention, commits: CommitSurvey, keep: _Saves, *, suspects: _Saves, lineage: _Saves
) -> tuple[set[SaveId], set[SaveId], set[SaveId]]:
    """Return the commits to copy the weights of, those that stay meanwhile, and the weights-only commits that stay.

    One commit in each range of steps is retained, as it is or its weights: the oldest of ``lineage`` or, if there is
    none, of an abandoned branch. Copying shows whether its weights are damaged, so until then the next one that shares
    no segment with it stays, too."""
    if retention.weights_every is None:
        return set(), set(), set()
    copied, whole = set(catalog.weights), set(commits.whole)
    sound = (copied | (whole - suspects)) - catalog.damaged_weights
    in_order = sorted(sound, key=lambda one: (one not in lineage, one in suspects, one))
    ranges = group_by_key((save.step // retention.weights_every, save) for save in in_order)
    unread = whole - (catalog.kept_weights & copied)
    pairs = ((one, _spare(commits.readable, one, more)) for one, *more in ranges.values() if more and one in unread)
    spares = {one: other for one, other in pairs if other not in keep}
    as_it_is = keep - spares.keys()
    chosen = {saves[0] for saves in ranges.values()} - (as_it_is - copied)
    stay = set(sorted(chosen, key=lambda one: (one in lineage, one not in suspects, one))[-retention.weights_last :])
    to_copy = (stay & unread) - as_it_is
    return to_copy, {spares[one] for one in to_copy & spares.keys()}, stay | (copied & catalog.damaged_weights)


def _spare(commits: Mapping[SaveId, CommitSummary], one: SaveId, more: Sequence[SaveId]) -> SaveId:
    groups = commits[one].groups.keys()  # a weights-only commit has segments of its own
    return next((other for other in more if other not in commits or groups.isdisjoint(commits[other].groups)), more[0])


def keep_named_weights(catalog: Catalog, plan: PrunePlan) -> list[str]:
    """Copy the weights that a plan names, so that the next plan drops their commits. Returns what went wrong."""
    problems = []
    for save in plan.to_copy:
        try:
            keep_weights(catalog.files, save, plan.epoch)
            catalog.kept_weights.add(save)
        except (DamagedError, StorageError, FencedError) as error:
            if plan.epoch in catalog.left_epochs:  # fenced by the job's own next epoch, or after its end: done again
                break
            present = save in set(catalog.saves())  # otherwise it was deleted meanwhile, and is not damaged
            catalog.damaged_weights.update({save} if present and isinstance(error, DamagedError) else ())
            problems.append(f"the weights of commit {save} are not kept: {error}")
    return problems


class _Garbage:
    """Finds the segment groups that no retained commit needs, and their bytes."""

    def __init__(self, files: Files, commits: CommitSurvey, groups: _Saves, is_old: Callable[[SaveId], bool]) -> None:
        self._commits, self._groups = commits, groups
        self._is_old = is_old  # older than the newest commit, or of a save that cannot be committed any more
        self.names = cache(lambda group: list_or_empty(files, paths.segment_dir(group)))
        self.size = cache(lambda group: _group_bytes(files, group, self.names(group)))

    def reachable(self, keep: Set[SaveId]) -> Set[SaveId]:
        commits, all_groups = self._commits.readable, self._commits.groups
        return all_groups.keys() if len(keep) == len(commits) else set().union(*(commits[save].groups for save in keep))

    def groups(self, reachable: Set[SaveId]) -> tuple[SaveId, ...]:
        return tuple(sorted(filter(self._is_old, self._groups - reachable)))

    def nbytes(self, keep: Set[SaveId]) -> int:
        return sum(map(self.size, self.groups(self.reachable(keep))))


def _group_bytes(files: Files, group: SaveId, names: Iterable[str]) -> int:
    size, local = 0, files.root if isinstance(files, LocalFiles) else None
    for name in filter(_is_segment_file, names):
        path = f"{paths.segment_dir(group)}/{name}"
        with suppress(MissingError, FileNotFoundError):
            shared = local is not None and (local / path).stat().st_nlink > 1  # with a base that was linked
            size += 0 if shared else files.size(path)
    return size


def _weights_bytes(files: Files, save: SaveId) -> int:
    below = files.below(paths.weights_dir(save))
    groups = filter(None, map(paths.parse_save_dir, list_or_empty(below, paths.SEGMENTS)))
    return sum(_group_bytes(below, one, list_or_empty(below, paths.segment_dir(one))) for one in groups)


def _give_up(garbage: _Garbage, keep: Set[SaveId], spare: Sequence[SaveId], wanted: int) -> set[SaveId]:
    """Return the commits of ``spare`` to drop, in that order, until ``wanted`` bytes are freed."""
    kept = set(keep)
    for save in spare:
        if garbage.nbytes(kept) >= wanted:
            break
        kept.discard(save)
    for save in sorted(keep - kept, reverse=True):  # keep it if dropping it frees nothing, or more than is needed
        if garbage.nbytes(kept | {save}) >= min(wanted, garbage.nbytes(kept)):
            kept.add(save)
    return set(keep - kept)


def _with_other_bases(commits: Mapping[SaveId, CommitSummary], whole: Sequence[SaveId]) -> set[SaveId]:
    """Return older commits such that for each base of the newest commit one of them does not need it, if possible.

    Commits of the same chain are added where they need nothing more, so that damage of a save costs no more than it
    must."""
    newest, others = commits[whole[0]], set[SaveId]()

    def newest_without(name: str) -> Iterator[SaveId]:
        return islice((save for save in whole[1:] if name not in commits[save].versions), 1)

    for base in sorted(newest.bases):
        if all(base in commits[save].versions for save in others):
            others.update(newest_without(base))
    in_chain = {save for name in newest.chained for save in newest_without(name)}
    return others | {save for save in in_chain if commits[save].groups.keys() <= newest.groups.keys()}


def execute(files: Files, plan: PrunePlan) -> None:
    """Execute a plan. It may be interrupted anywhere and run again.

    First the remaining manifests are made durable; then, before any segment is removed, the removal of the others: the
    process that made the planned state may have died unsynced.

    Another job may have taken the store over since the plan was made, and committed on top of an older commit. So the
    epoch is checked before each deletion, and what the manifests of an earlier one need is looked up again. A manifest
    is never replaced, so those that were read for the plan are not read again.

    Raises FencedError if another job took the store over; the rest of the plan is left to it."""
    if plan.blocked is not None or not (plan.manifests or plan.temporaries or plan.groups or plan.weights):
        return
    files.sync_dir(paths.MANIFESTS)
    for save in plan.manifests:
        _remove(files, paths.manifest_path(save), plan)
    if plan.manifests:
        files.sync_dir(paths.MANIFESTS)
    for path in plan.temporaries:
        _remove(files, path, plan)
    if plan.groups:
        require_newest(files, plan.epoch)
        catalog = open_catalog(files)
        found = (plan.read[save].groups if save in plan.read else _groups_of(catalog, save) for save in catalog.saves())
        needed = set().union(*found)
        for group in plan.groups:
            if group not in needed:
                require_newest(files, plan.epoch)
                _remove_group(files, group)
        files.sync_dir(paths.SEGMENTS)
    for save in plan.weights:
        require_newest(files, plan.epoch)
        remove_weights(files, save)


def _remove(files: Files, path: str, plan: PrunePlan) -> None:
    require_newest(files, plan.epoch)
    with suppress(MissingError):
        files.unlink(path)


def _summary(catalog: Catalog, save: SaveId) -> CommitSummary:
    manifest, sizes = catalog.manifest(save), _groups_of(catalog, save)
    groups = {save.name: catalog.group(save, manifest.groups[save.name]) for save in sizes}
    for group in groups.values():
        if group.refused:
            raise StorageError(group.problems[-1])
    bases = frozenset(base for unit in manifest.units for base in unit.bases)
    return CommitSummary(
        full_bytes=sum(_whole_bytes(unit, groups) for unit in manifest.units),
        groups=sizes,
        versions=bases.union(unit.save for unit in manifest.units),
        bases=bases,
        chained=bases.union(unit.save for unit in manifest.units if unit.bases),
        previous=manifest.previous,
        whole=not any(group.problems for group in groups.values()) and _has_all_bases(manifest, groups),
    )


def _whole_bytes(unit: UnitRecord, groups: Mapping[str, LoadedGroup]) -> int:
    """Return the bytes of a unit's version or, if one that it is the difference to takes more, those of that one."""
    stored = (groups[name].by_unit.get(unit.unit, ()) for name in unit.bases if name in groups)
    return max(unit.nbytes, *(sum(entry.nbytes for _, entry in found) for found in stored), 0)


def _groups_of(catalog: Catalog, save: SaveId) -> dict[SaveId, int]:
    """Return the segment groups that a commit reaches, with their payload bytes."""
    return {SaveId.parse(name): record.payload_bytes for name, record in catalog.manifest(save).groups.items()}


def _has_all_bases(manifest: ManifestRecord, groups: Mapping[str, LoadedGroup]) -> bool:
    """Return whether the records of all bases of a commit's units are present; sizes and bytes are not checked."""
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


def _why_blocked(commits: CommitSurvey) -> str:
    if commits.refused:
        return commits.refused
    if commits.unreadable:
        return f"commit {commits.unreadable[0]} cannot be read (inspect its manifest, then move it away)"
    return "no commit is whole" if commits.readable else "there is no commit"


def _old_epochs(files: Files, needed: Set[SaveId]) -> Iterator[str]:
    epochs = {name: paths.parse_epoch(name.replace(".closed.", ".")) for name in list_or_empty(files, paths.EPOCHS)}
    newest = max((epoch for epoch in epochs.values() if epoch is not None), default=0)
    old = {name: epoch for name, epoch in epochs.items() if epoch is not None and epoch <= newest - _KEPT_EPOCHS}
    still = {save.epoch for save in needed} if old else ()
    yield from (f"{paths.EPOCHS}/{name}" for name, epoch in old.items() if epoch not in still)


def _temporaries(listed: Mapping[str, Sequence[str]], newest: SaveId, keep: Set[SaveId]) -> Iterator[str]:
    # Skips files that may be in use: of the commit after the newest, or a mark being set on a kept commit.
    for folder, names in listed.items():
        for name in names:
            save, mark = paths.parse_save_file(final_name(name) or ""), paths.parse_save_file(name)
            if save is not None and save <= newest and (folder == paths.MANIFESTS or save not in keep):
                yield f"{folder}/{name}"
            # A mark of a commit that goes, or whose prune was interrupted, or of a lost version in memory.
            if mark is not None and mark < newest and mark not in keep:
                yield f"{folder}/{name}"


def _unfinished(catalog: Catalog, groups: Sequence[SaveId]) -> Iterator[str]:
    for group in groups:
        folder = paths.segment_dir(group)
        left = [f"{folder}/{name}" for name in list_or_empty(catalog.files, folder) if is_temporary(name)]
        yield from left
        if not left:  # nothing is written there any more
            catalog.swept.add(group)


def _remove_group(files: Files, group: SaveId) -> None:
    folder = paths.segment_dir(group)
    names = list_or_empty(files, folder)
    remove_all(files, [f"{folder}/{name}" for name in names if _is_segment_file(name)])
    if all(_is_segment_file(name) for name in names):
        with suppress(MissingError):
            files.remove_dir(folder)


def _is_segment_file(name: str) -> bool:
    return paths.parse_rank_file(name) is not None or is_temporary(name)
