"""Define the records of format 1, and read and write them as checksummed JSON.

A file is ``{"body":<JSON>,"xxh3_128":"<32 hex digits>"}``. The checksum covers the exact bytes of the body, and the
bytes around it are fixed, so any flipped, missing or added byte is detected before the JSON is parsed.

Records are validated when read and when written, not when built. Unknown keys are ignored, so that a later release can
add some without a new format; a change that old readers must not ignore raises ``reader`` in STORE.json."""

import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Annotated, Any, Self, TypeVar

import msgspec
import xxhash
from msgspec import Meta, Raw, Struct

from store.errors import DamagedError
from store.names import Box, Fragment, SaveId, Unit

_HEAD = b'{"body":'
_MIDDLE = b',"xxh3_128":"'
_TAIL = b'"}\n'
_DIGEST_LENGTH = 32
_FIXED = len(_HEAD) + len(_MIDDLE) + _DIGEST_LENGTH + len(_TAIL)


_NEAR = 2e-6  # the interpreter cuts a switch interval to whole microseconds


class SharedSetting:
    """A number that is lowered while any thread asks for it. What a script sets meanwhile stays in effect."""

    def __init__(self, read: Callable[[], float], write: Callable[[float], object], wanted: float) -> None:
        self._read, self._write, self._wanted = read, write, wanted
        self._lock, self._depth = threading.RLock(), 0  # reentrant, because a finalizer may run while it is held
        self._usual = 0.0  # the one to restore; 0: none
        os.register_at_fork(after_in_child=self._forked)

    def begin(self) -> None:
        with self._lock:
            self._depth += 1
            if (now := self._read()) > self._wanted + _NEAR:
                self._usual = now
                self._write(self._wanted)

    def end(self) -> None:
        with self._lock:
            self._depth = max(0, self._depth - 1)
            if not self._depth and self._usual:
                if abs(self._read() - self._wanted) <= _NEAR:
                    self._write(self._usual)
                self._usual = 0.0

    def _forked(self) -> None:
        self._lock, self._depth = threading.RLock(), 0  # threads that had asked for it are not in this process
        self.end()


short_turns = SharedSetting(sys.getswitchinterval, lambda seconds: sys.setswitchinterval(seconds + 1e-7), 217e-6)
"""Seconds that a thread may keep the GIL while another one wants it. Training wants it after every operation of torch,
and would wait the usual 5 ms for each while a background thread runs Python."""

_no_gc = SharedSetting(lambda: gc.get_threshold()[0], lambda threshold: gc.set_threshold(int(threshold)), 0)
_FROZEN = gc.get_freeze_count()  # by Python 3.12 itself


@contextmanager
def without_gc(*, lasting: bool = False) -> Iterator[None]:
    """Pause the cyclic garbage collector while records of all tensors are made.

    It runs after some hundred allocations, in any thread; a save of many tensors makes it traverse all objects again
    and again while training waits for the GIL. lasting: whether most new objects live long and need no traversal."""
    try:
        _no_gc.begin()
        yield
    finally:
        if lasting and gc.get_freeze_count() <= _FROZEN:  # else the script froze its own
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        _no_gc.end()


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return the xxh3-128 of the bytes as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def as_json(value: Any) -> Any:
    """Return ``value`` as it comes back from a record; objects, infinities and NaN become strings."""
    spelled = {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}
    return json.loads(json.dumps(value, default=str), parse_constant=spelled.__getitem__)


def seal(body: Any) -> bytes:
    """Return the file content of a JSON value, with its keys in order. Raises ValueError for NaN and infinities."""
    return _framed(_text(body))


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True).encode()


def _framed(text: bytes) -> bytes:
    return _HEAD + text + _MIDDLE + digest(text).encode() + _TAIL


def sealed_text(data: bytes, what: str) -> bytes:
    """Return the JSON of a sealed record. Raises DamagedError, naming ``what``, unless every byte is right."""
    end = len(data) - len(_MIDDLE) - _DIGEST_LENGTH - len(_TAIL)
    text = data[len(_HEAD) : end]
    framed = (
        len(data) > _FIXED
        and data.startswith(_HEAD)
        and data[end : end + len(_MIDDLE)] == _MIDDLE
        and data.endswith(_TAIL)
    )
    if not framed or digest(text).encode() != data[end + len(_MIDDLE) : -len(_TAIL)]:
        raise DamagedError(f"{what} does not match its own checksum: it is damaged or was not written by driftpoint")
    return text


FORMAT = 1
READER = 6
"""Newest reader version. 2 knows ``differs`` of manifests, which version 1 would ignore and call exact; 3 knows the
encodings in :data:`READER_OF_ENCODING`; 4 knows fragments that are boxes, which others would take for flat ranges; 5
knows ``weights_only``, which others would resume; 6 knows bases that have a base themselves."""

READER_OF_ENCODING = {"int8-log2": 3, "int8-shared-exponent": 3}  # lowest reader version that knows it, if above 1
READER_OF_ENCODING |= {"int8-shared-exponent-128": 6, "int16-shared-exponent": 6}

Natural = Annotated[int, Meta(ge=0, lt=1 << 62)]
Positive = Annotated[int, Meta(ge=1)]
Ratio = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]

SaveName = Annotated[str, Meta(pattern=r"^([0-9]{8}|[1-9][0-9]{8,11})-([0-9]{6}|[1-9][0-9]{6,8})\Z")]
"""Canonical name of a save, which :meth:`SaveId.parse` accepts."""


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Base of all records. None refers to itself, so the garbage collector need not look at them."""

    def replace(self, **changes: Any) -> Self:
        return msgspec.structs.replace(self, **changes)

    def with_text(self) -> Self:
        """Return the record with fields of any JSON value as text, which refuses NaN and infinities."""
        return self


class ReaderRecord(Record, frozen=True, kw_only=True):
    """The field of a record to read first, because a later release may have changed the others."""

    reader: Natural = 0


class StoreRecord(Record, frozen=True, kw_only=True):
    """STORE.json. It has no defaults, so that no other record is valid as one."""

    format: Natural
    reader: Natural
    store_id: Digest


class IncarnationRecord(Record, frozen=True, kw_only=True):
    """The processes of a job from one start to their end, whatever epochs they claim; written by ``every: auto``."""

    token: Digest
    world_size: Positive
    began: str  # ISO 8601, compared only with commits of the same incarnation that have no `uptime`
    interruptions: Natural  # of the incarnations before this one
    rank_seconds: Ratio  # world size x seconds, summed over the incarnations before this one


class ClosedRecord(Record, frozen=True, kw_only=True):
    """The incarnation that owns an epoch ended cleanly after ``seconds``."""

    store_id: Digest
    epoch: Natural
    seconds: Ratio


class EpochRecord(Record, frozen=True, kw_only=True):
    """Owner of an epoch. ``token`` is random for each claim, so that ranks can check that they see the same store."""

    store_id: Digest
    epoch: Natural
    token: Digest
    host: str
    pid: Natural
    started: str  # wall-clock time in ISO 8601, for people; nothing is ordered by it
    incarnation: IncarnationRecord | None = None


class UnitPiece(Record, frozen=True, kw_only=True):
    """Base of records about a unit, or a piece of one."""

    layer: Name
    slot: Name

    @property
    def unit(self) -> Unit:
        return Unit(self.layer, self.slot)


class SavePiece(Record, frozen=True, kw_only=True):
    """Base of records of a save."""

    store_id: Digest
    step: Natural
    epoch: Natural

    @property
    def save(self) -> SaveId:
        return SaveId(self.step, self.epoch)


class Entry(UnitPiece, frozen=True, kw_only=True):
    """One stored fragment: a region of a (fqn, slot), as :class:`store.names.Fragment`, and the place of its bytes."""

    fqn: Name
    start: Natural
    numel: Natural
    box: Box | None = None
    dtype: Name  # of the values that were encoded
    encoding: Name
    packing: Name | None = None  # of the encoded bytes
    base: SaveName | None = None  # save whose encoded bytes of the same fragment these are packed as the difference to
    offset: Natural  # in bytes from the start of the payload's data, after the safetensors header
    nbytes: Natural
    xxh3_128: Digest  # hash of the stored bytes
    encoded_xxh3_128: Digest | None = None
    """Hash of the encoded bytes, if they are packed; it verifies unpacking and the base."""

    def __post_init__(self) -> None:
        if (box := self.box) is not None:
            box.check()
            if (box.start, box.numel) != (self.start, self.numel) or box.is_range:
                raise ValueError(f"{box} has other elements than its fragment, or is a flat range")

    @property
    def fragment(self) -> Fragment:
        return Fragment(self.fqn, self.slot, self.start, self.numel, self.box)

    @property
    def stop(self) -> int:
        return self.start + self.numel


class StateTensor(Record, frozen=True, kw_only=True):
    """One tensor of the run state, in the same payload."""

    dtype: Name
    shape: tuple[Natural, ...]
    offset: Natural
    nbytes: Natural
    xxh3_128: Digest


class MeasureRecord(UnitPiece, frozen=True, kw_only=True):
    """Measurements of one rank on its staged copy of a unit against the previous version; norms add up over ranks."""

    moved_sq: Ratio  # squared L2 norm of the movement
    reference_sq: Ratio  # both are 0 if there was no previous version or values are not finite
    finite: bool
    error_sq: Ratio = 0.0  # squared L2 norm of the encoding error
    decoded_sq: Ratio = 0.0  # both are 0 for lossless encodings
    bases: tuple[SaveName, ...] = ()  # saves that its fragments need, as differences to them or through their bases


class PartRecord(SavePiece, frozen=True, kw_only=True):
    """Contents of one rank's segment."""

    rank: Natural
    world_size: Positive
    plan: Digest  # digest of the decision that all ranks agreed on; parts of one group must carry the same
    payload_bytes: Natural
    header_bytes: Natural
    header_xxh3_128: Digest
    entries: tuple[Entry, ...]
    measures: tuple[MeasureRecord, ...] = ()
    run_state: Any
    run_tensors: tuple[StateTensor, ...]
    facts: dict[str, Any] = {}  # from rank 0: data of the framework's own checkpoint layout besides the fragments
    differs: tuple[str, ...] = ()  # state of this rank that does not come back as it was, as the job's self-check found

    def with_text(self) -> Self:
        return self.replace(run_state=Raw(_text(self.run_state)), facts=Raw(_text(self.facts)))


class TensorRecord(Record, frozen=True, kw_only=True):
    """One parameter or buffer of the model, whole."""

    layer: Name
    shape: tuple[Natural, ...]
    dtype: Name
    kind: Annotated[str, Meta(pattern=r"^(trainable|frozen|buffer)\Z")]
    aliases: tuple[Name, ...] = ()


class LayerRecord(Record, frozen=True, kw_only=True):
    """One layer, in model order. ``block``: whether it is one of the repeated blocks."""

    name: Name
    block: bool


class GroupRecord(Record, frozen=True, kw_only=True):
    """A segment group that the manifest needs. ``parts`` is the :func:`store.segment.parts_digest` of its files."""

    world_size: Positive
    payload_bytes: Natural
    parts: Digest


class UnitRecord(UnitPiece, frozen=True, kw_only=True):
    """The newest committed version of one (layer, slot)."""

    save: SaveName
    encoding: Name
    numel: Natural
    nbytes: Natural  # as stored
    drift: Ratio | None  # relative distance of the live state to it at the manifest; None if that was not finite
    staleness: Natural  # steps between version and manifest
    moving: bool
    error: Ratio = 0.0  # relative distance of the values to their decoded form, measured when they were stored
    bases: tuple[SaveName, ...] = ()  # saves that its fragments are stored as differences to
    reason: str = ""
    members: str = ""  # `members_digest` of the unit's tensors
    boxes: bool = False  # whether any of its fragments is a box

    @property
    def version(self) -> SaveId:
        return SaveId.parse(self.save)


class ManifestRecord(SavePiece, frozen=True, kw_only=True, dict=True, gc=True):
    """The commit."""

    commits: Natural  # number of commits of the store's history up to this one, over all epochs
    world_size: Positive
    framework: Name
    policy: Name
    created: str  # wall-clock time in ISO 8601, for people; nothing is ordered by it
    uptime: Ratio | None = None  # seconds since the job was attached, monotonic; null in imports and older commits
    previous: SaveName | None
    bytes_avoided: Natural  # bytes that a full save would have written in addition
    layers: tuple[LayerRecord, ...]
    tensors: dict[Name, TensorRecord]
    groups: dict[SaveName, GroupRecord]
    units: tuple[UnitRecord, ...]
    differs: tuple[str, ...] = ()
    """State that does not come back as it was, from the parts of all ranks. If not empty, nothing of it is exact."""
    weights_only: bool = False  # no optimizer state, no run state

    @cached_property
    def versions(self) -> Mapping[Unit, UnitRecord]:
        return {record.unit: record for record in self.units}

    @property
    def reader(self) -> int:
        """Lowest reader version that does not misread it."""
        units = ((unit.encoding, unit.boxes, len(unit.bases) > 1) for unit in self.units)
        known = (max(READER_OF_ENCODING.get(name, 1), 4 * boxes, 6 * chained) for name, boxes, chained in units)
        return max(1, 2 * bool(self.differs), 5 * self.weights_only, *known)

    @property
    def oldest(self) -> SaveId:
        """The oldest version of a unit that an optimizer updates. A snapshot that is newer is not superseded."""
        return min((unit.version for unit in self.units if unit.moving), default=self.save)


class ProvenRecord(Record, frozen=True, kw_only=True):
    """The manifest was resumed from in ``by_epoch``, and an optimizer step succeeded."""

    store_id: Digest
    save: SaveName
    by_epoch: Natural


class SuspectRecord(Record, frozen=True, kw_only=True):
    """Jobs that resumed from the manifest died before they committed. ``why``: the cause, for people."""

    store_id: Digest
    save: SaveName
    why: Name


_R = TypeVar("_R", bound=Record)


def learn(*kinds: Any) -> None:
    """Have msgspec look at kinds of records: where two threads are the first to parse one, the process may crash."""
    for kind in kinds:
        msgspec.json.Decoder(kind)


learn(*Record.__subclasses__(), *SavePiece.__subclasses__(), *UnitPiece.__subclasses__())


def to_bytes(record: Record) -> bytes:
    """Return the sealed file content of a record. Raises ValueError unless it can be read again."""
    text = _encoded(record)
    try:
        _decoded(type(record), text, "it")
    except msgspec.ValidationError as error:
        raise ValueError(f"not a valid {type(record).__name__}: {error}") from error
    return _framed(text)


def _encoded(record: Record) -> bytes:
    with suppress(UnicodeEncodeError):  # half of a surrogate pair
        text = msgspec.json.encode(record.with_text(), enc_hook=_plain)
        if text.isascii():
            return text
    return _text(msgspec.to_builtins(record, enc_hook=_plain))


def _plain(value: Any) -> str | float:
    return str(value) if isinstance(value, str) else float(value)  # of a subclass, such as numpy's float64


def from_bytes(kind: type[_R], data: bytes, what: str) -> _R:
    """Parse a record from sealed bytes. Raises DamagedError, naming ``what``, unless all of it is valid."""
    try:
        return _decoded(kind, sealed_text(data, what), what)
    except msgspec.ValidationError as error:
        raise DamagedError(f"{what} is no {kind.__name__}: {error}") from error


def _decoded(kind: type[_R], text: bytes, what: str) -> _R:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError, ValueError):  # such as an escape of half of a surrogate pair
        try:
            return msgspec.convert(json.loads(text), kind)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{what} is not JSON that can be read: {error}") from error


def members_digest(members: Mapping[str, tuple[int, str]]) -> str:
    """Return the digest of ``{fqn: (elements over all ranks, dtype)}``, in any order.

    Versions of a unit are comparable only if it is equal: the number of elements does not show swapped tensors."""
    return digest(seal(sorted([fqn, numel, dtype] for fqn, (numel, dtype) in members.items())))


def members_of(entries: Iterable[Entry]) -> dict[str, tuple[int, str]]:
    """Return the members of a unit from its stored fragments."""
    members: dict[str, tuple[int, str]] = {}
    for entry in entries:
        numel, dtype = members.get(entry.fqn, (0, entry.dtype))
        members[entry.fqn] = (numel + entry.numel, dtype if dtype == entry.dtype else "mixed")
    return members
