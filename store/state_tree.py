"""Encode run state as JSON plus tensors: a closed set of plain types, without pickle or code execution.

JSON values stand for themselves, other values are tagged: ``{"$": "tuple", "v": [...]}``. Arrays and tensors become
leaves, stored beside the tree as bytes; the caller converts its tensors to leaves.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from store.encoding import itemsize
from store.errors import DamagedError, UnsupportedError

_TAG = "$"
_DEEPEST = 100
"""Largest nesting that is written; far below the recursion limit of reading."""
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}


@dataclass(frozen=True)
class Leaf:
    """A tensor as bytes: C order, little-endian, dtype named as in safetensors; ``kind`` is its tag in the tree."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview
    kind: str = "tensor"


_Path = tuple["_Path | None", Any]
"""Path to a value: the path to its container, and its key or index there. Formatted only for messages."""

_JSON_TYPES = frozenset({type(None), bool, int, str})

ToLeaf = Callable[[Any], Leaf | None]
FromLeaf = Callable[[Leaf], Any]

_NUMPY_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "uint32": "U32", "uint64": "U64", "uint16": "U16",
}  # fmt: skip
_NUMPY_TYPES = {name: np.dtype(numpy_name) for numpy_name, name in _NUMPY_NAMES.items()}


def encode(value: Any, to_leaf: ToLeaf) -> tuple[Any, list[Leaf]]:
    """Return (JSON tree, leaves). Raises UnsupportedError, naming the path, for values that are not plain data."""
    leaves: list[Leaf] = []
    return _Encoder(to_leaf, leaves).encode(value, (None, "state")), leaves


def decode(tree: Any, leaves: Sequence[Leaf], from_leaf: FromLeaf) -> Any:
    """Return the value that :func:`encode` encoded. Raises DamagedError for an invalid tree."""
    try:
        return _decode(tree, leaves, from_leaf)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"run state cannot be read back: {error!r}") from error


@dataclass(frozen=True)
class _Encoder:
    to_leaf: ToLeaf
    leaves: list[Leaf]
    seen: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """Encoded values and their leaves by id, so that a tensor is stored once; holding the value keeps its id unique."""

    def encode(self, value: Any, path: _Path, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise UnsupportedError(
                f"{_format(path)[:80]}... is nested more than {_DEEPEST} levels deep, or contains itself"
            )
        if type(value) in _JSON_TYPES:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {_TAG: "float", "v": repr(value)}
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth + 1)
        if isinstance(value, list | tuple | set | frozenset):
            return self._sequence(value, path, depth + 1)
        if isinstance(value, bytes | bytearray):
            return {_TAG: "bytes", "v": base64.b64encode(value).decode()}
        return self._leaf(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: _Path, depth: int) -> Any:
        if all(type(key) is str and key != _TAG for key in value):
            return {key: self.encode(item, (path, key), depth) for key, item in value.items()}
        pairs = [
            [self.encode(key, (path, "key"), depth), self.encode(item, (path, key), depth)]
            for key, item in value.items()
        ]
        return {_TAG: "dict", "v": pairs}

    def _sequence(self, value: Any, path: _Path, depth: int) -> Any:
        # Sets have no order; by repr because their items need not be comparable.
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        encoded = [self.encode(item, (path, i), depth) for i, item in enumerate(items)]
        if isinstance(value, list):
            return encoded
        return {_TAG: next(tag for tag, kind in _SEQUENCES.items() if isinstance(value, kind)), "v": encoded}

    def _leaf(self, value: Any, path: _Path) -> Any:
        known = self.seen.get(id(value))
        if known is not None:
            return {_TAG: self.leaves[known[1]].kind, "v": known[1]}
        leaf = _numpy_leaf(value) if isinstance(value, np.ndarray | np.generic) else self.to_leaf(value)
        if leaf is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise UnsupportedError(
                f"{_format(path)} is a {kind}, which cannot be stored without "
                "pickling; keep it out of state_dict() or turn it into numbers, strings, lists, dicts or tensors"
            )
        self.seen[id(value)] = value, len(self.leaves)
        self.leaves.append(leaf)
        return {_TAG: leaf.kind, "v": len(self.leaves) - 1}


def _format(path: _Path) -> str:
    outer, name = path
    return str(name) if outer is None else f"{_format(outer)}[{name!r}]"


def _numpy_leaf(value: np.ndarray[Any, Any] | np.generic) -> Leaf | None:
    array = np.asarray(value)
    name = _NUMPY_NAMES.get(array.dtype.name)
    if name is None:
        return None
    kind = "ndarray" if isinstance(value, np.ndarray) else "numpy"
    little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    return Leaf(name, tuple(array.shape), little.tobytes(), kind)


def _decode(tree: Any, leaves: Sequence[Leaf], from_leaf: FromLeaf) -> Any:
    if isinstance(tree, list):
        return [_decode(item, leaves, from_leaf) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TAG not in tree:
        return {key: _decode(item, leaves, from_leaf) for key, item in tree.items()}
    return _decode_tagged(tree[_TAG], tree["v"], leaves, from_leaf)


def _decode_tagged(tag: str, value: Any, leaves: Sequence[Leaf], from_leaf: FromLeaf) -> Any:
    if type(tag) is str and tag in _SEQUENCES:
        return _SEQUENCES[tag](_decode(item, leaves, from_leaf) for item in value)
    if tag == "dict":
        return {_decode(key, leaves, from_leaf): _decode(item, leaves, from_leaf) for key, item in value}
    if tag == "float":
        return float(value)
    if tag == "bytes":
        return base64.b64decode(value, validate=True)
    return _decode_leaf(tag, leaves[_index(value, len(leaves))], from_leaf)


def _decode_leaf(tag: str, leaf: Leaf, from_leaf: FromLeaf) -> Any:
    if tag == "tensor":
        return from_leaf(leaf)
    array = np.frombuffer(leaf.data, dtype=_NUMPY_TYPES[leaf.dtype]).reshape(leaf.shape).copy()
    if tag == "ndarray":
        return array
    if tag == "numpy":
        return array[()]
    raise ValueError(f"unknown tag {tag!r}")


def _index(value: Any, count: int) -> int:
    if type(value) is not int or not 0 <= value < count:
        raise ValueError(f"leaf {value!r} of {count}")
    return value


def leaf_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size of a leaf in bytes."""
    size = _NUMPY_TYPES[dtype].itemsize if dtype in _NUMPY_TYPES else itemsize(dtype)
    return math.prod(shape) * size
