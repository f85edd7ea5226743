"""Writing a ``.pt`` file durably, and reading it back to see that it holds what was meant.

The file is read back with torch's restricted unpickler and an explicit list of classes, so a file that
passes holds only tensors, plain values and classes that whoever loads it has anyway. Tensors are compared by
hash. It does not know what the files mean.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import xxhash

from merger.tensors import memory_of
from store.errors import MergeError, StorageError


def write_pt(path: Path, make: Callable[[], Any], classes: Sequence[Any]) -> int:
    """Write what ``make`` returns to a new file and return its size in bytes; durable and checked on return.

    It is let go before the file is read back, so that a rank's state is in memory once. classes: what may occur
    in the file besides tensors and plain values. MergeError where the file read back holds something else,
    StorageError where the system refuses to write.
    """
    value = make()
    expected = fingerprint(value)
    _save(path, value)
    del value
    if fingerprint(read_pt(path, classes)) != expected:
        raise MergeError(
            f"{path} does not read back as it was written: the storage under it is not to be trusted; "
            "check `dmesg`, or name an output directory elsewhere"
        )
    return path.stat().st_size


def _save(path: Path, value: Any) -> None:
    try:
        if path.exists() or path.is_symlink():
            raise FileExistsError("the name is taken")
        # By its name, not as an open file: torch then writes several times as fast.
        torch.save(value, path)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError) as error:
        raise StorageError(f"cannot write {path}: {error}; free space or name another output directory") from error


def read_pt(path: Path, classes: Sequence[Any]) -> Any:
    """The content of a ``.pt`` file, tensors mapped, not loaded. MergeError where it holds other classes."""
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise MergeError(f"{path} cannot be read back: {error}") from error


def fingerprint(value: Any) -> str:
    """xxh3-128 over the structure, the plain values and the bytes of every tensor, as hex digits."""
    state = xxhash.xxh3_128()
    _feed(state, value)
    return state.hexdigest()


def _feed(state: xxhash.xxh3_128, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        state.update(f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
        state.update(memory_of(tensor.contiguous()))
    elif isinstance(value, Mapping):
        state.update(f"{type(value).__name__} {len(value)};".encode())
        for key, item in value.items():
            _feed(state, key)
            _feed(state, item)
    elif isinstance(value, set):
        state.update(f"set {sorted(map(repr, value))};".encode())
    elif isinstance(value, list | tuple):
        state.update(f"{type(value).__name__} {len(value)};".encode())
        for item in value:
            _feed(state, item)
    elif hasattr(value, "__dict__") and not isinstance(value, type | Enum):
        state.update(f"{type(value).__qualname__};".encode())
        _feed(state, vars(value))
    else:
        state.update(f"{type(value).__name__} {value!r};".encode())
