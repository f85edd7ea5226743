"""Keep the weights of commits that retention deletes, as weights-only commits.

Each is a store of its own below ``weights/SAVE``: the commit's manifest without the units of the optimizer and, of each
segment that it needs, the stored bytes of parameters and buffers, copied as they are with their hashes. Every reader of
a store can read it; a resume refuses it. Nothing else refers to it.

Its manifest appears when everything else in it is durable, and the commit goes only after all of it was read back, so
one of the two is always whole. A directory without a manifest is left from an interrupted copy or removal."""

from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial

from store import names as paths
from store.catalog import Catalog, LoadedGroup, open_catalog
from store.errors import DamagedError, MissingError, NoStoreError, StorageError, UnreachableError
from store.fragments import Source, StoredBytes
from store.names import BUFFER, FROZEN, WEIGHTS, SaveId, Unit
from store.schema import GroupRecord, PartRecord, to_bytes
from store.segment import entry_item, parts_digest, write_payload
from store.session import require_newest
from store.storage.atomic import ensure_dir, is_temporary, remove_all, write_new
from store.storage.local import Files, list_or_empty
from store.verify import CommitState, Progress, VerifyReport, verify


def weights_only_saves(files: Files) -> list[SaveId]:
    """Return the weights-only commits, newest first."""
    named = (paths.parse_save_dir(name) for name in list_or_empty(files, paths.KEPT_WEIGHTS))
    folders = {save: f"{paths.weights_dir(save)}/{paths.MANIFESTS}" for save in named if save is not None}
    return sorted((save for save in folders if f"{save}.json" in list_or_empty(files, folders[save])), reverse=True)


def open_weights(catalog: Catalog, save: SaveId) -> Catalog:
    """Open a weights-only commit as a store. Raises as :func:`store.catalog.open_catalog`."""
    return open_catalog(catalog.files.below(paths.weights_dir(save)))


def all_saves(catalog: Catalog) -> list[SaveId]:
    """Return the commits and the weights-only commits, newest first."""
    return sorted({*catalog.saves(), *weights_only_saves(catalog.files)}, reverse=True)


def read_weights(catalog: Catalog) -> Mapping[SaveId, str | None]:
    """Return the weights-only commits, each with the commit that it continues. Reads each manifest once."""
    found: dict[SaveId, str | None] = {}
    for save in weights_only_saves(catalog.files):
        try:
            known = save in catalog.weights
            found[save] = catalog.weights[save] if known else open_weights(catalog, save).manifest(save).previous
        except (DamagedError, NoStoreError):
            found[save] = None
            catalog.damaged_weights.add(save)
    catalog.weights = found  # only now: another error is no answer
    return found


def keep_weights(files: Files, save: SaveId, epoch: int) -> None:
    """Copy a commit's weights into a weights-only commit, durable and read back on return. The commit itself stays.

    ``epoch``: of the owner of the store. Raises DamagedError if the weights are damaged, StorageError if they cannot be
    read, written or read back, FencedError if another job took the store over."""
    catalog, inner = open_catalog(files), files.below(paths.weights_dir(save))
    manifest, groups = catalog.manifest(save), dict[str, GroupRecord]()
    if _is_whole(inner):  # copied by a process that may have died before the last sync
        inner.sync_dir(paths.MANIFESTS)
        return
    require_newest(files, epoch)  # now: another job may have taken the store over while that was read, and copied it
    units = tuple(unit for unit in manifest.units if unit.slot in (WEIGHTS, FROZEN, BUFFER))
    remove_weights(files, save)
    ensure_dir(files, paths.weights_dir(save))
    for name in dict.fromkeys([save.name, *(name for unit in units for name in (unit.save, *unit.bases))]):
        needed = {unit.unit for unit in units if name in (unit.save, *unit.bases)}
        group = catalog.group(SaveId.parse(name), manifest.groups[name])
        groups[name] = copy_group(inner, group, group.save, partial(_copy_payload, files, inner, needed))
    kept = manifest.replace(units=units, groups=groups, weights_only=True)
    write_new(inner, paths.STORE, to_bytes(catalog.record.replace(reader=kept.reader)))
    ensure_dir(inner, paths.MANIFESTS)
    require_newest(files, epoch)
    write_new(inner, paths.manifest_path(save), to_bytes(kept))
    if not _is_whole(inner):
        raise StorageError(f"{paths.weights_dir(save)} is not as it was written a moment ago: check `dmesg`")


def _is_whole(inner: Files) -> bool:
    with suppress(DamagedError, NoStoreError):
        report = verify(open_catalog(inner))
        return report.ok and bool(report.commits)
    return False


def remove_weights(files: Files, save: SaveId) -> None:
    """Remove a weights-only commit, or what is left of one: first, durably, its manifest. Unknown files stay."""
    root = paths.weights_dir(save)
    manifests, segments, known = f"{root}/{paths.MANIFESTS}", f"{root}/{paths.SEGMENTS}", (paths.STORE, f"{save}.json")
    groups = (f"{segments}/{name}" for name in list_or_empty(files, segments))
    for folder in (manifests, *groups, segments, root):
        names = list_or_empty(files, folder)
        ours = [name for name in names if name in known or paths.parse_rank_file(name) or is_temporary(name)]
        remove_all(files, [f"{folder}/{name}" for name in ours])
        if folder == manifests and ours:
            files.sync_dir(folder)
        if not list_or_empty(files, folder):
            with suppress(MissingError):
                files.remove_dir(folder)


def verify_all(catalog: Catalog, progress: Progress = lambda _: None) -> VerifyReport:
    """Verify a store and its weights-only commits. Raises as :func:`store.verify.verify`."""
    report = verify(catalog, progress)
    commits, problems, nbytes = [*report.commits], [*report.problems], report.bytes_read
    for save in weights_only_saves(catalog.files):
        try:
            found = verify(open_weights(catalog, save), progress)
        except UnreachableError:
            raise
        except (DamagedError, NoStoreError, StorageError) as error:  # a file that cannot be read, for one
            if save not in weights_only_saves(catalog.files):  # it was removed meanwhile
                continue
            found = VerifyReport((CommitState(save, "damaged", (str(error),)),), (), None, 0)
        where = f"{paths.weights_dir(save)}: "
        for one in found.commits:
            commits.append(replace(one, weights_only=True, problems=tuple(where + text for text in one.problems)))
        problems += (where + text for text in found.problems)
        nbytes += found.bytes_read
    return replace(report, commits=tuple(commits), problems=tuple(problems), bytes_read=nbytes)


def copy_group(
    files: Files, group: LoadedGroup, into: SaveId, payload: Callable[[PartRecord], PartRecord]
) -> GroupRecord:
    """Write the parts of a group, durably. ``payload`` makes a payload and returns the part for it."""
    if group.problems:
        raise (StorageError if group.refused else DamagedError)(group.problems[-1])
    ensure_dir(files, paths.segment_dir(into))
    parts = [payload(part) for _, part in sorted(group.parts.items())]
    written = [to_bytes(part) for part in parts]
    for part, data in zip(parts, written, strict=True):
        write_new(files, paths.part_path(into, part.rank), data, sync_name=False)
    files.sync_dir(paths.segment_dir(into))
    nbytes = sum(part.payload_bytes for part in parts)
    return GroupRecord(world_size=len(parts), payload_bytes=nbytes, parts=parts_digest(written))


def _copy_payload(files: Files, inner: Files, needed: Set[Unit], part: PartRecord) -> PartRecord:
    entries = [entry for entry in part.entries if entry.unit in needed]
    items = [entry_item(entry, StoredBytes(files, Source(part, entry))) for entry in entries]
    payload = write_payload(inner, paths.payload_path(part.save, part.rank), items)
    placed = zip(entries, payload.placed, strict=True)
    changes = {name: getattr(payload, name) for name in ("payload_bytes", "header_bytes", "header_xxh3_128")}
    changes |= {"entries": tuple(entry.replace(offset=at.offset) for entry, at in placed)}
    return part.replace(**changes, measures=(), run_state={"framework": {}}, run_tensors=())
