"""One rank's share of a version in memory, written into the store as a segment like any other.

Bytes are read out of shared memory piece by piece into one small buffer, and their hashes are compared with those in
the record of the version before the payload gets its name. They are read, not mapped: whoever shrinks a payload that is
mapped elsewhere kills its reader. A rescue that was killed may have left some of it: what stands and says the same is
taken as it is.

Only for the holder of the rescue lock, and only for jobs whose processes are dead: what stands under the save's name
and says something else is what they left of a save that never came about, and is removed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from store.durable import is_temporary
from store.errors import DamagedError, MissingError, StorageError
from store.files import Files
from store.layout import part_path, payload_path, segment_dir
from store.memory.version import MemoryVersion
from store.names import SaveId
from store.schema import Entry, PartRecord, StateTensor
from store.segments import SegmentDraft, StagedFragment, check_payload_size, read_part, write_segment

_PIECE = 1 << 22


@dataclass(frozen=True)
class _Source:
    """A rank's payload in memory. checked: called between pieces; what it raises ends the write."""

    path: Path
    checked: Callable[[], None]

    def pieces(self, offset: int, nbytes: int, expected: str) -> Iterator[memoryview]:
        """Bytes of the payload. DamagedError, after the last piece, where they do not match their hash."""
        state, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(nbytes, _PIECE)))
        descriptor = _opened(self.path)
        try:
            end = offset + nbytes
            while offset < end:
                self.checked()
                piece = buffer[: end - offset]
                self._fill(descriptor, offset, piece)
                state.update(piece)
                offset += len(piece)
                yield piece
        finally:
            os.close(descriptor)
        if state.hexdigest() != expected:
            raise DamagedError(f"{self.path}: {nbytes} bytes before {end} do not match the hash in their record")

    def _fill(self, descriptor: int, offset: int, target: memoryview) -> None:
        while len(target):
            try:
                got = os.preadv(descriptor, [target], offset)
            except OSError as error:
                raise StorageError(f"cannot read {self.path}: {error.strerror}") from error
            if got == 0:
                raise DamagedError(f"{self.path} ends at byte {offset}")
            target, offset = target[got:], offset + got


@dataclass(frozen=True)
class _Bytes:
    """A :class:`store.payload.Produced` of a stored piece of memory."""

    source: _Source
    piece: Entry | StateTensor

    @property
    def nbytes(self) -> int:
        return self.piece.nbytes

    @property
    def exact(self) -> bool:
        return True

    def pieces(self) -> Iterator[memoryview]:
        return self.source.pieces(self.piece.offset, self.piece.nbytes, self.piece.xxh3_128)


@dataclass(frozen=True)
class _Tensor:
    """A :class:`store.segments.RunTensor` that lies in memory."""

    dtype: str
    shape: tuple[int, ...]
    data: _Bytes


def write_share(files: Files, version: MemoryVersion, rank: int, checked: Callable[[], None]) -> None:
    """Have the segment of ``rank`` in the store, durable. DamagedError where memory is not what its record says.

    checked: called between pieces of a few megabytes; what it raises ends the write."""
    part = version.records[rank]
    if _stands(files, part):
        return
    remove_share(files, version.save, rank)
    payload = version.payloads.get(rank)
    if payload is None:
        raise StorageError(f"rank {rank}'s memory is not on this node")
    source = _Source(payload, checked)
    draft = SegmentDraft(
        store_id=part.store_id,
        save=part.save,
        rank=rank,
        world_size=part.world_size,
        plan=part.plan,
        fragments=[_fragment(source, entry) for entry in part.entries],
        run_state=part.run_state,
        run_leaves=[_Tensor(one.dtype, one.shape, _Bytes(source, one)) for one in part.run_tensors],
        facts=part.facts,
    )
    write_segment(files, draft, lambda: part.measures)


def remove_share(files: Files, save: SaveId, rank: int) -> None:
    """Remove a rank's segment of a save that nothing points to; whole, or what there is of it."""
    for path in (part_path(save, rank), payload_path(save, rank)):  # a part must not outlive its payload
        with suppress(MissingError):
            files.unlink(path)


def remove_rest(files: Files, save: SaveId) -> None:
    """Remove what a killed write left in the group, and the group where nothing is in it any more."""
    folder = segment_dir(save)
    with suppress(MissingError):
        for name in files.list_dir(folder):
            if is_temporary(name):
                with suppress(MissingError):
                    files.unlink(f"{folder}/{name}")
        if not files.list_dir(folder):
            files.remove_dir(folder)


def _stands(files: Files, part: PartRecord) -> bool:
    """Whether the rank's segment is there as this version's."""
    try:
        found = read_part(files, part.store_id, part.save, part.rank)
        check_payload_size(files, found)
    except (MissingError, DamagedError):
        return False
    return _said(found) == _said(part)


def _said(part: PartRecord) -> PartRecord:
    """What a part says, but for where things lie in the payload."""
    return part.model_copy(
        update={
            "payload_bytes": 0,
            "header_bytes": 0,
            "header_xxh3_128": "",
            "entries": tuple(one.model_copy(update={"offset": 0}) for one in part.entries),
            "run_tensors": tuple(one.model_copy(update={"offset": 0}) for one in part.run_tensors),
        }
    )


def _fragment(source: _Source, entry: Entry) -> StagedFragment:
    return StagedFragment(
        layer=entry.layer,
        slot=entry.slot,
        fqn=entry.fqn,
        start=entry.start,
        numel=entry.numel,
        dtype=entry.dtype,
        encoding=entry.encoding,
        data=_Bytes(source, entry),
    )


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror}") from error
