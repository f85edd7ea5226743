"""Open or create a store, read its records.

Opening a store and reading its records: manifests newest first, parts of a group, each checked.

A catalog reads and never writes. It caches what is immutable. Damage is kept as text beside what could be read,
because the reader's answer to damage is another version, not an exception.

Opening and creating a store: the door for writers. Readers need no more than ``catalog``.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from store.errors import (
    DamagedError,
    ExistsError,
    MissingError,
    NewerFormatError,
    NoStoreError,
    StorageError,
    UnreachableError,
)
from store.layout import (
    EPOCHS,
    FOREIGN,
    MANIFESTS,
    PROVEN,
    SEGMENTS,
    STORE,
    TOP_LEVEL,
    manifest_path,
    parse_save_dir,
    parse_save_file,
    part_path,
)
from store.marks import Suspects, read_suspects
from store.names import SaveId, Unit
from store.schema import (
    FORMAT,
    Entry,
    GroupRecord,
    ManifestRecord,
    PartRecord,
    StoreRecord,
    from_bytes,
    to_bytes,
    unseal,
)
from store.segment import PART_LIMIT, check_payload_size, parse_part, parts_digest, present_parts
from store.storage.atomic import ensure_dir, is_temporary, write_new
from store.storage.local import Files

_MANIFEST_LIMIT = 1 << 26
_STORE_LIMIT = 1 << 16


@dataclass(frozen=True)
class LoadedGroup:
    """What can be read of a segment group: whole parts by rank, and what is wrong with the rest.

    refused: storage refused a read (I/O error, too many open files, ...), so what is missing may yet be whole.
    """

    save: SaveId
    parts: Mapping[int, PartRecord]
    problems: tuple[str, ...]
    refused: bool = False

    @cached_property
    def by_unit(self) -> Mapping[Unit, tuple[tuple[PartRecord, Entry], ...]]:
        """Stored fragments of all whole parts, by unit: built once, because a group may hold a million."""
        found: dict[Unit, list[tuple[PartRecord, Entry]]] = {}
        for part in self.parts.values():
            for entry in part.entries:
                found.setdefault(entry.unit, []).append((part, entry))
        return {unit: tuple(entries) for unit, entries in found.items()}


class Catalog:
    """The readable side of one store."""

    def __init__(self, files: Files, record: StoreRecord) -> None:
        self.files = files
        self.record = record
        self._manifests: dict[SaveId, ManifestRecord] = {}
        self._groups: dict[tuple[SaveId, str], LoadedGroup] = {}

    @property
    def store_id(self) -> str:
        """Identity of the store; every record in it carries the same."""
        return self.record.store_id

    def saves(self) -> list[SaveId]:
        """All commits by file name, newest first. None of them is read.

        DamagedError where there are segments but no ``manifests/``: that is not a store without commits.
        """
        try:
            return _saves_in(self.files, MANIFESTS)
        except MissingError as error:
            if _groups_in(self.files):
                raise DamagedError(
                    f"{_where(self.files)} holds segments but its {MANIFESTS}/ is missing: restore that directory "
                    "from a copy, or make an empty one to begin anew"
                ) from error
            return []

    def proven(self) -> set[SaveId]:
        """Commits that a job resumed from and then took a step."""
        try:
            return set(_saves_in(self.files, PROVEN))
        except MissingError:
            return set()

    def suspects(self) -> Suspects:
        """Commits that jobs died of. A mark that cannot be read counts for nothing and is told."""
        return read_suspects(self.files, self.store_id)

    def manifest(self, save: SaveId) -> ManifestRecord:
        """One manifest. DamagedError where it is not whole or not of this store and name."""
        if save not in self._manifests:
            path = manifest_path(save)
            try:
                found = from_bytes(ManifestRecord, self.files.read(path, _MANIFEST_LIMIT), path)
            except MissingError as error:
                raise DamagedError(str(error)) from error
            if (found.store_id, found.save) != (self.store_id, save):
                raise DamagedError(
                    f"{path} is manifest {found.save} of store {found.store_id}: it was copied or renamed"
                )
            self._manifests[save] = found
        return self._manifests[save]

    def group(self, save: SaveId, record: GroupRecord) -> LoadedGroup:
        """The parts of a group as the manifest's ``record`` has it, sizes of their payloads checked.

        UnreachableError: nobody knows; everything else that may be wrong is in the group."""
        key = (save, record.parts)
        if key not in self._groups:
            found = self._load_group(save, record)
            if found.refused:  # may go better next time
                return found
            self._groups[key] = found
        return self._groups[key]

    def retain(self, saves: Collection[SaveId]) -> None:
        """Drop from the cache what only other commits need; for a process that lives as long as a job."""
        self._manifests = {save: found for save, found in self._manifests.items() if save in saves}
        needed = {
            (SaveId.parse(name), record.parts)
            for manifest in self._manifests.values()
            for name, record in manifest.groups.items()
        }
        self._groups = {key: group for key, group in self._groups.items() if key in needed}

    def forget(self) -> None:
        """Drop what was cached: read from storage again."""
        self._manifests.clear()
        self._groups.clear()

    def _load_group(self, save: SaveId, record: GroupRecord) -> LoadedGroup:
        parts: dict[int, PartRecord] = {}
        raw: list[bytes] = []
        problems: list[str] = []
        refused = False
        # Goes by the names that are there: the number in the record is only believed once it is matched.
        try:
            ranks = [rank for rank in present_parts(self.files, save) if rank < record.world_size]
        except UnreachableError:
            raise
        except (DamagedError, StorageError) as error:
            return LoadedGroup(save, {}, (str(error),), refused=isinstance(error, StorageError))
        if len(ranks) != record.world_size:
            there = set(ranks)
            missing = list(islice((rank for rank in range(record.world_size) if rank not in there), 4))
            problems.append(
                f"segments/{save}: {len(ranks)} of {record.world_size} parts are there; missing: ranks {missing} ..."
            )
        for rank in ranks:
            try:
                data = self.files.read(part_path(save, rank), PART_LIMIT)
                part = parse_part(data, self.store_id, save, rank)
                check_payload_size(self.files, part)
            except (DamagedError, MissingError) as error:
                problems.append(str(error))
            except UnreachableError:
                raise
            except StorageError as error:
                problems.append(str(error))
                refused = True
            else:
                raw.append(data)
                parts[rank] = part
        if not problems and parts_digest(raw) != record.parts:
            return LoadedGroup(save, {}, (f"segments/{save}: its parts are not those that were committed",))
        return LoadedGroup(save, parts, tuple(problems), refused)


def open_catalog(files: Files) -> Catalog:
    """The catalog of an existing store. NoStoreError, NewerFormatError or DamagedError where it cannot be read."""
    try:
        data = files.read(STORE, _STORE_LIMIT)
    except MissingError as error:
        raise NoStoreError(f"{_where(files)} is no driftpoint store: there is no {STORE} in it") from error
    body = unseal(data, STORE)
    reader = body.get("reader") if isinstance(body, dict) else None
    if isinstance(reader, int) and reader > FORMAT:
        raise NewerFormatError(
            f"{_where(files)} is in a format that needs a reader of format {reader}; this release reads up to "
            f"{FORMAT}: run `pip install --upgrade driftpoint`"
        )
    return Catalog(files, from_bytes(StoreRecord, data, STORE))


def _groups_in(files: Files) -> bool:
    try:
        return any(parse_save_dir(name) is not None for name in files.list_dir(SEGMENTS))
    except MissingError:
        return False


def _saves_in(files: Files, folder: str) -> list[SaveId]:
    names = files.list_dir(folder)
    return sorted((save for name in names if (save := parse_save_file(name)) is not None), reverse=True)


def _where(files: Files) -> str:
    return str(getattr(files, "root", "this directory"))


def open_or_create(files: Files) -> Catalog:
    """The store at the root of ``files``; made there, durably, where there is none.

    StorageError where the directory holds something else: a store never moves in with other files.
    DamagedError where it holds commits without ``STORE.json``: they are never built over.
    """
    try:
        return open_catalog(files)
    except NoStoreError:
        files.make_dir("")
    _require_nothing_else(files)
    if _holds_records(files):
        return _reopened(files)
    for folder in (EPOCHS, SEGMENTS, MANIFESTS, PROVEN):
        ensure_dir(files, folder)
    data = to_bytes(StoreRecord(format=FORMAT, reader=FORMAT, store_id=secrets.token_hex(16)))
    with suppress(ExistsError):  # another process made it just now: its store is as good
        write_new(files, STORE, lambda file: file.write(data))
    return open_catalog(files)


def _holds_records(files: Files) -> bool:
    folders = [name for name in files.list_dir("") if name in (EPOCHS, SEGMENTS, MANIFESTS, PROVEN)]
    return any(not is_temporary(name) for folder in folders for name in files.list_dir(folder))


def _reopened(files: Files) -> Catalog:
    # Records are written after STORE.json: either another process made the store just now, or the file was lost.
    try:
        return open_catalog(files)
    except NoStoreError as error:
        raise DamagedError(
            f"{getattr(files, 'root', 'the directory')} holds commits but its {STORE} is missing: restore that file "
            "from a copy, or name an empty directory as `store:` to begin anew"
        ) from error


def _require_nothing_else(files: Files) -> None:
    known = TOP_LEVEL | FOREIGN
    strange = [name for name in files.list_dir("") if name not in known and not is_temporary(name)]
    if strange:
        raise StorageError(
            f"{getattr(files, 'root', 'the directory')} is no store and not empty (it holds {strange[0]!r}): "
            "name an empty or new directory as `store:`"
        )
