"""The dtypes of torch by the names that safetensors gives them (``F32``, ``BF16``, ...).

A pure table, in both directions. It does not know which dtypes an encoding can handle.
"""

from __future__ import annotations

import torch

from store.errors import UnsupportedError

_TORCH_OF: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAME_OF: dict[torch.dtype, str] = {dtype: name for name, dtype in _TORCH_OF.items()}


def dtype_name(dtype: torch.dtype, what: str = "a tensor") -> str:
    """The safetensors name of a torch dtype. Raises UnsupportedError, saying ``what`` is of it, for one that
    safetensors cannot hold."""
    name = _NAME_OF.get(dtype)
    if name is None:
        raise UnsupportedError(f"{what} is of {dtype}, which cannot be saved; supported: {', '.join(_TORCH_OF)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of :func:`dtype_name`. Raises UnsupportedError for an unknown name."""
    dtype = _TORCH_OF.get(name)
    if dtype is None:
        raise UnsupportedError(f"unknown dtype {name!r} in a store; supported: {', '.join(_TORCH_OF)}")
    return dtype
