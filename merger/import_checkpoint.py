"""Import a foreign checkpoint as the first commit of a store.

Uses the store's own protocol: claims an epoch, and commits when every byte of the source was checked and everything
written is durable and was read back. A new directory gets its name only then; in an existing directory or a bucket, an
interrupted import leaves a store without a commit. Both can be repeated. Sources are never changed. Memory: a few
chunks, the run state, and a tensor cut along inner dimensions."""

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from merger import checkpoint as checkpoints
from merger.checkpoint import Checkpoint, RankState
from merger.io.blocks import Extent, Progress, bytes_to_read, fragment_streams
from merger.io.output_dir import OutputDir, require_space
from merger.sources import open_source
from merger.sources.store import StoreSource
from merger.tensors import Implausibles, to_leaf
from store import schema
from store.catalog import Catalog, open_or_create
from store.certificate import IMPORT, IMPORTED_AS_FOUND, Certificate, certify
from store.commit import Expected, Group, commit, hint_latest, wait_for_group
from store.errors import DamagedError, StorageError, UnsupportedError, UsageError
from store.fragments import Source, StoredBytes, covered_numel
from store.location import files_at, is_url
from store.names import BUFFER, FROZEN, RAW, SaveId, group_by_key, payload_path, segment_dir
from store.resolve import resolve
from store.retention import Retention, execute, plan_prune
from store.schema import ManifestRecord
from store.segment import SegmentDraft, StagedFragment, check_header, read_leaves, remove_segment, write_segment
from store.session import StoreLock, claim_epoch
from store.state_tree import Leaf, encode
from store.storage.atomic import ensure_dir
from store.storage.local import Files, LocalFiles
from store.storage.object_store import ObjectFiles
from store.text import counted, listed
from store.weights import copy_group


@dataclass(frozen=True)
class ImportPlan:
    """A checkpoint ready to be imported."""

    source: Path
    kind: str  # kind of the source
    checkpoint: Checkpoint
    run_states: tuple[tuple[Any, Sequence[Leaf]], ...]  # (JSON tree, leaves) of each rank, as a store keeps them
    facts: Mapping[str, Any]  # layout facts as JSON values
    notes: tuple[str, ...]  # what the checkpoint does not hold, and what a store does not keep
    linked: Catalog | None = None  # of the source, if its commit is linked instead of copied

    @property
    def bytes_of_values(self) -> int:
        return sum(extent.nbytes for extent in self._extents())

    @cached_property
    def bytes_to_read(self) -> int:
        """Bytes to read from the source: every block, mostly once."""
        return bytes_to_read(fragment_streams(self._extents(), lambda _: None))

    def fragments(self, progress: Progress, implausible: Implausibles) -> list[StagedFragment]:
        """Return all tensors, in the order in which they must be written.

        ``implausible`` gets the kinds of implausible values by (fqn, slot) while they are drawn."""
        return [
            StagedFragment(
                layer=self.checkpoint.record(stream.extent.fqn).layer,
                slot=stream.extent.slot,
                fqn=stream.extent.fqn,
                start=stream.extent.start,
                numel=stream.extent.stop - stream.extent.start,
                dtype=stream.extent.dtype,
                encoding=RAW,
                data=stream,
            )
            for stream in fragment_streams(self._extents(), progress, implausible)
        ]

    def _extents(self) -> list[Extent]:
        return [extent for extents in self.checkpoint.index.names().values() for extent in extents]


def plan_import(source: Path, step: str | None = None, *, link: bool = False) -> ImportPlan:
    """Plan the import of the newest checkpoint of a source, or of ``step``. Reads no tensor.

    ``source``: any that a merge can read. ``step``: a step, a save's name or a tag. ``link``: take a store's commit
    over as it is, composites too, with hard links to its payloads. Raises UsageError if the checkpoint is neither exact
    nor as found, or cannot be linked, UnsupportedError if a store cannot hold the run state, and what the source
    raises."""
    if link and is_url(source):
        raise _not_linked(f"{source} is in a bucket, where there are no hard links")
    opened = open_source(source)
    if link and not isinstance(opened, StoreSource):
        raise _not_linked(f"{source} is a checkpoint of kind {opened.kind}, and only stores are linked")
    checkpoint = opened.checkpoint(step, frozenset())
    checkpoints.refuse_weights_only(checkpoint)
    if link and isinstance(opened, StoreSource):
        if SaveId.parse(checkpoint.certificate.save) not in opened.catalog.saves():
            raise _not_linked(f"{checkpoint.origin} is no commit")
        return ImportPlan(source, opened.kind, checkpoint, (), {}, (), opened.catalog)
    _require_exact(checkpoint)
    notes = checkpoints.own_state_notes(checkpoint)
    client_state = dict(checkpoint.client_state)  # the part of it that can be stored without pickling
    for key, value in checkpoint.client_state.items():
        try:
            encode(value, to_leaf)
        except UnsupportedError as error:
            notes.append(f"{key!r} of the client state is not imported: {error}")
            del client_state[key]
    states = []
    for rank in range(max(checkpoint.run_states, default=0) + 1):  # at least one; empty for ranks that are missing
        state = checkpoint.run_states.get(rank, RankState(None, None))
        tree: dict[str, Any] = {"framework": checkpoint.framework_state, "rng": state.rng, "user": state.user}
        if state.objects is not None:
            tree["objects"] = state.objects
        if rank == 0 and client_state:
            tree["client_state"] = client_state
        states.append(encode(tree, to_leaf))
    if all(state.rng is None for state in checkpoint.run_states.values()):
        named = [name or kind for state in checkpoint.run_states.values() for name, kind in state.objects or ()]
        notes.append(
            "no random states are imported: a job that resumes from it starts dropout, shuffling and the "
            "objects of state=[...] afresh" + (f", except {listed(named)}" if named else "")
        )
    if checkpoint.files is not None:
        notes.append(f"a store keeps no files beside the state: configuration and tokenizer stay in {checkpoint.files}")
    return ImportPlan(source, opened.kind, checkpoint, tuple(states), schema.as_json(checkpoint.facts), tuple(notes))


@dataclass(frozen=True)
class ImportResult:
    """Result of an import. ``problems``: damage in the checkpoint, or a failed cleanup."""

    store: Path
    save: SaveId
    certificate: Certificate
    bytes_written: int
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def import_checkpoint(
    plan: ImportPlan, store: Path, progress: Progress = lambda _: None, *, allow_nonfinite: bool = False
) -> ImportResult:
    """Execute an import plan.

    The commit has one rank for each whose random states and objects the source holds, at least one. All tensors are
    rank 0's. ``store`` does not exist yet, is empty, or is a store without a commit. progress: called with the bytes
    just read; ``plan.bytes_to_read`` in all. allow_nonfinite: import values that no healthy training state holds, as
    problems of the result, instead of raising.

    Raises:
        UsageError: the store has commits or lies in the source.
        MergeError: the source holds such values.
        DamagedError: bytes of the source, or those just written, are wrong.
        StoreInUseError, FencedError, StorageError: as the store raises them."""
    source_path, store_path = plan.source.resolve(), store.resolve()
    if source_path.is_relative_to(store_path) or store_path.is_relative_to(source_path):
        raise UsageError(
            f"one of the store {store} and the checkpoint {plan.source} contains the other, and an import never "
            "changes its source: name a directory beside it with --store"
        )
    if is_url(store) and plan.linked is not None:
        raise _not_linked(f"{store} is in a bucket, where there are no hard links")
    obstacles = (place for place in (store, *store.parents) if os.path.lexists(place) and not place.is_dir())
    if taken := next(obstacles, None):
        kind = "a symbolic link to nothing" if taken.is_symlink() and not taken.exists() else "a file"
        raise UsageError(f"{taken} is {kind}: name a new directory with --store")
    if is_url(store) or store.exists():
        return _import_into(plan, store, progress, allow_nonfinite)
    with closing(OutputDir(store, ())) as output:
        result = _import_into(plan, output.folder, progress, allow_nonfinite)
        output.finish()
    return replace(result, store=store.absolute())


def _not_linked(why: str) -> UsageError:
    advice = "leave --link out, and the import copies the bytes; if they are rounded, copy the store as it is"
    return UsageError(f"{why}: {advice}")


def _import_into(plan: ImportPlan, store: Path, progress: Progress, allow_nonfinite: bool) -> ImportResult:
    files = files_at(store)
    catalog = open_or_create(files)
    lock = StoreLock(files.root, wait_seconds=0) if isinstance(files, LocalFiles) else None
    try:
        if saves := catalog.saves():
            raise UsageError(
                f"the store {store} already has the commit {saves[0]}, which jobs would no longer resume from after an "
                "import. Name a new directory with --store"
            )
        if isinstance(files, LocalFiles) and plan.linked is None:
            require_space("the import", files.root, plan.bytes_of_values, "another store")
        elif isinstance(files, ObjectFiles):
            files.require_conditional_puts()
        if plan.linked is None:
            manifest, implausible = _write_segments(plan, catalog, progress, allow_nonfinite=allow_nonfinite)
        else:
            manifest, implausible = _take_over(plan, plan.linked, store, catalog, progress), []
        save = manifest.save
        commit(files, manifest)
        problems = [*plan.checkpoint.problems, *implausible, *_clean_up(catalog, save)]
    finally:
        if lock is not None:
            lock.release()
    catalog.forget()
    source = plan.checkpoint.certificate
    certificate = replace(
        certify(resolve(catalog, save)),
        exact=source.exact and not implausible,
        as_found=source.as_found and not implausible,
        unvouched=source.unvouched,
        problems=tuple(implausible),
    )
    nbytes = 0 if plan.linked else sum(record.payload_bytes for record in manifest.groups.values())
    return ImportResult(store.absolute(), save, certificate, nbytes, plan.notes, tuple(problems))


def _require_exact(checkpoint: Checkpoint) -> None:
    """Raise UsageError unless whole: the first commit of a store cannot record that parts are older or lossy."""
    if checkpoint.certificate.whole:
        return
    older, lossy = checkpoint.certificate.max_staleness, checkpoint.certificate.lossy
    units = checkpoint.certificate.units
    if older:
        why = f"is a composite: layers of it are up to {counted(older, 'step')} older than others"
    elif lossy:
        slots = {name: dict.fromkeys(one.slot for one in units if one.encoding == name) for name in lossy}
        rounded = ", ".join(f"{' and '.join(names)} as {name}" for name, names in slots.items())
        why = f"is not exact: values were rounded when they were stored ({rounded})"
    else:
        why = "is not exact: " + "; ".join(checkpoint.problems[:1] or ("parts of it stand in for damaged ones",))
    raise UsageError(
        f"{checkpoint.origin} {why}. An imported commit counts as exact, so it is refused. Name an exact checkpoint "
        "with --step (`driftpoint show` lists those of a store), or copy the store as it is"
    )


def _take_over(plan: ImportPlan, linked: Catalog, store: Path, catalog: Catalog, progress: Progress) -> ManifestRecord:
    """Link all payloads of a commit, check their bytes, and write parts and a manifest that name this store."""
    save = SaveId.parse(plan.checkpoint.certificate.save)
    manifest, files, groups = linked.manifest(save), catalog.files, dict[str, schema.GroupRecord]()
    sizes = {SaveId.parse(name): record.world_size for name, record in manifest.groups.items()}
    advice = f"it is damaged in {plan.source}, too: name another commit with --step"

    def link(part: schema.PartRecord) -> schema.PartRecord:
        into = new_save if part.save == save else part.save
        copy = part.replace(store_id=catalog.store_id, step=into.step, epoch=into.epoch)
        remove_segment(files, into, part.rank)  # left from an interrupted import
        payload = plan.source / payload_path(part.save, part.rank)
        try:
            os.link(payload, store / payload_path(into, part.rank), follow_symlinks=False)
        except FileNotFoundError as error:
            raise StorageError(f"{payload} is gone, because its store changed meanwhile: import it again") from error
        except OSError as error:
            why = "the two stores are on different filesystems" if error.errno == errno.EXDEV else error.strerror
            raise _not_linked(f"{payload} cannot be linked ({why})") from error
        _read_back(files, copy, advice)
        progress(sum(entry.nbytes for entry in part.entries))
        return copy

    with _removed_on_error(files, sizes):
        for group in sizes:
            ensure_dir(files, segment_dir(group))  # the epoch to claim is later than all of these
        new_save = SaveId(save.step, claim_epoch(files, catalog.store_id).epoch)
        sizes[new_save] = sizes[save]
        for name, record in manifest.groups.items():
            into = new_save if name == save.name else SaveId.parse(name)
            groups[into.name] = copy_group(files, linked.group(SaveId.parse(name), record), into, link)
    units = (unit.replace(save=new_save.name) if unit.version == save else unit for unit in manifest.units)
    update = {"store_id": catalog.store_id, "epoch": new_save.epoch, "groups": groups, "units": tuple(units)}
    return manifest.replace(**update, commits=1, previous=None, uptime=None)


def _write_segments(
    plan: ImportPlan, catalog: Catalog, progress: Progress, *, allow_nonfinite: bool
) -> tuple[ManifestRecord, list[str]]:
    """Write all segments and read them back. Returns the manifest, and a line for each unit with implausible values."""
    files, world_size = catalog.files, len(plan.run_states)
    save = SaveId(plan.checkpoint.step, claim_epoch(files, catalog.store_id).epoch)
    units = [[extent.fqn, extent.slot] for extents in plan.checkpoint.index.names().values() for extent in extents[:1]]
    agreed = schema.digest(schema.seal([save.name, IMPORT, units]))
    implausible: Implausibles = {}
    with _removed_on_error(files, {save: world_size}):
        for rank, (tree, leaves) in enumerate(plan.run_states):
            draft = SegmentDraft(
                store_id=catalog.store_id,
                save=save,
                rank=rank,
                world_size=world_size,
                plan=agreed,
                fragments=plan.fragments(progress, implausible) if rank == 0 else (),
                run_state=tree,
                run_leaves=leaves,
                facts=plan.facts if rank == 0 else {},
            )
            write_segment(files, draft)
        lines = checkpoints.implausible_lines(plan.checkpoint, implausible)
        if lines and not allow_nonfinite:
            checkpoints.refuse_implausible(plan.checkpoint, lines)
        group = wait_for_group(files, Expected(catalog.store_id, save, world_size, agreed), timeout=60)
        for part in group.parts:
            _read_back(files, part, "check `dmesg` for disk errors, or name a store elsewhere")
        return _manifest(plan, catalog.store_id, save, group, implausible), lines


@contextmanager
def _removed_on_error(files: Files, world_sizes: Mapping[SaveId, int]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for save, world_size in world_sizes.items():
            for rank in range(world_size):
                with suppress(StorageError):
                    remove_segment(files, save, rank)
            with suppress(StorageError):
                files.remove_dir(segment_dir(save))
        raise


def _read_back(files: Files, part: schema.PartRecord, advice: str) -> None:
    """Raise DamagedError, with advice, unless everything in the payload is as it was written."""
    try:
        check_header(files, payload_path(part.save, part.rank), part.header_bytes, part.header_xxh3_128)
        for entry in part.entries:
            StoredBytes(files, Source(part, entry)).check()
        read_leaves(files, part)
    except DamagedError as error:
        raise DamagedError(f"{error}; {advice}") from error


def _manifest(plan: ImportPlan, store_id: str, save: SaveId, group: Group, implausible: Implausibles) -> ManifestRecord:
    checkpoint = plan.checkpoint
    reasons: dict[tuple[str, str], str] = {}
    for (fqn, slot), kinds in implausible.items():
        reasons[checkpoint.record(fqn).layer, slot] = f"{checkpoints.IMPORTED_WITH}{' and '.join(sorted(kinds))}"
    return ManifestRecord(
        store_id=store_id,
        step=save.step,
        epoch=save.epoch,
        commits=1,
        world_size=len(group.parts),
        framework=checkpoint.framework,
        policy=IMPORT,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        previous=None,
        bytes_avoided=0,
        layers=checkpoint.layers,
        tensors=dict(checkpoint.tensors),
        groups={save.name: group.record},
        units=tuple(_units(plan, save, (entry for part in group.parts for entry in part.entries), reasons)),
    )


def _units(
    plan: ImportPlan, save: SaveId, entries: Iterable[schema.Entry], reasons: Mapping[tuple[str, str], str]
) -> list[schema.UnitRecord]:
    usual = IMPORTED_AS_FOUND if plan.checkpoint.certificate.as_found else f"imported from a {plan.kind}"
    by_unit = group_by_key((entry.unit, entry) for entry in entries)
    order = {layer.name: position for position, layer in enumerate(plan.checkpoint.layers)}
    return [
        schema.UnitRecord(
            layer=unit.layer,
            slot=unit.slot,
            save=save.name,
            encoding=RAW,
            numel=covered_numel(by_unit[unit]),
            nbytes=sum(entry.nbytes for entry in by_unit[unit]),
            drift=0.0,
            staleness=0,
            moving=unit.slot not in (FROZEN, BUFFER),
            reason=reasons.get((unit.layer, unit.slot), usual),
            members=schema.members_digest(schema.members_of(by_unit[unit])),
        )
        for unit in sorted(by_unit, key=lambda unit: (order[unit.layer], unit.slot))
    ]


def _clean_up(catalog: Catalog, save: SaveId) -> list[str]:
    """Point LATEST at the commit and remove leftovers of interrupted imports. Returns failures as problems."""
    try:
        catalog.forget()
        hint_latest(catalog.files, save)
        execute(catalog.files, plan_prune(catalog, Retention()))
    except (StorageError, DamagedError) as error:
        return [f"the import is committed, but the cleanup after it failed: {error}"]
    return []
