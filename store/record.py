"""Self-checksummed JSON records: ``{"body":<JSON>,"xxh3_128":"<32 hex digits>"}``.

The checksum covers the body's bytes exactly as they stand, and the bytes around it are fixed, so any flipped,
missing or added byte is found before a value is looked at. Nothing but JSON is ever parsed.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

from store.errors import DamagedError

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
