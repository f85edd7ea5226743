"""Commit a save: wait for every rank's part, check the epoch again, write the manifest without replacing.

The fsync of ``manifests/`` after the manifest has its name is the commit point: a save may be acknowledged only after
:func:`commit` returned. One process, the committer, runs it; the others only write their segments. Processes exchange
no messages: the committer watches the segment directory."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from store.catalog import require_reader
from store.errors import DamagedError, ExistsError, MissingSegmentsError, SaveError
from store.names import LATEST, MANIFESTS, PROVEN, SEGMENTS, SaveId, manifest_path, part_path, proven_path, segment_dir
from store.schema import FORMAT, GroupRecord, ManifestRecord, PartRecord, ProvenRecord, to_bytes
from store.segment import PART_LIMIT, check_payload_size, has_all_files, parse_part, parts_digest, present_parts
from store.session import require_newest
from store.storage.atomic import ensure_dir, replace_hint, write_new
from store.storage.local import Files, WholeFiles
from store.text import listed


@dataclass(frozen=True)
class Group:
    """A complete segment group: all parts, in rank order, and its record for the manifest."""

    parts: tuple[PartRecord, ...]
    record: GroupRecord


@dataclass(frozen=True)
class Expected:
    """Values that every part of a save must carry."""

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
    """Wait until all ``world_size`` parts are present and match, and return the group.

    Raises SaveError if parts were missing after ``timeout`` seconds or ``aborted`` returned True, DamagedError if one
    belongs to another job or decision."""
    began = clock()
    parts: dict[int, tuple[bytes, PartRecord]] = {}
    while True:
        listed = clock()
        for rank in present_parts(files, expected.save):
            if rank not in parts:
                parts[rank] = _read_matching_part(files, expected, rank)
        if len(parts) == expected.world_size:
            return _build_group(parts)
        missing = sorted(set(range(expected.world_size)) - set(parts))[:8]
        if aborted():
            raise SaveError(f"save {expected.save} was given up: a rank could not write its segment")
        now = clock()
        if now >= began + timeout:
            raise SaveError(f"save {expected.save}: ranks {missing} wrote no segment within {timeout:g} s")
        # A twentieth of the time so far adds little; more if listing takes long, as with many ranks on one filesystem.
        sleep(min(0.25, max(0.002, (now - began) / 20, 10 * (now - listed))))


def commit(files: Files, manifest: ManifestRecord, *, resolved: bool = False) -> None:
    """Write the manifest, which makes the save exist.

    The epoch is checked before the manifest gets its name and again when it is durable. If the second check fails, the
    commit exists but is not acknowledged. If it succeeds, every later claimant finds the manifest.

    resolved: whether what it needs of other saves was found. Raises FencedError if a newer epoch was claimed,
    ExistsError if the save is committed already, SaveError if the manifest names a save without its group,
    MissingSegmentsError if files of such a group are gone."""
    _require_reachable(manifest)
    if files.make_dir(MANIFESTS):  # it was deleted
        files.sync_dir("")
    # Every rank synced its own files; this makes their names durable, whoever made them. Those of the directories above
    # are, since the epoch is listed: its claim synced the root after the store was made.
    files.sync_dir(SEGMENTS)
    files.sync_dir(segment_dir(manifest.save))
    data = to_bytes(manifest)
    require_newest(files, manifest.epoch)
    if gone := [] if resolved else _gone(files, manifest):
        raise MissingSegmentsError(
            f"it takes layers from saves whose segments are gone ({listed(gone)}), so it is not committed, and commits "
            "that need them cannot be resumed. The next save writes these layers anew",
            gone,
        )
    if manifest.reader > FORMAT:
        require_reader(files, manifest.reader)
    write_new(files, manifest_path(manifest.save), data)
    require_newest(files, manifest.epoch)


def _gone(files: Files, manifest: ManifestRecord) -> list[str]:
    """Return the groups of other saves that lack files: removed by hand, or by a filesystem that purges by age."""
    others = sorted(manifest.groups.keys() - {manifest.save.name})
    if isinstance(files, WholeFiles):  # each look is a request, and a bucket has no directory without a file
        present = frozenset(files.list_dir(SEGMENTS)) if others else ()
        return [name for name in others if name not in present]
    return [name for name in others if not has_all_files(files, SaveId.parse(name), manifest.groups[name].world_size)]


def _require_reachable(manifest: ManifestRecord) -> None:
    # A commit without one of its groups could not be resumed, and would be the newest one.
    needed = {manifest.save.name, *(unit.save for unit in manifest.units)}
    needed |= {base for unit in manifest.units for base in unit.bases}
    missing = sorted(needed - manifest.groups.keys())
    if missing:
        raise SaveError(f"the manifest of save {manifest.save} has units of {missing[0]} but no record of its group")


def hint_latest(files: Files, save: SaveId) -> None:
    """Point LATEST at a commit, so that its loss is noticed; readers do not follow it."""
    replace_hint(files, LATEST, f"{save.name}\n".encode())


def mark_proven(files: Files, store_id: str, save: SaveId, by_epoch: int) -> None:
    """Record that a job resumed from the commit and took a step. A second mark changes nothing."""
    ensure_dir(files, PROVEN)
    proven = ProvenRecord(store_id=store_id, save=save.name, by_epoch=by_epoch)
    with suppress(ExistsError):
        write_new(files, proven_path(save), to_bytes(proven))


def _read_matching_part(files: Files, expected: Expected, rank: int) -> tuple[bytes, PartRecord]:
    path = part_path(expected.save, rank)
    data = files.read(path, PART_LIMIT)
    part = parse_part(data, expected.store_id, expected.save, rank)
    if part.world_size != expected.world_size or rank >= expected.world_size:
        raise DamagedError(f"{path} was written for {part.world_size} ranks, this job has {expected.world_size}")
    if part.plan != expected.plan:
        raise DamagedError(f"{path} follows another decision: its rank planned other contents for this save")
    check_payload_size(files, part)
    return data, part


def _build_group(by_rank: Mapping[int, tuple[bytes, PartRecord]]) -> Group:
    ordered = [by_rank[rank] for rank in sorted(by_rank)]
    parts = tuple(part for _, part in ordered)
    nbytes, digests = sum(part.payload_bytes for part in parts), parts_digest(data for data, _ in ordered)
    return Group(parts, GroupRecord(world_size=len(parts), payload_bytes=nbytes, parts=digests))
