"""Define units, fragments and save ids, and the names of slots and of the files of a store. Pure values.

No other module builds or parses the names of files; docs/store-format.md lists them."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import prod
from operator import add, itemgetter, mul
from typing import NamedTuple, TypeVar

WEIGHTS = "fp32"
"""Slot of the weights that the optimizer updates: the fp32 master weights if there are any, otherwise the parameter
itself. The dtype stored with each fragment tells which."""

FROZEN = "frozen"  # slot of parameters without gradient. They never move, so one version is enough

LEFT_OUT = "frozen_left_out"  # key in run states and facts: frozen parameters that the script loads and the store lacks

BUFFER = "buffer"  # slot of a module's persistent buffers
GRADIENT = "grad"  # slot in the journal: the gradient that an optimizer step was given
RAW = "raw"  # encoding: the bytes as they are
_SAVE_NAME = re.compile(r"(\d{8,12})-(\d{6,9})\Z")
_K = TypeVar("_K")
_V = TypeVar("_V")


class Unit(NamedTuple):
    """One (layer, slot): the unit of decision, of version and of drift."""

    layer: str
    slot: str

    def __str__(self) -> str:
        return f"{self.layer}/{self.slot}"


Part = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes in each dimension


class Box(NamedTuple):
    """A region of a tensor: ``sizes`` elements from ``offsets`` in each dimension of its global ``shape``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def start(self) -> int:
        """Place of the first element in the flattened tensor."""
        return sum(map(mul, self.offsets, strides_of(self.shape)))

    @property
    def is_range(self) -> bool:
        """Whether its elements follow each other in the flattened tensor."""
        first = next((dim for dim, size in enumerate(self.sizes) if size != 1), len(self.sizes))
        return not self.numel or self.sizes[first + 1 :] == self.shape[first + 1 :]

    def check(self) -> None:
        """Raise ValueError unless it has elements and lies in its shape."""
        inside = zip(self.offsets, self.sizes, self.shape, strict=True)  # raises for different lengths
        if not all(0 <= offset < offset + size <= whole for offset, size, whole in inside):
            raise ValueError(f"{self.sizes} elements from {self.offsets} do not lie in a tensor of shape {self.shape}")


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the elements between neighbours in each dimension of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def cut_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Part]:
    """Yield the boxes, in order, that elements [start, stop) of a flattened tensor are: at most two a dimension."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    ends = [(first - 1, start, min(stop, first * row)), (last, max(start, last * row), stop)]
    for index, begin, end in ends[: 1 if first > last else 2]:  # one, if all are in one row
        if index == last > first:
            yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
        for offsets, sizes in cut_range(shape[1:], begin - index * row, end - index * row):
            yield (index, *offsets), (1, *sizes)


class _Fragment(NamedTuple):
    fqn: str
    slot: str
    start: int
    numel: int
    box: Box | None


class Fragment(_Fragment):
    """A region of a parameter: elements [start, start + numel) of it flattened (row-major), or a box of ``numel``
    elements, the first of which is ``start``."""

    __slots__ = ()

    def __new__(cls, fqn: str, slot: str, start: int, numel: int, box: Box | None = None) -> "Fragment":
        if start < 0 or numel < 0:
            raise ValueError(f"fragment of {fqn}: start {start} and numel {numel} must be >= 0")
        return super().__new__(cls, fqn, slot, start, numel, box)

    @classmethod
    def of_box(cls, fqn: str, slot: str, box: Box) -> "Fragment":
        """Return the fragment of a box: a flat range where its elements follow each other."""
        return cls(fqn, slot, box.start, box.numel, None if box.is_range else box)

    @property
    def stop(self) -> int:
        """End of a flat range."""
        return self.start + self.numel

    def part(self, start: int, numel: int) -> "list[Fragment]":
        """Return its own elements [start, start + numel), in order: one fragment, or a few of a box."""
        if self.box is None:
            return [self._replace(start=self.start + start, numel=numel)]
        offsets, shape = self.box.offsets, self.box.shape
        cut = cut_range(self.box.sizes, start, start + numel)
        boxes = (Box(tuple(map(add, offsets, inside)), sizes, shape) for inside, sizes in cut)
        return [Fragment.of_box(self.fqn, self.slot, box) for box in boxes]


class SaveId(tuple[int, int]):
    """Identifies one save by its optimizer step and the epoch that made it.

    Ordered by epoch, then by step, and by no clock: a commit that an older incarnation of the job still makes after it
    was fenced is never newer than those of the newer incarnation."""

    __slots__ = ()

    def __new__(cls, step: int, epoch: int) -> "SaveId":
        return super().__new__(cls, (epoch, step))

    epoch: int = property(itemgetter(0))  # type: ignore[assignment]
    step: int = property(itemgetter(1))  # type: ignore[assignment]

    def __getnewargs__(self) -> tuple[int, int]:
        return self.step, self.epoch

    def __repr__(self) -> str:
        return f"SaveId(step={self.step}, epoch={self.epoch})"

    @property
    def name(self) -> str:
        """As in file names: ``00000120-000003``."""
        return f"{self.step:08d}-{self.epoch:06d}"

    @staticmethod
    @lru_cache(1 << 14)
    def parse(name: str) -> "SaveId":
        """Parse a :attr:`name`. Raises ValueError for other text."""
        match = _SAVE_NAME.match(name)
        if match is None:
            raise ValueError(f"{name!r} is not a save name such as 00000120-000003")
        save = SaveId(int(match[1]), int(match[2]))
        if save.name != name:
            raise ValueError(f"{name!r} is not the canonical form {save.name!r}")
        return save

    def __str__(self) -> str:
        return self.name


STORE = "STORE.json"
LOCK = "LOCK"
LATEST = "LATEST"
PROBE = "PROBE"
EPOCHS = "epochs"
SEGMENTS = "segments"
MANIFESTS = "manifests"
PROVEN = "proven"
SUSPECT = "suspect"
JOURNAL = "journal"
KEPT_WEIGHTS = "weights"
TOP_LEVEL = frozenset({STORE, LOCK, LATEST, PROBE, EPOCHS, SEGMENTS, MANIFESTS, PROVEN, SUSPECT, KEPT_WEIGHTS, JOURNAL})
FOREIGN = frozenset({"lost+found"})  # names that a filesystem creates in its own root, which may be the root of a store
_EPOCH_FILE = re.compile(r"(\d{6,9})\.json\Z")
_RANK_FILE = re.compile(r"rank-(\d{5,8})\.(json|safetensors)\Z")


def epoch_path(epoch: int) -> str:
    """Return the path of an epoch's record."""
    return f"{EPOCHS}/{epoch:06d}.json"


def closed_path(epoch: int) -> str:
    """Return the path of the mark that an epoch's owner ended cleanly."""
    return f"{EPOCHS}/{epoch:06d}.closed.json"


def parse_epoch(name: str) -> int | None:
    """Return the epoch of a file name in ``epochs/``, None for other names."""
    match = _EPOCH_FILE.match(name)
    return int(match[1]) if match and f"{int(match[1]):06d}.json" == name else None


def segment_dir(save: SaveId) -> str:
    """Return the directory of a segment group: all ranks' segments of one save."""
    return f"{SEGMENTS}/{save.name}"


def part_path(save: SaveId, rank: int) -> str:
    """Return the path of a rank's part."""
    return f"{segment_dir(save)}/rank-{rank:05d}.json"


@lru_cache(1 << 14)
def payload_path(save: SaveId, rank: int) -> str:
    """Return the path of a rank's payload."""
    return f"{segment_dir(save)}/rank-{rank:05d}.safetensors"


def parse_rank_file(name: str) -> tuple[int, str] | None:
    """Return (rank, suffix) of a file name in a segment directory, None for other names."""
    match = _RANK_FILE.match(name)
    return None if match is None or name != f"rank-{int(match[1]):05d}.{match[2]}" else (int(match[1]), match[2])


def manifest_path(save: SaveId) -> str:
    """Return the path of a manifest."""
    return f"{MANIFESTS}/{save.name}.json"


def proven_path(save: SaveId) -> str:
    """Return the path of the mark that a manifest was resumed from."""
    return f"{PROVEN}/{save.name}.json"


def suspect_path(save: SaveId) -> str:
    """Return the path of the mark that jobs died after resuming from a manifest."""
    return f"{SUSPECT}/{save.name}.json"


def weights_dir(save: SaveId) -> str:
    """Return the directory of a weights-only commit."""
    return f"{KEPT_WEIGHTS}/{save.name}"


@lru_cache(1 << 14)
def parse_save_file(name: str) -> SaveId | None:
    """Return the save of a file name in ``manifests/``, ``proven/`` or ``suspect/``, None for other names."""
    return parse_save_dir(name.removesuffix(".json")) if name.endswith(".json") else None


@lru_cache(1 << 14)
def parse_save_dir(name: str) -> SaveId | None:
    """Return the save of a directory name in ``segments/``, None for other names."""
    try:
        return SaveId.parse(name)
    except ValueError:
        return None


def similar_names(contents: Mapping[str, frozenset[object]], *, partly: bool) -> set[str]:
    """Return the names whose contents are equal to those of another or, if ``partly``, share half of all with them."""
    by_content = group_by_key((content, name) for name, content in contents.items())
    close = {content for content, names in by_content.items() if len(names) > 1}
    for one, other in combinations(by_content, 2) if partly else ():  # of thousands of experts, few are different
        if 2 * len(one & other) >= len(one | other):
            close |= {one, other}
    return {name for content in close for name in by_content[content]}


def group_by_key(pairs: Iterable[tuple[_K, _V]]) -> dict[_K, list[_V]]:
    """Return the values of each key, such as the fragments of each unit, in the order of the pairs."""
    found: dict[_K, list[_V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
