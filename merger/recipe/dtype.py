"""Dtypes as people write them, in MergeKit's files and in torch: to the names that safetensors has."""

from __future__ import annotations

from store.errors import UsageError

_NAMES = {
    "float32": "F32", "float": "F32", "fp32": "F32", "f32": "F32",
    "bfloat16": "BF16", "bf16": "BF16",
    "float16": "F16", "half": "F16", "fp16": "F16", "f16": "F16",
}  # fmt: skip


def dtype_named(text: str) -> str:
    """The safetensors name. UsageError for one that weights are not exported in."""
    found = _NAMES.get(text.lower().removeprefix("torch."))
    if found is None:
        raise UsageError(f"dtype {text!r} is not known; there are float32, bfloat16 and float16")
    return found
