"""``.pt`` files made with holes: what ``torch.save`` of the real value gives, and damage of any byte is found."""

from __future__ import annotations

import copy
import math
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from merger.checkpoint import PlannedTensor
from merger.io.output_file import Hole
from merger.io.transfer import check_hole
from merger.tensors import memory_of
from merger.writers.torch_zip import PtFile
from store.errors import DamagedError, MergeError, UnsupportedError
from tests.support.extents import DTYPES


def content(stored: PlannedTensor, seed: int) -> torch.Tensor:
    """What will be put into a planned tensor: any bits, but no NaN, so that values can be compared."""
    bits = torch.randint(0, 128, (stored.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if stored.dtype == torch.bool:
        bits %= 2
    if stored.dtype.is_floating_point:
        bits %= 60  # exponents below those of infinity
    return bits.view(stored.dtype).reshape(stored.shape)


def finished(file: PtFile, path: Path) -> tuple[dict[int, torch.Tensor], list[tuple[Hole, int]]]:
    """Make, fill and seal. Returns (what was put in, by identity of the planned tensor; holes with checksums)."""
    holes, filled, crcs = file.make(path), {}, {}
    with path.open("r+b") as out:
        for number, hole in enumerate(holes):
            tensor = filled[id(hole.stored)] = content(hole.stored, number)
            data = bytes(memory_of(tensor))
            out.seek(hole.offset)
            out.write(data)
            crcs[hole.offset] = zlib.crc32(data)
    file.seal(path, crcs)
    return filled, [(hole, crcs[hole.offset]) for hole in holes]


def real(value: Any, filled: dict[int, torch.Tensor]) -> Any:
    """The value with real tensors in the place of planned ones."""
    if isinstance(value, PlannedTensor):
        return filled.get(id(value), torch.empty(value.shape, dtype=value.dtype))
    if isinstance(value, OrderedDict):
        return OrderedDict((key, real(item, filled)) for key, item in value.items())
    if type(value) is dict:
        return {key: real(item, filled) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(real(item, filled) for item in value)
    return value


def alike(one: Any, other: Any) -> bool:
    """Same types, order, shapes, dtypes and values, to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same = (one.dtype, one.shape) == (other.dtype, other.shape)
        return same and bytes(memory_of(one.contiguous())) == bytes(memory_of(other.contiguous()))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other or (one != one and other != other)


def require_right(value: Any, path: Path, classes: tuple[Any, ...] = ()) -> Any:
    """The finished file is what ``torch.save`` gives for the real value, in every way that it can be opened."""
    file = PtFile(value, classes)
    filled, holes = finished(file, path)
    file.check(path)
    for hole, crc in holes:
        check_hole(path, hole, crc)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    by_torch = path.with_name("by_torch.pt")
    torch.save(real(value, filled), by_torch)
    with torch.serialization.safe_globals(list(classes)):
        expected = torch.load(by_torch, weights_only=True)
        found = torch.load(path, weights_only=True)
        assert alike(found, expected)
        assert alike(torch.load(path, weights_only=True, mmap=True), expected)
    assert path.stat().st_size <= by_torch.stat().st_size + 64
    assert file.nbytes >= sum(hole.stored.nbytes for hole, _ in holes)
    return found


def test_a_nest_of_everything(tmp_path: Path) -> None:
    planned, tied = PlannedTensor((3, 4), torch.float32, ()), PlannedTensor((5,), torch.bfloat16, ())
    base = torch.arange(24.0)
    value = {
        "module": OrderedDict([("z", tied), ("a", planned), ("m", tied)]),
        "list": [planned, (tied, [PlannedTensor((2,), torch.bool, ())]), {}],
        "literals": {
            "view": base[5:10],
            "other view": base[3:8],
            "transposed": base.view(4, 6).t(),
            "expanded": torch.tensor([1.0]).expand(3, 4),
            "strided": base[::5],
            "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "scalar": torch.tensor(3.5),
            "bool": torch.tensor([True, False, True])[1:],
            "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            "complex": torch.tensor([1 + 2j, 3 - 4j]),
            "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
            "empty": torch.empty(0),
            "empty of two dimensions": torch.empty(3, 0, dtype=torch.int64),
        },
        "empty planned": [PlannedTensor((0,), torch.float32, ()), PlannedTensor((4, 0), torch.bfloat16, ())],
        "scalar planned": PlannedTensor((), torch.float64, ()),
        "plain": (1, -1.5, math.inf, math.nan, "text", None, True, b"bytes", torch.Size([2, 3]), {1, 2}, Counter("ab")),
        3: {"number as a key": torch.float16, ("a", 1): 2**100},
    }
    found = require_right(value, tmp_path / "x.pt")
    assert found["module"]["z"] is not found["module"]["a"]
    assert found["module"]["z"].data_ptr() == found["module"]["m"].data_ptr() == found["list"][1][0].data_ptr()
    assert found["module"]["a"].data_ptr() == found["list"][0].data_ptr()


def test_a_tied_tensor_is_in_the_file_once(tmp_path: Path) -> None:
    planned = PlannedTensor((1000,), torch.float32, ())
    literal = torch.ones(1000)
    require_right({"a": planned, "b": [planned, literal], "c": literal}, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 10_000
    file = PtFile({"a": planned, "b": planned})
    assert list(file.tensors()) == [planned]
    assert len(file.make(tmp_path / "y.pt")) == 1


def test_a_small_view_of_something_large_takes_little_room(tmp_path: Path) -> None:
    finished(PtFile({"a": torch.zeros(1_000_000)[3:5]}), tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=True)["a"].shape == (2,)
    assert (tmp_path / "x.pt").stat().st_size < 5_000


def test_gradients_and_parameters_are_plain_values(tmp_path: Path) -> None:
    file = PtFile({"a": torch.nn.Parameter(torch.ones(3)), "b": torch.ones(2, requires_grad=True) * 2})
    finished(file, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert {key: value.tolist() for key, value in found.items()} == {"a": [1, 1, 1], "b": [2, 2]}


def test_conjugates_and_negations_are_resolved(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    file = PtFile({"conj": values.conj(), "neg": values.conj().imag})
    finished(file, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert found["neg"].tolist() == [-2, 4]


def test_no_tensor_at_all(tmp_path: Path) -> None:
    require_right({"a": 1}, tmp_path / "x.pt")
    require_right([], tmp_path / "y.pt")
    require_right(None, tmp_path / "z.pt")


@pytest.mark.parametrize("name", ["data.pt", "data", "x", "with space.pt", "ü.pt", "a.b.c.pt", "version"])
def test_names_of_files(tmp_path: Path, name: str) -> None:
    require_right({"a": torch.ones(3), "b": PlannedTensor((4,), torch.float32, ())}, tmp_path / name)


class Plain:
    """A class that loaders allow."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and bool(self.inside == other.inside)

    __hash__ = None  # type: ignore[assignment]


Pair = namedtuple("Pair", "one two")


def test_classes_that_loaders_allow(tmp_path: Path) -> None:
    require_right({"a": Plain([1, 2]), "b": PlannedTensor((4,), torch.float32, ())}, tmp_path / "x.pt", (Plain,))
    with pytest.raises(MergeError, match="cannot be read back"):
        PtFile({"a": Plain([1, 2])}).make(tmp_path / "y.pt")


ONE = torch.arange(10.0)[4:7]
PLANNED = PlannedTensor((3,), torch.float32, ())


@pytest.mark.parametrize(
    "value",
    [
        {ONE},
        frozenset({ONE}),
        Plain(ONE),
        Plain({"deep": [ONE]}),
        Pair(ONE, 1),
        defaultdict(list, {"a": ONE}),
        {PLANNED},
        Pair(PLANNED, 1),
        defaultdict(list, {"a": PLANNED}),
        Plain(PLANNED),
        Counter({"a": ONE}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_tensor_where_it_would_be_lost_is_refused(tmp_path: Path, value: Any) -> None:
    """Its bytes would stay zero, and the file would look right."""
    with pytest.raises(MergeError, match=r"x\.pt"):
        PtFile({"a": [value]}, (Plain, Pair, defaultdict)).make(tmp_path / "x.pt")


def test_tensors_that_are_not_plain_memory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="sparse, quantized or nested"):
        PtFile({"a": torch.eye(3).to_sparse()}).make(tmp_path / "x.pt")


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_text("mine")
    with pytest.raises(FileExistsError):
        PtFile({"a": 1}).make(tmp_path / "x.pt")
    (tmp_path / "y.pt").symlink_to(tmp_path / "z.pt")
    with pytest.raises(FileExistsError):
        PtFile({"a": 1}).make(tmp_path / "y.pt")
    assert (tmp_path / "x.pt").read_text() == "mine"
    assert not (tmp_path / "z.pt").exists()


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        PtFile({"a": torch.ones(3)}).make(tmp_path / "nowhere" / "x.pt")


def leaves() -> st.SearchStrategy[Any]:
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    planned = st.builds(PlannedTensor, shapes, st.sampled_from(DTYPES), st.just(()))
    literal = st.builds(lambda shape, dtype: torch.randint(0, 2, shape).to(dtype), shapes, st.sampled_from(DTYPES))
    turned = literal.map(lambda tensor: tensor.transpose(0, -1) if tensor.dim() else tensor)
    plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    return planned | literal | turned | plain


def nests() -> st.SearchStrategy[Any]:
    keys = st.text(max_size=5) | st.integers()
    return st.recursive(
        leaves(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=4).map(tuple)
            | st.dictionaries(keys, inner, max_size=4)
            | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
            | st.tuples(inner, st.integers(1, 3)).map(lambda pair: [pair[0]] * pair[1])
        ),
        max_leaves=12,
    )


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(nests())
def test_any_nest(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    require_right(value, tmp_path_factory.mktemp("nest") / "x.pt", (bytes,))


def test_empty_bytes_do_not_keep_a_file_from_being_written(tmp_path: Path) -> None:
    finished(PtFile({"a": b"", "b": b"1"}), tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=False) == {"a": b"", "b": b"1"}


SMALL = {
    "planned": [
        PlannedTensor((3,), torch.float32, ()),
        PlannedTensor((2, 2), torch.bfloat16, ()),
        PlannedTensor((0,), torch.float32, ()),
    ],
    "literal": torch.arange(5),
    "empty": torch.empty(0),
    "plain": ("text", 1),
}


def flips(data: bytes, mask: int) -> Iterator[tuple[int, bytes]]:
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= mask
        yield position, bytes(flipped)


@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_damage_of_any_byte_is_found(tmp_path: Path, mask: int) -> None:
    path, file = tmp_path / "x.pt", PtFile(SMALL)
    _, holes = finished(file, path)
    data = path.read_bytes()

    def sound() -> bool:
        try:
            file.check(path)
            for hole, crc in holes:
                check_hole(path, hole, crc)
        except (MergeError, DamagedError):
            return False
        return True

    assert sound()
    for position, flipped in flips(data, mask):
        path.write_bytes(flipped)
        assert not sound(), position
    for length in (*range(0, len(data), 7), len(data) - 1):
        path.write_bytes(data[:length])
        assert not sound(), length
    path.write_bytes(data + b"\0")
    assert not sound()


@pytest.mark.parametrize("mask", [0xFF])
def test_damage_before_the_file_is_sealed_is_found(tmp_path: Path, mask: int) -> None:
    """What is checked at the end is what was meant, not what had come of it by then."""
    original, path = tmp_path / "original.pt", tmp_path / "x.pt"
    file = PtFile(SMALL)
    holes = file.make(original)
    inside = {i for hole in holes for i in range(hole.offset, hole.offset + hole.stored.nbytes)}
    crcs = {hole.offset: zlib.crc32(bytes(hole.stored.nbytes)) for hole in holes}
    for position, flipped in flips(original.read_bytes(), mask):
        if position in inside:
            continue
        path.write_bytes(flipped)
        made = copy.deepcopy(file)  # sealing the next one must not build on this one
        with pytest.raises(MergeError, match=r"x\.pt"):
            made.seal(path, crcs)
            made.check(path)
