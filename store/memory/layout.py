"""Folders and records of the memory tier.

Where a store's state lies in shared memory, and what the files there are called.

    /dev/shm/driftpoint-1000/              of one user, mode 0700
      <store id>/                          of one store, and of its copies
        000004/                            of the job that claimed epoch 4 when it began; 000004.1, where that is
                                           another's, of a job on a copy of the store
          rank-00003.owner                 locked as long as that rank's process lives
          rank-00003.0.payload             fragments as they are, then tensors of the run state
          rank-00003.0.json                the record that makes the payload a version
          rank-00003.0.new                 the record before it has its name
          rank-00003.1.*                   the other one

It knows names and permissions only. Nothing in shared memory is ever synced: it ends with the node anyway.

The record of one rank's version in memory. Written last, under its name at once: it is what makes the version.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from store.errors import DamagedError, MissingError, NewerFormatError, StorageError
from store.names import SaveId
from store.schema import Digest, ManifestRecord, Natural, PartRecord, Record, from_bytes, unseal

SLOTS = (0, 1)
"""Payloads of a rank: the version that counts, and the one that is being written."""

BRANCHES = 10
"""Jobs that claimed epochs of the same number, each on its own copy of a store, and may all have memory."""

_GENERATION = re.compile(r"(\d{6,9})(?:\.(\d))?\Z")
_STORE = re.compile(r"[0-9a-f]{32}\Z")
_FILE = re.compile(r"rank-(\d{5,8})\.(?:(owner)|([01])\.(payload|json|new))\Z")


@dataclass(frozen=True)
class Tier:
    """The memory tier of one store on this node. base: of all users, ``/dev/shm`` but for tests."""

    base: Path
    store_id: str

    @property
    def home(self) -> Path:
        return home(self.base)

    @property
    def folder(self) -> Path:
        return self.home / self.store_id

    def generations(self) -> list[Generation]:
        """Newest first. StorageError where the folder is not this user's own."""
        if not require_own(self.home):
            return []
        found = [match for name in _names(self.folder) if (match := _GENERATION.match(name))]
        there = sorted(((int(match[1]), int(match[2] or 0)) for match in found), reverse=True)
        return [Generation(self, epoch, branch) for epoch, branch in there]

    def generation(self, epoch: int, branch: int = 0) -> Generation:
        """The folder of a job; it need not exist."""
        return Generation(self, epoch, branch)


@dataclass(frozen=True)
class Generation:
    """What the ranks of one incarnation of a job keep on this node.

    epoch: that it claimed first. branch: above 0 where a job on a copy of the store claimed that number, too."""

    tier: Tier
    epoch: int
    branch: int = 0

    @property
    def folder(self) -> Path:
        return self.tier.folder / (f"{self.epoch:06d}" + (f".{self.branch}" if self.branch else ""))

    def make(self) -> None:
        """Make the folder, readable by this user only. StorageError where it cannot be."""
        try:
            self.tier.home.mkdir(mode=0o700, exist_ok=True)
            require_own(self.tier.home)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make {self.folder} for the memory tier: {error.strerror}") from error

    def owner(self, rank: int) -> Path:
        """Locked by a rank's process."""
        return self.folder / f"rank-{rank:05d}.owner"

    def payload(self, rank: int, slot: int) -> Path:
        """A rank's memory."""
        return self.folder / f"rank-{rank:05d}.{slot}.payload"

    def record(self, rank: int, slot: int) -> Path:
        """What says that the payload beside it is a version."""
        return self.folder / f"rank-{rank:05d}.{slot}.json"

    def unsealed(self, rank: int, slot: int) -> Path:
        """A record that is being written: no version yet."""
        return self.record(rank, slot).with_suffix(".new")

    def of(self, rank: int) -> tuple[Path, ...]:
        """Every file that a rank may have, its records first: a payload without one is no version."""
        made = [make(rank, slot) for make in (self.record, self.unsealed, self.payload) for slot in SLOTS]
        return (*made, self.owner(rank))

    def ranks(self) -> list[int]:
        """Ranks that have any file here, sorted."""
        return sorted({rank for _, rank, _ in self.files()})

    def files(self) -> Iterator[tuple[Path, int, int | None]]:
        """(path, rank, slot) of each file; slot None for an owner's. Other names are left alone."""
        for name in _names(self.folder):
            match = _FILE.match(name)
            if match:
                yield self.folder / name, int(match[1]), None if match[3] is None else int(match[3])


def _names(folder: Path) -> list[str]:
    """Sorted; none where the folder is not there, or any more."""
    try:
        return sorted(place.name for place in folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"cannot look into {folder}: {error.strerror}") from error


def home(base: Path) -> Path:
    """The folder of this user below ``base``."""
    return base / f"driftpoint-{os.getuid()}"


def tiers(base: Path) -> list[Tier]:
    """Of every store that this user has state of in memory."""
    place = home(base)
    if not require_own(place):
        return []
    return [Tier(base, name) for name in _names(place) if _STORE.match(name)]


def require_own(place: Path) -> bool:
    """Whether the folder exists. StorageError where others may have put something into it.

    Shared memory is open to every user: what lies there under our name is believed only if nobody else could write."""
    try:
        status = os.lstat(place)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"cannot look at {place}: {error.strerror}") from error
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    if not own:
        raise StorageError(
            f"{place} is not a folder that only user {os.getuid()} may read and write, so nothing in it is believed: "
            f"look who made it, remove it, or set another `memory: {{path: ...}}`"
        )
    return True


def read_whole(path: Path, limit: int) -> bytes:
    """A record's bytes. MissingError or StorageError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise MissingError(f"{path} is not there") from error
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > limit:
        raise StorageError(f"{path} is larger than {limit} bytes")
    return data


RECORD_LIMIT = 1 << 28
"""Bytes; as large as a part may be."""

READER = 1
"""What a reader must know to read what is written now."""


class VersionRecord(Record):
    """One rank's share of a version.

    claim: token of the claim of its epoch: a copy of the store whose job took that number, too, has another. part: as
    in a store; offsets count from the payload's beginning. head: rank 0's: the manifest that a commit of this
    version would have, but for the group of its own segments, which only all ranks' parts tell. replica: the rank was
    on another node, and this is what a peer kept of it."""

    reader: Natural
    claim: Digest
    part: PartRecord
    head: ManifestRecord | None = None
    replica: bool = False

    @property
    def save(self) -> SaveId:
        """What the version is called: as a save would be."""
        return self.part.save


def parse_record(data: bytes, what: str) -> VersionRecord:
    """DamagedError or NewerFormatError, naming ``what``, unless it is whole and for this release."""
    body = unseal(data, what)
    reader = body.get("reader") if isinstance(body, dict) else None
    if isinstance(reader, int) and reader > READER:
        raise NewerFormatError(f"{what} was written by a newer release; run `pip install --upgrade driftpoint`")
    record = from_bytes(VersionRecord, data, what)
    part, head = record.part, record.head
    if part.header_bytes:
        raise DamagedError(f"{what}: a payload in memory has no header")
    if head is not None and (head.store_id, head.save, head.world_size) != (part.store_id, part.save, part.world_size):
        raise DamagedError(f"{what}: its head is of another save than its part")
    return record
