"""Encode run state as JSON plus tensors: a closed set of plain types, without pickle or code execution.

JSON values stand for themselves, other values are tagged: ``{"$": "tuple", "v": [...]}``. Arrays and tensors become
leaves, stored beside the tree as bytes; the caller converts its tensors to leaves. Every value comes back in its own
type. Other types are refused, subclasses of plain types too: a reader imports nothing, so it could not rebuild them."""

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from store.encoding.base import DTYPES, itemsize
from store.errors import DamagedError, UnsupportedError

_TAG = "$"
_LIKE = ("", "grad", "parameter", "parameter grad")
_DEEPEST = 100  # largest nesting that is written; far below the recursion limit of reading
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter, "defaultdict": defaultdict}
_BYTES: dict[str, type] = {"bytes": bytes, "bytearray": bytearray}
_TAG_OF: dict[type, str] = {list: "list", **{kind: tag for tag, kind in (_SEQUENCES | _MAPPINGS | _BYTES).items()}}
CONTAINERS = frozenset(_TAG_OF)  # types that hold others, and bytes. Their subclasses are not encoded
PACKED: Final = "tensor of"
"""Key of (module, class) in the mapping that stands for a tensor made of others in an optimizer's state."""
_FACTORIES = {kind.__name__: kind for kind in (int, float, bool, str, bytes, list, dict, set, tuple)}
"""Values of a defaultdict's ``default_factory``; others, functions above all, cannot be stored."""
_METADATA = "_metadata"  # set by `torch.nn.Module.state_dict()` on its OrderedDict: the versions of the modules


@dataclass(frozen=True)
class Leaf:
    """A tensor as bytes: C order, little-endian, dtype named as in safetensors; ``kind`` is its tag in the tree."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview
    kind: str = "tensor"  # ``tensor``, ``size`` (a shape, as its numbers), ``dtype`` (a name), ``ndarray`` or ``numpy``
    like: str = ""  # of a tensor: ``grad`` if it requires gradients, ``parameter`` if it is one, or both
    order: tuple[int, ...] = ()  # of a tensor: its dimensions as they lie in memory, outermost first; (): as they are


_Path = tuple["_Path | None", Any]  # the path to the container, and the key or index there. Formatted only for messages

_JSON_TYPES = frozenset({type(None), bool, int, str})
_SUBCLASSED = (dict, list, tuple, set, frozenset, str, int, float, bytes)
"""Types whose subclasses (named tuples, enumerations) are refused with the way to convert them."""

ToLeaf = Callable[[Any], Leaf | None]
FromLeaf = Callable[[Leaf], Any]

_NUMPY_NAMES = {in_numpy: name for name, (in_numpy, _) in DTYPES.items() if not name.startswith(("BF", "F8", "C"))}
_NUMPY_TYPES = {name: np.dtype(numpy_name) for numpy_name, name in _NUMPY_NAMES.items()}


def encode(value: Any, to_leaf: ToLeaf) -> tuple[Any, list[Leaf]]:
    """Return (JSON tree, leaves). Raises UnsupportedError, naming the path, for values that are not plain data."""
    encoder = Encoder(to_leaf)
    return encoder.encode(value), encoder.leaves


def join_stages(tree: dict[str, Any], tree_of: Callable[[int], Any]) -> dict[str, Any]:
    """Merge the run states of all pipeline stages: one optimizer, and the extra state of all modules.

    tree_of: returns the run state of a stage by its leading rank. Raises DamagedError if one is missing."""
    framework = tree.get("framework")
    leaders = framework.get("stages") if isinstance(framework, dict) else None
    if not leaders:
        return tree
    try:
        trees = [tree_of(leader) for leader in leaders]
        stages = [one["framework"] for one in trees]
        whole = {key: value for key, value in stages[0].items() if key != "stages"}
        for key in ("scalars", "slots", "strides", "on_mesh"):
            pairs = [(fqn, value) for stage in stages for fqn, value in stage.get(key, {}).items()]
            whole[key] = {**dict(pairs), **{fqn: value for fqn, value in pairs if value}}  # a stage may have none of it
        whole["shared"] = [places for stage in stages for places in stage.get("shared", ())]
        members = list(
            dict.fromkeys(one for stage in sorted(map(_members, stages), key=len, reverse=True) for one in stage)
        )
        groups, taken = list[Any](), set[str]()
        for stage in stages:
            free, own = groups[:], _members(stage)  # a merged group takes at most one group of each stage
            for group in stage["param_groups"]:
                hyper, member = _plain(group["hyper"]), members.index(own[group.get("member", 0)])
                equal = (i for i, one in enumerate(free) if one["member"] == member and _plain(one["hyper"]) == hyper)
                index = next(equal, None)
                if index is None:
                    groups.append({**group, "member": member, "params": []})
                into = groups[-1] if index is None else free.pop(index)
                into["params"] += [fqn for fqn in group["params"] if fqn not in taken]
                taken.update(group["params"])
        modules = {name: state for one in (*trees, tree) for name, state in (one.get("modules") or {}).items()}
        whole |= {"optimizer": " + ".join(kind for kind, _ in members), "param_groups": groups}
        return {**tree, "framework": whole, **({"modules": modules} if modules else {})}
    except (AttributeError, LookupError, TypeError) as error:
        raise DamagedError(f"the run state of a pipeline stage is missing or has a wrong form: {error!r}") from error


def _members(stage: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the class of each optimizer of a stage, and how many of that class come before."""
    kinds = str(stage["optimizer"]).split(" + ")
    return [(kind, kinds[:number].count(kind)) for number, kind in enumerate(kinds)]


def _plain(hyper: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.tolist() if hasattr(value, "tolist") else value for key, value in hyper.items()}


def decode(tree: Any, leaves: Sequence[Leaf], from_leaf: FromLeaf) -> Any:
    """Return the value that :func:`encode` encoded. Raises DamagedError for an invalid tree."""
    try:
        return _decode(tree, leaves, from_leaf)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise DamagedError(f"run state cannot be read back: {error!r}") from error


@dataclass(frozen=True)
class Encoder:
    """Encodes several values into one list of leaves. See :func:`encode`."""

    to_leaf: ToLeaf
    leaves: list[Leaf] = field(default_factory=list)
    seen: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """Encoded values and their leaves by id, so that a tensor is stored once; holding the value keeps its id unique."""

    def encode(self, value: Any, path: _Path = (None, "state"), depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise UnsupportedError(f"{_format(path)[:80]}... is nested over {_DEEPEST} levels deep, or contains itself")
        if type(value) in _JSON_TYPES:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {_TAG: "float", "v": repr(value)}
        tag = _TAG_OF.get(type(value))
        if tag in _MAPPINGS:
            return self._mapping(tag, value, path, depth + 1)
        if tag == "list" or tag in _SEQUENCES:
            return self._sequence(tag, value, path, depth + 1)
        return {_TAG: tag, "v": base64.b64encode(value).decode()} if tag in _BYTES else self._leaf(value, path)

    def _mapping(self, tag: str, value: dict[Any, Any], path: _Path, depth: int) -> Any:
        if tag == "dict" and all(type(key) is str and key != _TAG for key in value):
            return {key: self.encode(item, (path, key), depth) for key, item in value.items()}
        pairs = [[self.encode(k, (path, "key"), depth), self.encode(v, (path, k), depth)] for k, v in value.items()]
        tree: dict[str, Any] = {_TAG: tag, "v": pairs}
        if isinstance(value, defaultdict):
            tree["factory"] = self._factory(value, path)
        if tag == "OrderedDict" and hasattr(value, _METADATA):
            tree["metadata"] = self.encode(getattr(value, _METADATA), (path, _METADATA), depth)
        return tree

    def _factory(self, value: defaultdict[Any, Any], path: _Path) -> str | None:
        factory: Any = value.default_factory
        if factory is None:
            return None
        name = getattr(factory, "__name__", repr(factory))
        if _FACTORIES.get(name) is not factory:
            raise UnsupportedError(
                f"{_format(path)} is a defaultdict with the factory {name}, which cannot be stored without pickling; "
                f"use one of {', '.join(_FACTORIES)}, or turn it into a dict"
            )
        return str(name)

    def _sequence(self, tag: str, value: Iterable[Any], path: _Path, depth: int) -> Any:
        # Sets have no order; by repr because their items need not be comparable.
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        encoded = [self.encode(item, (path, i), depth) for i, item in enumerate(items)]
        if tag == "list":
            return encoded
        tree: dict[str, Any] = {_TAG: tag, "v": encoded}
        if isinstance(value, deque):
            tree["maxlen"] = value.maxlen
        return tree

    def _leaf(self, value: Any, path: _Path) -> Any:
        known = self.seen.get(id(value))
        if known is not None:
            leaf = self.leaves[known[1]]
            more = {"like": leaf.like, "order": list(leaf.order)}
            return {_TAG: leaf.kind, "v": known[1], **{key: item for key, item in more.items() if item}}
        numpy = type(value) is np.ndarray or isinstance(value, np.generic)
        made = _numpy_leaf(value) if numpy else self.to_leaf(value)
        if made is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            plain = next((base.__name__ for base in _SUBCLASSED if isinstance(value, base)), None)
            advice = (
                f"convert it with {plain}(...) in state_dict(), and back in load_state_dict()"
                if plain
                else "keep it out of state_dict() or turn it into numbers, strings, lists, dicts or tensors"
            )
            raise UnsupportedError(f"{_format(path)} is a {kind}, which cannot be stored without pickling; {advice}")
        self.seen[id(value)] = value, len(self.leaves)
        self.leaves.append(made)
        return self._leaf(value, path)


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
    return _decode_tagged(tree, lambda part: _decode(part, leaves, from_leaf), leaves, from_leaf)


def _decode_tagged(
    tree: dict[str, Any], inner: Callable[[Any], Any], leaves: Sequence[Leaf], from_leaf: FromLeaf
) -> Any:
    tag, value = tree[_TAG], tree["v"]
    if type(tag) is not str:
        raise ValueError(f"unknown tag {tag!r}")
    if tag == "deque":
        return deque(map(inner, value), tree["maxlen"])
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](map(inner, value))
    if tag in _MAPPINGS:
        return _decode_mapping(tree, {inner(key): inner(item) for key, item in value}, inner)
    if tag == "float":
        return float(value)
    if tag in _BYTES:
        return _BYTES[tag](base64.b64decode(value, validate=True))
    like = tree.get("like", "")
    if like not in _LIKE:
        raise ValueError(f"unknown kind of tensor {like!r}")
    if type(value) is not int or not 0 <= value < len(leaves):
        raise ValueError(f"leaf {value!r} of {len(leaves)}")
    leaf = replace(leaves[value], kind=tag, like=like, order=tuple(tree.get("order", ())))
    if leaf.order and sorted(leaf.order) != list(range(len(leaf.shape))):
        raise ValueError(f"the order {leaf.order} of {len(leaf.shape)} dimensions")
    return _decode_leaf(leaf, from_leaf)


def _decode_mapping(tree: dict[str, Any], items: dict[Any, Any], inner: Callable[[Any], Any]) -> Any:
    tag = tree[_TAG]
    if tag == "dict":
        return items
    if tag == "defaultdict":
        return defaultdict(None if tree["factory"] is None else _FACTORIES[tree["factory"]], items)
    decoded = _MAPPINGS[tag](items)
    if "metadata" in tree:
        setattr(decoded, _METADATA, inner(tree["metadata"]))
    return decoded


def _decode_leaf(leaf: Leaf, from_leaf: FromLeaf) -> Any:
    if leaf.kind in ("tensor", "size", "dtype"):
        return from_leaf(leaf)
    array = np.frombuffer(leaf.data, dtype=_NUMPY_TYPES[leaf.dtype]).reshape(leaf.shape).copy()
    if leaf.kind == "ndarray":
        return array
    if leaf.kind == "numpy":
        return array[()]
    raise ValueError(f"unknown tag {leaf.kind!r}")


def leaf_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size of a leaf in bytes."""
    return math.prod(shape) * (_NUMPY_TYPES[dtype].itemsize if dtype in _NUMPY_TYPES else itemsize(dtype))
