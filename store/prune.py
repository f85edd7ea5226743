"""Pruning: drop commits that retention does not keep, then what no commit reaches. Planned first, then done.

Order: manifests go first and their directory is synced before any segment goes, so a manifest never points to
what was deleted, wherever a crash cuts in. What is not recognised is reported and stays. Only the owner of the
store may prune (the lock, the newest epoch); segments newer than the newest commit belong to a save in progress
and stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from store.catalog import Catalog
from store.durable import is_temporary
from store.errors import DamagedError, MissingError, StorageError
from store.files import Files
from store.layout import (
    MANIFESTS,
    PROVEN,
    SEGMENTS,
    TOP_LEVEL,
    manifest_path,
    parse_rank_file,
    parse_save_dir,
    parse_save_file,
    proven_path,
    segment_dir,
)
from store.names import SaveId
from store.retention import Retention, kept


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
    strange += [name for name in catalog.files.list_dir("") if name not in TOP_LEVEL and not is_temporary(name)]
    strange += [f"{MANIFESTS}/{name}" for name in _names(catalog.files, MANIFESTS) if not _known_record(name)]
    if commits.unreadable or not commits.whole:
        # What a damaged manifest reaches is not known, so nothing may be called garbage.
        blocked = f"{_why_blocked(commits)}: nothing is deleted"
        return PrunePlan(tuple(sorted(commits.readable)), (), (), (), tuple(strange), 0, blocked)
    # Damaged commits do not count as kept ones; but those newer than all whole ones may still be resumed in part.
    newest_whole = max(commits.whole)
    keep = kept(commits.whole, catalog.proven(), retention)
    keep |= {save for save in commits.readable if save > newest_whole}
    reachable = {SaveId.parse(name) for save in keep for name in catalog.manifest(save).groups}
    newest = max(commits.readable)
    dead = tuple(sorted(group for group in groups if group not in reachable and group < newest))
    dropped = tuple(sorted(set(commits.readable) - keep))
    temporaries = tuple(_temporaries(catalog.files, [g for g in groups if g < newest and g not in dead]))
    freed = sum(_group_bytes(catalog.files, group) for group in dead)
    return PrunePlan(tuple(sorted(keep)), dropped, dead, temporaries, tuple(strange), freed)


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
    for path in plan.temporaries:
        with suppress(MissingError):
            files.unlink(path)
    for group in plan.groups:
        _remove_group(files, group)
    if plan.groups:
        files.sync_dir(SEGMENTS)


@dataclass(frozen=True)
class _Commits:
    whole: tuple[SaveId, ...]
    readable: tuple[SaveId, ...]
    unreadable: tuple[SaveId, ...]


def _commits(catalog: Catalog) -> _Commits:
    readable, unreadable = [], []
    for save in catalog.saves():
        try:
            catalog.manifest(save)
        except (DamagedError, StorageError):
            unreadable.append(save)
        else:
            readable.append(save)
    whole = tuple(save for save in readable if _is_whole(catalog, save))
    return _Commits(whole, tuple(readable), tuple(unreadable))


def _why_blocked(commits: _Commits) -> str:
    if commits.unreadable:
        return f"commit {commits.unreadable[0]} cannot be read (move its manifest away once you looked at it)"
    return "no commit is whole" if commits.readable else "there is no commit"


def _is_whole(catalog: Catalog, save: SaveId) -> bool:
    groups = catalog.manifest(save).groups
    return all(not catalog.group(SaveId.parse(name), record).problems for name, record in groups.items())


def _groups(files: Files) -> tuple[set[SaveId], list[str]]:
    groups, strange = set(), []
    for name in _names(files, SEGMENTS):
        save = parse_save_dir(name)
        if save is None:
            strange.append(f"{SEGMENTS}/{name}")
        else:
            groups.add(save)
    return groups, strange


def _temporaries(files: Files, groups: list[SaveId]) -> Iterator[str]:
    for folder in (MANIFESTS, PROVEN, *(segment_dir(group) for group in sorted(groups))):
        yield from (f"{folder}/{name}" for name in _names(files, folder) if is_temporary(name))


def _remove_group(files: Files, group: SaveId) -> None:
    folder = segment_dir(group)
    names = _names(files, folder)
    for name in names:
        if parse_rank_file(name) is not None or is_temporary(name):
            with suppress(MissingError):
                files.unlink(f"{folder}/{name}")
    if all(parse_rank_file(name) is not None or is_temporary(name) for name in names):
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


def _known_record(name: str) -> bool:
    return parse_save_file(name) is not None or is_temporary(name)
