"""The commit: wait for every rank's part, re-check the epoch, write the manifest without replacing.

The fsync of ``manifests/`` after the manifest has its name is the commit point. Only when :func:`commit` has
returned may anyone be told that the save exists. Run by one process, the committer; the others only write
their segments. There are no messages between them: they meet in the segment directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from store.errors import DamagedError, ExistsError, SaveError
from store.layout import LATEST, MANIFESTS, PROVEN, manifest_path, part_path, proven_path, segment_dir
from store.names import SaveId
from store.schema import GroupRecord, ManifestRecord, PartRecord, ProvenRecord, from_bytes, to_bytes
from store.segment import PART_LIMIT, check_payload_size, parse_part, parts_digest, present_parts
from store.session import require_newest
from store.storage.atomic import ensure_dir, replace_hint, write_new
from store.storage.local import Files


@dataclass(frozen=True)
class Group:
    """A complete segment group: all parts, in rank order, and its record for the manifest."""

    parts: tuple[PartRecord, ...]
    record: GroupRecord


@dataclass(frozen=True)
class Expected:
    """What the parts of a save must say of themselves."""

    store_id: str
    save: SaveId
    world_size: int
    plan: str


def wait_for_group(
    files: Files,
    expected: Expected,
    timeout: float,
    *,
    aborted: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Group:
    """Return when all ``world_size`` parts stand and match. SaveError after ``timeout`` seconds or when aborted.

    DamagedError for a part that says something else than expected: it belongs to another job or decision.
    """
    deadline, pause = clock() + timeout, 0.01
    found: dict[int, tuple[bytes, PartRecord]] = {}
    while True:
        for rank in present_parts(files, expected.save):
            if rank not in found:
                found[rank] = _matching_part(files, expected, rank)
        if len(found) == expected.world_size:
            return _group(found)
        missing = sorted(set(range(expected.world_size)) - set(found))[:8]
        if aborted():
            raise SaveError(f"save {expected.save} was given up: a rank could not write its segment")
        if clock() >= deadline:
            raise SaveError(f"save {expected.save}: ranks {missing} wrote no segment within {timeout:g} s")
        sleep(pause)
        pause = min(0.25, pause * 1.5)  # listing is dear where many ranks share a filesystem


def commit(files: Files, manifest: ManifestRecord) -> None:
    """Make the save exist. FencedError where a newer epoch was claimed, ExistsError where it exists already.
    SaveError for a manifest that names a save without its group.

    The epoch is checked before the manifest gets its name and again when it is durable, because nothing keeps
    another job from claiming in between. Fenced by the second check, the commit exists but nobody is told so.
    Passed by it, every later claimant finds the manifest: its prune cannot take the segments for garbage.
    """
    _require_reachable(manifest)
    ensure_dir(files, MANIFESTS)
    # Every rank synced its own segment; this makes the group's directory entry durable whoever created it.
    files.sync_dir(segment_dir(manifest.save))
    data = to_bytes(manifest)
    from_bytes(ManifestRecord, data, manifest_path(manifest.save))  # what could not be read again is never committed
    require_newest(files, manifest.epoch)
    write_new(files, manifest_path(manifest.save), lambda file: file.write(data))
    require_newest(files, manifest.epoch)


def _require_reachable(manifest: ManifestRecord) -> None:
    """A commit that no reader could follow must not come about: it would be the newest one."""
    reached = {manifest.save.name, *(unit.save for unit in manifest.units)}
    reached |= {base for unit in manifest.units for base in unit.bases}
    lost = sorted(reached - manifest.groups.keys())
    if lost:
        raise SaveError(
            f"the manifest of save {manifest.save} takes units from {lost[0]} but has no record of its group"
        )


def hint_latest(files: Files, save: SaveId) -> None:
    """Point LATEST at a commit, for people who look. No reader of ours trusts it."""
    replace_hint(files, LATEST, f"{save.name}\n".encode())


def mark_proven(files: Files, store_id: str, save: SaveId, by_epoch: int) -> None:
    """Record that a job resumed from the commit and took a step. A second mark changes nothing."""
    ensure_dir(files, PROVEN)
    data = to_bytes(ProvenRecord(store_id=store_id, save=save.name, by_epoch=by_epoch))
    try:
        write_new(files, proven_path(save), lambda file: file.write(data))
    except ExistsError:
        return


def _matching_part(files: Files, expected: Expected, rank: int) -> tuple[bytes, PartRecord]:
    path = part_path(expected.save, rank)
    data = files.read(path, PART_LIMIT)
    part = parse_part(data, expected.store_id, expected.save, rank)
    if part.world_size != expected.world_size or rank >= expected.world_size:
        raise DamagedError(f"{path} was written for {part.world_size} ranks, this job has {expected.world_size}")
    if part.plan != expected.plan:
        raise DamagedError(f"{path} follows another decision: its rank disagrees on what this save holds")
    check_payload_size(files, part)
    return data, part


def _group(found: Mapping[int, tuple[bytes, PartRecord]]) -> Group:
    ordered = [found[rank] for rank in sorted(found)]
    parts = tuple(part for _, part in ordered)
    record = GroupRecord(
        world_size=len(parts),
        payload_bytes=sum(part.payload_bytes for part in parts),
        parts=parts_digest(data for data, _ in ordered),
    )
    return Group(parts, record)
