"""Where two ``.pt`` files, or directories of them, differ: plain values and tensors, to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch


def read(path: Path) -> Any:
    """What a file of our own tests' making holds."""
    return torch.load(path, map_location="cpu", weights_only=False)


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Places at which two nests of values differ, in kind, dtype, shape or any bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if same_bits(one, other) else [f"{where}: tensors"]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if set(one) != set(other):
            return [f"{where}: keys {sorted(map(str, set(one) ^ set(other)))}"]
        return [found for key in one for found in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [f"{where}: {len(one)} and {len(other)} items"]
        return [
            found for i, pair in enumerate(zip(one, other, strict=True)) for found in differences(*pair, f"{where}/{i}")
        ]
    if type(one) is type(other) and hasattr(one, "__dict__") and not isinstance(one, type | Enum):
        return differences(vars(one), vars(other), where)
    return [] if type(one) is type(other) and one == other else [f"{where}: {one!r} is not {other!r}"]


def names(folder: Path) -> list[str]:
    """Files below a directory."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the last bit, in dtype and shape too."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    pair = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*pair)
