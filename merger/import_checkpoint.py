"""Import a foreign checkpoint as a first commit.

What an import would write: the run state of every rank, facts, fragments; before a byte of a tensor is read.

Pure, but for opening the source. It does not know the store that it is for.

Importing: a checkpoint of any source becomes the first commit of a store, and a job resumes from it as from its own.

Goes through the store's own protocol: an epoch is claimed, and the commit comes when every byte of the source was
checked and everything written is durable and was read back. An import that is interrupted leaves a store without a
commit, and can be run again. Sources are never changed. Memory: a few chunks, and run state.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from merger.checkpoint import Checkpoint, RankState
from merger.io.blocks import Progress
from merger.io.stream import CHUNK, bytes_to_read, fragment_streams
from merger.sources import open_source
from merger.tensors import to_leaf
from store.catalog import Catalog, open_or_create
from store.certificate import Certificate, certify, is_lossy
from store.commit import Expected, Group, commit, hint_latest, wait_for_group
from store.encoding import itemsize
from store.errors import DamagedError, StorageError, UnsupportedError, UsageError
from store.fragments import covered_numel
from store.layout import part_path, payload_path, segment_dir
from store.location import files_at
from store.names import BUFFER, FROZEN, RAW, SaveId, Unit
from store.resolve import resolve
from store.retention import Retention, execute, plan_prune
from store.schema import (
    Entry,
    ManifestRecord,
    PartRecord,
    UnitRecord,
    as_json,
    digest,
    members_digest,
    members_of,
    seal,
)
from store.segment import SegmentDraft, StagedFragment, check_header, read_leaves, write_segment
from store.session import StoreLock, claim_epoch
from store.state_tree import Leaf, encode
from store.storage.local import Files, LocalFiles
from store.storage.object_store import ObjectFiles
from store.text import counted

POLICY = "import"
"""What the manifest names in the place of the policy that decided."""


@dataclass(frozen=True)
class ImportPlan:
    """A checkpoint ready to be imported.

    kind: of the source. run_states: by rank, as a store keeps them: (JSON tree, leaves). facts: JSON values.
    notes: what the checkpoint does not hold, or a store does not keep.
    """

    source: Path
    kind: str
    checkpoint: Checkpoint
    run_states: tuple[tuple[Any, Sequence[Leaf]], ...]
    facts: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def bytes_of_values(self) -> int:
        """What the tensors take when a store keeps them as they are."""
        return sum((extent.stop - extent.start) * itemsize(extent.dtype) for extent in self._extents())

    @cached_property
    def bytes_to_read(self) -> int:
        """Of the source: every block once, mostly."""
        return bytes_to_read(fragment_streams(self._extents(), lambda _: None))

    def fragments(self, progress: Progress) -> list[StagedFragment]:
        """All tensors, in the order in which they have to be written."""
        return [
            StagedFragment(
                layer=self.checkpoint.record(flow.extent.fqn).layer,
                slot=flow.extent.slot,
                fqn=flow.extent.fqn,
                start=flow.extent.start,
                numel=flow.extent.stop - flow.extent.start,
                dtype=flow.extent.dtype,
                encoding=RAW,
                data=flow,
            )
            for flow in fragment_streams(self._extents(), progress)
        ]

    def _extents(self) -> list[Any]:
        return [extent for extents in self.checkpoint.index.names().values() for extent in extents]


def plan_import(source: Path, step: str | None = None) -> ImportPlan:
    """The plan for the newest checkpoint of a source, or that of ``step``: a step, a save's name or a tag.

    Reads no tensor. Raises what sources raise; UsageError for a composite, UnsupportedError for a run state that a
    store cannot hold.
    """
    opened = open_source(source)
    checkpoint = opened.checkpoint(step, frozenset())
    _require_exact(checkpoint)
    notes: list[str] = []
    client_state = _storable(checkpoint.client_state, notes)
    states = []
    for rank, state in enumerate(_ranks(checkpoint)):
        tree: dict[str, Any] = {"framework": checkpoint.framework_state, "rng": state.rng, "user": state.user}
        if rank == 0 and client_state:
            tree["client_state"] = client_state
        states.append(encode(tree, to_leaf))
    if all(state.rng is None for state in checkpoint.run_states.values()):
        notes.append(
            "the checkpoint holds no random states: a job that resumes from it starts dropout and shuffling afresh, "
            "and what it gives as state=[...] too"
        )
    if checkpoint.files is not None:
        notes.append(f"a store keeps no files beside the state: configuration and tokenizer stay in {checkpoint.files}")
    return ImportPlan(source, opened.kind, checkpoint, tuple(states), as_json(checkpoint.facts), tuple(notes))


def _require_exact(checkpoint: Checkpoint) -> None:
    """The first commit of a store has no past: it could not say that parts of it are older, or stand in for others."""
    if checkpoint.certificate.exact:
        return
    older, lossy = checkpoint.certificate.max_staleness, checkpoint.certificate.lossy
    if older:
        why = f"is a composite: layers of it are up to {counted(older, 'step')} older than others"
    elif lossy:
        rounded = ", ".join(_rounded(checkpoint))
        why = f"is not exact: values were rounded when they were stored ({rounded}), and what was rounded off is lost"
    else:
        why = "is not exact: " + "; ".join(checkpoint.problems[:1] or ("parts of it stand in for damaged ones",))
    raise UsageError(
        f"{checkpoint.origin} {why}. Imported it would pass for exact. Name an exact one with --step "
        "(`driftpoint show` tells of a store), or copy a store as it is"
    )


def _rounded(checkpoint: Checkpoint) -> list[str]:
    """Lossy encodings with the slots that they hold."""
    slots: dict[str, list[str]] = {}
    for unit in checkpoint.certificate.units:
        if is_lossy(unit.encoding) and unit.slot not in slots.setdefault(unit.encoding, []):
            slots[unit.encoding].append(unit.slot)
    return [f"{' and '.join(names)} as {encoding}" for encoding, names in slots.items()]


def _ranks(checkpoint: Checkpoint) -> list[RankState]:
    """Every rank's own state, none where the source has none of that rank; at least one rank."""
    count = max(checkpoint.run_states, default=0) + 1
    return [checkpoint.run_states.get(rank, RankState(None, None)) for rank in range(count)]


def _storable(client_state: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """What of the client state can be kept without pickling; the rest is told."""
    kept = {}
    for key, value in client_state.items():
        try:
            encode(value, to_leaf)
        except UnsupportedError as error:
            notes.append(f"{key!r} of the client state is not imported: {error}")
        else:
            kept[key] = value
    return kept


@dataclass(frozen=True)
class Imported:
    """A commit that was a checkpoint. problems: what was not right with it, or could not be tidied up."""

    store: Path
    save: SaveId
    certificate: Certificate
    bytes_written: int
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def import_checkpoint(plan: ImportPlan, store: Path, progress: Progress = lambda _: None) -> Imported:
    """Carry a plan out. store: does not exist yet, or is empty, or is a store without a commit.

    The commit has a rank for each whose random states and objects the source holds, or one; all tensors are rank
    0's. progress: told the bytes just read of the source, ``plan.bytes_to_read`` in all.

    Raises UsageError for a store that has commits or lies in the source, StoreInUseError, FencedError, StorageError;
    DamagedError where bytes of the source, or those just written, are not right.
    """
    _require_apart(plan.source, store)
    files = files_at(store)
    catalog = open_or_create(files)
    lock = StoreLock(files.root, wait_seconds=0) if isinstance(files, LocalFiles) else None
    try:
        _require_no_commit(catalog, store)
        if isinstance(files, LocalFiles):
            _require_room(plan, files.root)
        elif isinstance(files, ObjectFiles):
            files.require_conditional_puts()
        save = SaveId(plan.checkpoint.step, claim_epoch(files, catalog.store_id).epoch)
        manifest = _written(plan, catalog, save, progress)
        commit(files, manifest)
        problems = [*plan.checkpoint.problems, *_tidied(catalog, save)]
    finally:
        if lock is not None:
            lock.release()
    catalog.forget()
    certificate = certify(resolve(catalog, save))
    nbytes = sum(record.payload_bytes for record in manifest.groups.values())
    return Imported(store.absolute(), save, certificate, nbytes, plan.notes, tuple(problems))


def _written(plan: ImportPlan, catalog: Catalog, save: SaveId, progress: Progress) -> ManifestRecord:
    """Write all segments and read them back. What was written is removed again where anything goes wrong."""
    files, world_size = catalog.files, len(plan.run_states)
    units = [[extent.fqn, extent.slot] for extents in plan.checkpoint.index.names().values() for extent in extents[:1]]
    agreed = digest(seal([save.name, POLICY, units]))
    try:
        for rank, (tree, leaves) in enumerate(plan.run_states):
            draft = SegmentDraft(
                store_id=catalog.store_id,
                save=save,
                rank=rank,
                world_size=world_size,
                plan=agreed,
                fragments=plan.fragments(progress) if rank == 0 else (),
                run_state=tree,
                run_leaves=leaves,
                facts=plan.facts if rank == 0 else {},
            )
            write_segment(files, draft)
        group = wait_for_group(files, Expected(catalog.store_id, save, world_size, agreed), timeout=60)
        for part in group.parts:
            _read_back(files, part)
        return _manifest(plan, catalog.store_id, save, group)
    except BaseException:
        _discard(files, save, world_size)
        raise


def _read_back(files: Files, part: PartRecord) -> None:
    """DamagedError unless everything in the payload is as it was written."""
    path = payload_path(part.save, part.rank)
    check_header(files, path, part.header_bytes, part.header_xxh3_128)
    buffer = memoryview(bytearray(CHUNK))
    for entry in part.entries:
        running, begin = xxhash.xxh3_128(), part.header_bytes + entry.offset
        for offset in range(0, entry.nbytes, CHUNK):
            piece = buffer[: min(CHUNK, entry.nbytes - offset)]
            files.read_into(path, begin + offset, piece)
            running.update(piece)
        if running.hexdigest() != entry.xxh3_128:
            raise DamagedError(
                f"{path} does not read back as it was written: the storage under it is not to be trusted; check "
                "`dmesg`, or name a store elsewhere"
            )
    read_leaves(files, part)


def _manifest(plan: ImportPlan, store_id: str, save: SaveId, group: Group) -> ManifestRecord:
    checkpoint = plan.checkpoint
    return ManifestRecord(
        store_id=store_id,
        step=save.step,
        epoch=save.epoch,
        commits=1,
        world_size=len(group.parts),
        framework=checkpoint.framework,
        policy=POLICY,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        previous=None,
        bytes_avoided=0,
        layers=checkpoint.layers,
        tensors=dict(checkpoint.tensors),
        groups={save.name: group.record},
        units=tuple(_units(plan, save, (entry for part in group.parts for entry in part.entries))),
    )


def _units(plan: ImportPlan, save: SaveId, entries: Iterable[Entry]) -> list[UnitRecord]:
    found: dict[Unit, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.unit, []).append(entry)
    order = {layer.name: position for position, layer in enumerate(plan.checkpoint.layers)}
    return [
        UnitRecord(
            layer=unit.layer,
            slot=unit.slot,
            save=save.name,
            encoding=RAW,
            numel=covered_numel(found[unit]),
            nbytes=sum(entry.nbytes for entry in found[unit]),
            drift=0.0,
            staleness=0,
            moving=unit.slot not in (FROZEN, BUFFER),
            reason=f"imported from a {plan.kind} checkpoint" if plan.kind != "store" else "imported from a store",
            members=members_digest(members_of(found[unit])),
        )
        for unit in sorted(found, key=lambda unit: (order[unit.layer], unit.slot))
    ]


def _tidied(catalog: Catalog, save: SaveId) -> list[str]:
    """Point LATEST at the commit, and remove what interrupted imports left. What of it failed: the commit stands."""
    try:
        catalog.forget()
        hint_latest(catalog.files, save)
        execute(catalog.files, plan_prune(catalog, Retention()))
    except (StorageError, DamagedError) as error:
        return [f"the import is committed, but tidying up after it failed: {error}"]
    return []


def _discard(files: Files, save: SaveId, world_size: int) -> None:
    for rank in range(world_size):
        for path in (part_path(save, rank), payload_path(save, rank)):  # a part must not outlive its payload
            with suppress(StorageError):
                files.unlink(path)
    with suppress(StorageError):
        files.remove_dir(segment_dir(save))


def _require_no_commit(catalog: Catalog, store: Path) -> None:
    saves = catalog.saves()
    if saves:
        raise UsageError(
            f"the store {store} has a newest commit {saves[0]} already, and an import would bury it, "
            "since a job resumes from the newest. Name a new directory with --store"
        )


def _require_room(plan: ImportPlan, store: Path) -> None:
    wanted = plan.bytes_of_values
    free = shutil.disk_usage(store).free
    if wanted > free:
        raise StorageError(
            f"{store}: {wanted} bytes are needed and {free} are free; free space or name a store elsewhere"
        )


def _require_apart(source: Path, store: Path) -> None:
    one, other = source.resolve(), store.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise UsageError(
            f"the store {store} and the checkpoint {source} lie in one another, and an import changes nothing in what "
            "it reads: name a directory beside it with --store"
        )
