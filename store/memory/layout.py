"""Define the folders, file names and records of the memory tier.

    /dev/shm/driftpoint-1000/              of one user, mode 0700
      <store id>/                          of one store, and of its copies
        000004/                            of the job that claimed epoch 4 when it began; 000004.1, where that is
                                           another's, of a job on a copy of the store
          rank-00003.owner                 locked as long as that rank's process lives
          rank-00003.0.payload             fragments as they are, then tensors of the run state
          rank-00003.0.json                the record that makes the payload a version
          rank-00003.0.new                 the record before it has its name
          rank-00003.1.*                   the other payload and its record

A record is written last and renamed into place; it makes the payload a version. Shared memory is never synced."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from store.errors import DamagedError, NewerFormatError, StorageError, system_errors
from store.names import SaveId
from store.schema import READER, Digest, ManifestRecord, Natural, PartRecord, ReaderRecord, Record, from_bytes, learn
from store.storage.local import LocalFiles

SLOTS = (0, 1)  # payloads of a rank: the current version, and the one being written
BRANCHES = 10  # number of jobs with the same epoch, each on its own copy of a store, that can have memory
_GENERATION = re.compile(r"(\d{6,9})(?:\.(\d))?\Z")
_STORE = re.compile(r"[0-9a-f]{32}\Z")
_FILE = re.compile(r"rank-(\d{5,8})\.(?:(owner)|([01])\.(payload|json|new))\Z")


@dataclass(frozen=True)
class Tier:
    """The memory tier of one store on this node, below ``base`` (usually ``/dev/shm``)."""

    base: Path
    store_id: str

    @property
    def home(self) -> Path:
        return home(self.base)

    @property
    def folder(self) -> Path:
        return self.home / self.store_id

    def generations(self) -> "list[Generation]":
        """Return the folders of all jobs, newest first. Raises StorageError if others may access them."""
        if not require_own(self.home):
            return []
        matches = [match for name in _names(self.folder) if (match := _GENERATION.match(name))]
        jobs = sorted(((int(match[1]), int(match[2] or 0)) for match in matches), reverse=True)
        return [Generation(self, epoch, branch) for epoch, branch in jobs]

    def generation(self, epoch: int, branch: int = 0) -> "Generation":
        """Return the folder of a job, which need not exist."""
        return Generation(self, epoch, branch)


@dataclass(frozen=True)
class Generation:
    """Memory of one incarnation of a job on this node."""

    tier: Tier
    epoch: int  # the first that it claimed
    branch: int = 0  # above 0 if a job on a copy of the store has the same epoch

    @property
    def folder(self) -> Path:
        return self.tier.folder / (f"{self.epoch:06d}" + (f".{self.branch}" if self.branch else ""))

    def make(self) -> None:
        """Create the folder, readable by this user only. Raises StorageError."""
        make_home(self.tier.base)
        with system_errors("make", f"{self.folder} for the memory tier"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def owner(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.owner"

    def is_replica(self, rank: int) -> bool:
        """Return whether a rank's memory is for replicas of it; see :meth:`store.memory.arena.Owner.mark`."""
        with suppress(OSError):
            return self.owner(rank).lstat().st_size > 0
        return False

    def payload(self, rank: int, slot: int) -> Path:
        return self.folder / f"rank-{rank:05d}.{slot}.payload"

    def record(self, rank: int, slot: int) -> Path:
        return self.folder / f"rank-{rank:05d}.{slot}.json"

    def unsealed(self, rank: int, slot: int) -> Path:
        return self.record(rank, slot).with_suffix(".new")

    def of(self, rank: int) -> tuple[Path, ...]:
        """Return all paths of a rank, records first, so that removing them in order leaves no half version."""
        made = [make(rank, slot) for make in (self.record, self.unsealed, self.payload) for slot in SLOTS]
        return (*made, self.owner(rank))

    def ranks(self) -> list[int]:
        return sorted({rank for _, rank, _ in self.files()})

    def files(self) -> Iterator[tuple[Path, int, int | None]]:
        """Yield (path, rank, slot) of each file, slot None for owner files. Other names are ignored."""
        for name in _names(self.folder):
            match = _FILE.match(name)
            if match:
                yield self.folder / name, int(match[1]), None if match[3] is None else int(match[3])


def _names(folder: Path) -> list[str]:
    with system_errors("look into", folder), suppress(FileNotFoundError):
        return sorted(place.name for place in folder.iterdir())
    return []


def home(base: Path) -> Path:
    """Return the folder of this user below ``base``."""
    return base / f"driftpoint-{os.getuid()}"


def make_home(base: Path) -> Path:
    """Create this user's folder below ``base`` if needed. Raises StorageError if others may access it."""
    place = home(base)
    with system_errors("make", place):
        place.mkdir(mode=0o700, exist_ok=True)
    require_own(place)
    return place


def tiers(base: Path) -> list[Tier]:
    """Return the memory tiers of all stores of this user."""
    place = home(base)
    return [] if not require_own(place) else [Tier(base, name) for name in _names(place) if _STORE.match(name)]


def require_own(place: Path) -> bool:
    """Return whether the folder exists. Raises StorageError if other users may access it.

    Shared memory is open to every user, so its contents are trusted only if no other user could write them."""
    try:
        status = os.lstat(place)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"cannot look at {place}: {error.strerror}") from error
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    if not own:
        raise StorageError(
            f"{place} is not a folder that only user {os.getuid()} may read and write, so it is not used: "
            f"check its owner, remove it, or set another `memory: {{path: ...}}`"
        )
    return True


def read_whole(path: Path, limit: int) -> bytes:
    """Read a whole file. Raises MissingError, StorageError, or DamagedError if it is larger than ``limit`` bytes."""
    return LocalFiles(path.parent).read(path.name, limit)


def write_private(path: Path, temporary: Path, data: bytes) -> None:
    """Write a file that only this user may read, and rename it into place. Raises StorageError."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    try:
        with open(temporary, "wb", opener=opener) as file:
            file.write(data)
        temporary.rename(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


RECORD_LIMIT = 1 << 28  # largest record in bytes, like a part


class VersionRecord(Record, frozen=True, kw_only=True):
    """One rank's share of a version."""

    reader: Natural  # oldest reader version that can read it
    claim: Digest  # token of the claim of its epoch, which differs from that of a job on a copy of the store
    part: PartRecord  # as in a store; offsets count from the payload's beginning
    head: ManifestRecord | None = None  # rank 0's: manifest of a commit of it, without the group of its own segments
    replica: bool = False  # whether this is a replica that another node keeps of the rank

    def with_text(self) -> Self:
        return self.replace(part=self.part.with_text())

    @property
    def save(self) -> SaveId:
        """Name of the version, like that of a save."""
        return self.part.save


learn(VersionRecord)


def parse_record(data: bytes, what: str) -> VersionRecord:
    """Parse a record. Raises DamagedError or NewerFormatError, naming ``what``, unless it is whole and readable."""
    if from_bytes(ReaderRecord, data, what).reader > READER:
        raise NewerFormatError(f"{what} was written by a newer release; run `pip install --upgrade driftpoint`")
    record = from_bytes(VersionRecord, data, what)
    part, head = record.part, record.head
    if part.header_bytes:
        raise DamagedError(f"{what}: a payload in memory has no header")
    if head is not None and (head.store_id, head.save, head.world_size) != (part.store_id, part.save, part.world_size):
        raise DamagedError(f"{what}: its head is of another save than its part")
    return record
