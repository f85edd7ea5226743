from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp

from store.errors import DamagedError, UnsupportedError
from store.schema import PartRecord, from_bytes, seal, to_bytes
from store.state_tree import Leaf, decode, encode, leaf_bytes
from tests.support.records import unseal

ARRAYS = stnp.arrays(
    st.sampled_from(["<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "i1", "u1", "<u2", "<u4", "<u8", "?", ">f4", ">i8"]),
    stnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
)
KEYS = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(st.integers(), max_size=3))
STATE = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.just("$"), inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.sets(SCALARS, max_size=3)
    ),
    max_leaves=12,
)


def no_tensor(value: Any) -> Leaf | None:
    return None


def through_a_record(value: Any) -> Any:
    tree, leaves = encode(value, no_tensor)
    stored = [Leaf(leaf.dtype, leaf.shape, bytes(leaf.data)) for leaf in leaves]
    for leaf in stored:
        assert len(leaf.data) == leaf_bytes(leaf.dtype, leaf.shape)
    return decode(unseal(seal(tree), "state"), stored, no_tensor)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        native = one.astype(one.dtype.newbyteorder("="))  # stored little-endian, whatever it was
        return native.dtype == other.dtype and native.shape == other.shape and native.tobytes() == other.tobytes()
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (one != one and other != other)
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True) if len(one) == len(other) else [((0, 0), (0, 1))]
        return all(same(a, b) and same(x, y) for (a, x), (b, y) in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, set | frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return bool(one == other)


@given(STATE)
def test_round_trip_is_exact(value: Any) -> None:
    assert same(value, through_a_record(value))


@given(STATE)
def test_the_tree_survives_in_a_part(value: Any) -> None:
    tree, _ = encode(value, no_tensor)
    part = PartRecord(
        store_id="0" * 32, step=1, epoch=1, rank=0, world_size=1, plan="0" * 32, payload_bytes=0, header_bytes=0,
        header_xxh3_128="0" * 32, entries=(), run_state=tree, run_tensors=(),
    )  # fmt: skip
    found = from_bytes(PartRecord, to_bytes(part), "it").run_state
    assert repr(found) == repr(tree)


def test_numpy_scalars_keep_their_type() -> None:
    value = {"f": np.float32(0.1), "d": np.float64(0.1), "i": np.int64(3), "b": np.bool_(True)}
    found = through_a_record(value)
    assert {key: (type(item), item) for key, item in found.items()} == {
        key: (type(item), item) for key, item in value.items()
    }


def test_arrays_come_back_writable() -> None:
    found = through_a_record([np.zeros(3)])[0]
    found[0] = 1


def test_random_states_of_python_and_numpy() -> None:
    import random

    rng = random.Random(1)
    state = rng.getstate()
    again = random.Random()
    again.setstate(through_a_record(state))
    assert again.random() == rng.random()
    generator = np.random.default_rng(1)
    other = np.random.default_rng(2)
    other.bit_generator.state = through_a_record(generator.bit_generator.state)
    assert other.random() == generator.random()
    legacy = np.random.RandomState(5)
    fresh = np.random.RandomState(6)
    fresh.set_state(through_a_record(legacy.get_state()))
    assert fresh.rand() == legacy.rand()


def test_ordered_dict_keeps_its_order() -> None:
    assert list(through_a_record(OrderedDict([("b", 1), ("a", 2)]))) == ["b", "a"]


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    pass


@pytest.mark.parametrize(
    "value",
    [object(), Color.RED, Text("x"), 1j, np.array(["a"]), np.array([object()]), np.complex64(1), lambda: 1, range(3)],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"state\['a'\]\[1\]"):
        encode({"a": [0, value]}, no_tensor)


def test_a_state_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UnsupportedError, match="nested"):
        encode(value, no_tensor)


def test_tensors_are_the_callers() -> None:
    class Tensor:
        pass

    leaf = Leaf("BF16", (2,), b"abcd")
    tree, leaves = encode({"t": Tensor()}, lambda value: leaf)
    assert leaves == [leaf]
    assert decode(tree, leaves, lambda found: ("loaded", found)) == {"t": ("loaded", leaf)}


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "tuple"}, {"$": "pickle", "v": 0}, {"$": "ndarray", "v": 1}, {"$": "ndarray", "v": -1},
        {"$": "ndarray", "v": True}, {"$": "ndarray", "v": "0"}, {"$": ["tuple"], "v": [1]}, {"$": "float", "v": "x"},
        {"$": "float", "v": None}, {"$": "bytes", "v": "?"}, {"$": "bytes", "v": 3}, {"$": "dict", "v": [[1]]},
        {"$": "dict", "v": 7}, {"$": "dict", "v": [[[1], 2]]}, {"$": "tuple", "v": 5}, {"$": "set", "v": [[1]]},
        {"$": {}, "v": 0}, {"$": None, "v": None},
    ],
    ids=repr,
)  # fmt: skip
def test_a_tree_nobody_wrote_is_damage(tree: Any) -> None:
    with pytest.raises(DamagedError):
        decode(tree, [Leaf("F32", (1,), b"0000")], no_tensor)


def test_a_leaf_of_a_wrong_size_is_damage() -> None:
    with pytest.raises(DamagedError):
        decode({"$": "ndarray", "v": 0}, [Leaf("F32", (2,), b"0000")], no_tensor)
    with pytest.raises(DamagedError):
        decode({"$": "ndarray", "v": 0}, [Leaf("BF16", (2,), b"0000")], no_tensor)


def test_a_deep_tree_is_damage() -> None:
    tree: Any = 0
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(DamagedError):
        decode(tree, [], no_tensor)


def test_as_deep_as_it_writes_it_reads() -> None:
    value: Any = 0
    for _ in range(100):
        value = {"x": value}
    assert through_a_record(value) == value
    with pytest.raises(UnsupportedError, match="nested"):
        encode([value], no_tensor)


def test_a_value_that_is_named_often_is_stored_once() -> None:
    shared, same = np.arange(3.0), np.arange(3.0)
    tree, leaves = encode({"a": shared, "b": [shared, same]}, no_tensor)
    assert len(leaves) == 2
    back = decode(tree, leaves, no_tensor)
    assert all(np.array_equal(one, shared) for one in (back["a"], *back["b"]))
    assert back["a"] is not back["b"][0]


class _Made(Mapping[str, Any]):
    """Makes its values when asked."""

    def __getitem__(self, key: str) -> Any:
        return np.full(4, float(key))

    def __iter__(self) -> Iterator[str]:
        return map(str, range(100))

    def __len__(self) -> int:
        return 100


class Place(NamedTuple):
    epoch: int
    batch: int


class Config(dict[str, Any]):
    pass


class Items(list[Any]):
    pass


class Rate(float):
    pass


@pytest.mark.parametrize(
    "value",
    [
        _Made(),
        Place(1, 2),
        Config(a=1),
        Items([1]),
        Rate(0.1),
        np.ma.masked_array([1, 2], [True, False]),
        {Text("k"): 1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_another_type_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"state\['a'\]\[1\]"):
        encode({"a": [0, value]}, no_tensor)


def test_the_refusal_of_a_subclass_says_how_to_convert_it() -> None:
    with pytest.raises(UnsupportedError, match=r"state\['at'\] is a .*Place, .* convert it with tuple\(\.\.\.\)"):
        encode({"at": Place(1, 2)}, no_tensor)


CONTAINERS = [
    Counter({"b": 2, "a": 1}),
    Counter({3: 2, (1, 2): 1}),
    OrderedDict([("b", 1), ("a", [2])]),
    OrderedDict([(1, "one")]),
    defaultdict(list, {"a": [1]}),
    defaultdict(int, {2: 1}),
    defaultdict(None, {"a": 1}),
    deque([1, (2, 3)], maxlen=4),
    deque(),
    bytearray(b"\x00\xff"),
]


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
def test_containers_come_back_in_their_own_type(value: Any) -> None:
    found = through_a_record({"a": value})["a"]
    assert type(found) is type(value) and found == value and list(found) == list(value)
    assert getattr(found, "default_factory", None) is getattr(value, "default_factory", None)
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)


def test_a_defaultdict_with_a_function_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"state\['a'\] is a defaultdict with the factory <lambda>"):
        encode({"a": defaultdict(lambda: 1)}, no_tensor)


def test_the_versions_in_a_modules_state_dict_are_kept() -> None:
    value: Any = OrderedDict(weight=1)
    value._metadata = OrderedDict({"": {"version": 2}})
    assert through_a_record(value)._metadata == value._metadata


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "Counter", "v": 3},
        {"$": "defaultdict", "v": [], "factory": "system"},
        {"$": "defaultdict", "v": []},
        {"$": "deque", "v": [1], "maxlen": "x"},
        {"$": "bytearray", "v": "no base64 at all"},
        {"$": "OrderedDict", "v": [[[], 1]]},
        {"$": ["tuple"], "v": []},
    ],
)
def test_trees_with_wrong_types_are_damage(tree: Any) -> None:
    with pytest.raises(DamagedError):
        decode(tree, [], no_tensor)
