"""How the values of a fragment become bytes: a registry of named encodings, defined in numpy terms.

For now ``raw`` alone: the little-endian bytes as they are. Names that are not registered are refused when a
decision is made and again when a part is read, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

from store.errors import DamagedError
from store.names import RAW


@dataclass(frozen=True)
class Encoding:
    """One way to store a slot. ``lossless``: decoding gives the very same bits."""

    name: str
    lossless: bool

    def stored_bytes(self, numel: int, dtype: str) -> int:
        """Bytes that ``numel`` elements of ``dtype`` take when stored, known before encoding."""
        return numel * itemsize(dtype)


ENCODINGS = {RAW: Encoding(RAW, lossless=True)}

_ITEMSIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
    "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


def encoding_named(name: str) -> Encoding:
    """The registered encoding. DamagedError where this release knows none of that name."""
    if name not in ENCODINGS:
        raise DamagedError(f"encoding {name!r} is unknown to this release, which knows {', '.join(sorted(ENCODINGS))}")
    return ENCODINGS[name]


def itemsize(dtype: str) -> int:
    """Bytes of one element; dtypes are named as in safetensors."""
    if dtype not in _ITEMSIZE:
        raise DamagedError(f"dtype {dtype!r} is unknown; known are {', '.join(_ITEMSIZE)}")
    return _ITEMSIZE[dtype]
