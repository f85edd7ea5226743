"""Records of format 1; checksummed JSON; member digests.

Self-checksummed JSON records: ``{"body":<JSON>,"xxh3_128":"<32 hex digits>"}``.

The checksum covers the body's bytes exactly as they stand, and the bytes around it are fixed, so any flipped,
missing or added byte is found before a value is looked at. Nothing but JSON is ever parsed.

The records of format 1, as frozen models: what their JSON must look like to be believed.

Validated when read and when built. Unknown keys are ignored on reading, so that a later release may add some
without a new format; a change that an old reader must not overlook raises ``reader`` in STORE.json instead.

Which tensors a unit is made of, as one digest: two versions of a unit are comparable only where it is equal.

The number of elements is not enough: two tensors of equal size may have changed places.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from store.errors import DamagedError
from store.names import Fragment, SaveId, Unit

_HEAD = b'{"body":'
_MIDDLE = b',"xxh3_128":"'
_TAIL = b'"}\n'
_DIGEST_LENGTH = 32
_FIXED = len(_HEAD) + len(_MIDDLE) + _DIGEST_LENGTH + len(_TAIL)


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128 of the bytes, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def as_json(value: Any) -> Any:
    """``value`` as it comes back from a record; what JSON cannot say (objects, infinities, NaN) becomes a string."""
    return json.loads(json.dumps(value, default=str), parse_constant=_SPELLED.__getitem__)


_SPELLED = {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}


def seal(body: Any) -> bytes:
    """The file content for a JSON value, its keys in the order given. ValueError for NaN or infinity: JSON has none."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False, ensure_ascii=True).encode()
    return _HEAD + text + _MIDDLE + digest(text).encode() + _TAIL


def unseal(data: bytes, what: str) -> Any:
    """The JSON value in a sealed record. DamagedError, naming ``what``, unless every byte is right."""
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
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{what} is not JSON that can be read: {error}") from error


FORMAT = 1

Natural = Annotated[int, Field(ge=0, lt=1 << 62)]
Ratio = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


def _save_name(name: str) -> str:
    return SaveId.parse(name).name


SaveName = Annotated[str, AfterValidator(_save_name)]
"""Canonical, so that whoever holds a record may parse it without fear."""


class Record(BaseModel):
    """Base of all records."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class StoreRecord(Record):
    """STORE.json. No defaults: no other record must pass for it."""

    format: Natural
    reader: Natural
    store_id: Digest


class IncarnationRecord(Record):
    """The processes of a job from one start to their end, whatever epochs they claim; written by ``every: auto``.

    interruptions, rank_seconds: of the incarnations before this one; rank_seconds is world size x seconds."""

    token: Digest
    world_size: Annotated[int, Field(ge=1)]
    began: str
    """Wall-clock time in ISO 8601. Only ever compared with what the same incarnation wrote."""
    interruptions: Natural
    rank_seconds: Ratio


class ClosedRecord(Record):
    """The incarnation that owns an epoch came to its end as it was meant to, after so many seconds."""

    store_id: Digest
    epoch: Natural
    seconds: Ratio


class EpochRecord(Record):
    """Who owns an epoch. ``token`` is drawn for each claim: a rank that reads the same one is on the same disk."""

    store_id: Digest
    epoch: Natural
    token: Digest
    host: str
    pid: Natural
    started: str
    """Wall-clock time in ISO 8601, for people; nothing is ordered by it."""
    incarnation: IncarnationRecord | None = None


class Entry(Record):
    """One stored fragment: elements [start, start + numel) of the flattened (fqn, slot), and where its bytes are.

    Its values, of ``dtype``, were encoded, and where ``packing`` is named the encoded bytes then packed: by
    themselves, or as the difference to those of the same fragment in the save ``base``.
    """

    layer: Name
    slot: Name
    fqn: Name
    start: Natural
    numel: Natural
    dtype: Name
    encoding: Name
    packing: Name | None = None
    base: SaveName | None = None
    offset: Natural
    """In bytes from the start of the payload's data, after the safetensors header."""
    nbytes: Natural
    xxh3_128: Digest
    """Of the bytes as they are stored."""
    encoded_xxh3_128: Digest | None = None
    """Of the encoded bytes, where they are packed: unpacking, and the base, are proved right by it."""

    @property
    def unit(self) -> Unit:
        return Unit(self.layer, self.slot)

    @property
    def fragment(self) -> Fragment:
        return Fragment(self.fqn, self.slot, self.start, self.numel)

    @property
    def stop(self) -> int:
        return self.start + self.numel


class StateTensor(Record):
    """One tensor of the run state, in the same payload."""

    dtype: Name
    shape: tuple[Natural, ...]
    offset: Natural
    nbytes: Natural
    xxh3_128: Digest


class MeasureRecord(Record):
    """What one rank measured on its staged copy of a unit, against the version before.

    moved_sq, reference_sq: squared L2 norms of the movement and of the reference; both 0 where there was no
    version before or where values are not finite. error_sq, decoded_sq: squared L2 norms of what the encoding lost
    and of what decoding gives; both 0 for lossless ones. They add up over ranks."""

    layer: Name
    slot: Name
    moved_sq: Ratio
    reference_sq: Ratio
    finite: bool
    error_sq: Ratio = 0.0
    decoded_sq: Ratio = 0.0

    @property
    def unit(self) -> Unit:
        return Unit(self.layer, self.slot)


class PartRecord(Record):
    """What one rank wrote in one save."""

    store_id: Digest
    step: Natural
    epoch: Natural
    rank: Natural
    world_size: Annotated[int, Field(ge=1)]
    plan: Digest
    """Digest of the decision that all ranks agreed on; parts of one group must carry the same."""
    payload_bytes: Natural
    header_bytes: Natural
    header_xxh3_128: Digest
    entries: tuple[Entry, ...]
    measures: tuple[MeasureRecord, ...] = ()
    run_state: Any
    run_tensors: tuple[StateTensor, ...]
    facts: dict[str, Any] = {}
    """From rank 0: what the framework's own checkpoint layout needs besides the fragments."""

    @property
    def save(self) -> SaveId:
        return SaveId(self.step, self.epoch)


class TensorRecord(Record):
    """One parameter or buffer of the model, whole."""

    layer: Name
    shape: tuple[Natural, ...]
    dtype: Name
    kind: Annotated[str, StringConstraints(pattern=r"^(trainable|frozen|buffer)$")]
    aliases: tuple[Name, ...] = ()


class LayerRecord(Record):
    """One layer, in model order. ``block``: one of the repeated blocks."""

    name: Name
    block: bool


class GroupRecord(Record):
    """A segment group that the manifest reaches. ``parts`` is :func:`parts_digest` of its parts' files."""

    world_size: Annotated[int, Field(ge=1)]
    payload_bytes: Natural
    parts: Digest


class UnitRecord(Record):
    """The newest committed version of one (layer, slot).

    drift: relative distance of the live state to this version when the manifest was written; None where it
    could not be measured (the live values were not finite). staleness: steps between version and manifest.
    error: relative distance of what was to be stored to what decoding gives, as measured when it was stored.
    nbytes: as stored. bases: the saves that its fragments are stored as differences to.
    """

    layer: Name
    slot: Name
    save: SaveName
    encoding: Name
    numel: Natural
    nbytes: Natural
    drift: Ratio | None
    staleness: Natural
    moving: bool
    error: Ratio = 0.0
    bases: tuple[SaveName, ...] = ()
    reason: str = ""
    members: str = ""
    """:func:`store.schema.members_digest` of what the unit was made of."""

    @property
    def unit(self) -> Unit:
        return Unit(self.layer, self.slot)

    @property
    def version(self) -> SaveId:
        return SaveId.parse(self.save)


class ManifestRecord(Record):
    """The commit."""

    store_id: Digest
    step: Natural
    epoch: Natural
    commits: Natural
    """How many commits this one makes since the store began, over all epochs of its history."""
    world_size: Annotated[int, Field(ge=1)]
    framework: Name
    policy: Name
    created: str
    """Wall-clock time in ISO 8601, for people; nothing is ordered by it."""
    previous: SaveName | None
    bytes_avoided: Natural
    """Bytes that a full save would have written and this one did not."""
    layers: tuple[LayerRecord, ...]
    tensors: dict[Name, TensorRecord]
    groups: dict[SaveName, GroupRecord]
    units: tuple[UnitRecord, ...]

    @property
    def save(self) -> SaveId:
        return SaveId(self.step, self.epoch)


class ProvenRecord(Record):
    """The manifest was resumed from in ``by_epoch``, and an optimizer step succeeded."""

    store_id: Digest
    save: SaveName
    by_epoch: Natural


class SuspectRecord(Record):
    """Jobs that resumed from the manifest died before they committed anything. why: of what, for people."""

    store_id: Digest
    save: SaveName
    why: Name


_R = TypeVar("_R", bound=Record)


def to_bytes(record: Record) -> bytes:
    """The sealed file content of a record."""
    return seal(record.model_dump(mode="json"))


def from_bytes(kind: type[_R], data: bytes, what: str) -> _R:
    """The record in sealed bytes. DamagedError, naming ``what``, unless all of it is valid."""
    try:
        return kind.model_validate(unseal(data, what), strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise DamagedError(f"{what} is no {kind.__name__}: {where}: {first['msg']}") from error


def members_digest(members: Mapping[str, tuple[int, str]]) -> str:
    """Digest of ``{fqn: (elements over all ranks, dtype)}``, in any order."""
    return digest(seal(sorted([fqn, numel, dtype] for fqn, (numel, dtype) in members.items())))


def members_of(entries: Iterable[Entry]) -> dict[str, tuple[int, str]]:
    """The members that stored fragments of one unit make up."""
    members: dict[str, tuple[int, str]] = {}
    for entry in entries:
        numel, dtype = members.get(entry.fqn, (0, entry.dtype))
        members[entry.fqn] = (numel + entry.numel, dtype if dtype == entry.dtype else "mixed")
    return members
