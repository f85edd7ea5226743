"""How wide the elements of each dtype are. Dtypes are named as in safetensors. Knows no values."""

from __future__ import annotations

from store.errors import DamagedError

_ITEMSIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
    "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


def known(dtype: str) -> bool:
    """Whether this release knows the dtype."""
    return dtype in _ITEMSIZE


def itemsize(dtype: str) -> int:
    """Bytes of one element; dtypes are named as in safetensors."""
    if dtype not in _ITEMSIZE:
        raise DamagedError(f"dtype {dtype!r} is unknown; known are {', '.join(_ITEMSIZE)}")
    return _ITEMSIZE[dtype]
