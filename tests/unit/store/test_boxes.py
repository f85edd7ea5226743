"""Boxes and flat ranges of one tensor: whatever was stored fills whatever is wanted, every element exactly once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import store.fragments
from store.errors import DamagedError
from store.fragments import BoxTree, FragmentIndex, Steps, covered_numel
from store.names import Box, Fragment, SaveId, cut_range
from store.schema import Entry, UnitRecord, from_bytes, to_bytes
from tests.support.made_versions import head_of


@dataclass(frozen=True)
class Stored:
    """A stored fragment, without its bytes."""

    fragment: Fragment
    fqn: str = "w"
    slot: str = "fp32"
    dtype: str = "F32"

    @property
    def start(self) -> int:
        return self.fragment.start

    @property
    def stop(self) -> int:
        return self.fragment.stop

    @property
    def numel(self) -> int:
        return self.fragment.numel

    @property
    def box(self) -> Box | None:
        return self.fragment.box


def values(fragment: Fragment, whole: Any) -> Any:
    """The elements of a fragment, flat, in the order of its own memory."""
    if fragment.box is None:
        return whole.reshape(-1)[fragment.start : fragment.stop]
    inside = zip(fragment.box.offsets, fragment.box.sizes, strict=True)
    return whole[tuple(slice(offset, offset + size) for offset, size in inside)].reshape(-1)


def flat_cuts(draw: random.Random, numel: int) -> list[Fragment]:
    cuts = sorted({0, numel, *(draw.randint(0, numel) for _ in range(draw.randint(0, 5)))})
    return [Fragment("w", "fp32", a, b - a) for a, b in pairwise(cuts)]


def mesh(draw: random.Random, shape: tuple[int, ...]) -> list[Fragment]:
    """Boxes as a mesh cuts them: dimension by dimension, each box of the last cut alike or on its own; some of them cut
    again by the ranks that hold the same."""
    boxes = [Box((0,) * len(shape), shape, shape)]
    for _ in range(draw.randint(0, 3)):
        boxes = [part for box in boxes for part in _chunks(box, draw.randrange(len(shape)), draw.randint(1, 3))]
    out = []
    for box in boxes:
        cuts = [one.start for one in flat_cuts(draw, box.numel)] if draw.random() < 0.3 else [0]
        for start, stop in zip(cuts, [*cuts[1:], box.numel], strict=True):
            out += Fragment.of_box("w", "fp32", box).part(start, stop - start)
    return out


def _chunks(box: Box, dim: int, count: int) -> list[Box]:
    step, out = -(-box.sizes[dim] // count), []
    for start in range(0, box.sizes[dim], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + start, min(step, sizes[dim] - start)
        out.append(Box(tuple(offsets), tuple(sizes), box.shape))
    return out


def regions(draw: random.Random, shape: tuple[int, ...]) -> list[Fragment]:
    found = flat_cuts(draw, prod(shape)) if draw.random() < 0.4 else mesh(draw, shape)
    draw.shuffle(found)
    return found


def shape_of(draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 4)))


def filled(index: FragmentIndex[Stored], wanted: Fragment, whole: Any) -> Any:
    """What the copies bring; -1 where they bring nothing, -2 where they bring an element twice."""
    target = np.full(wanted.numel, -1)
    again, copies = index.cover_all([Fragment("w", "fp32", 0, whole.size), wanted])
    assert copies == index.cover(wanted)
    assert sum(copy.numel for copy in again) == whole.size
    for copy in copies:
        source = values(copy.source.fragment, whole)
        steps = copy.steps or Steps((copy.numel,), (1,), (1,))
        into = as_strided(target[copy.target_start :], steps.sizes, [8 * step for step in steps.target])
        found = as_strided(source[copy.source_start :].copy(), steps.sizes, [8 * step for step in steps.source])
        assert found.size == copy.numel
        into[...] = np.where(into == -1, found, -2)
    return target


def check(seeds: Sequence[int]) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        shape = shape_of(draw)
        whole = np.arange(prod(shape)).reshape(shape)
        stored = regions(draw, shape)
        assert sorted(np.concatenate([values(one, whole) for one in stored]).tolist()) == list(range(whole.size))
        index = FragmentIndex([Stored(one) for one in stored])
        assert covered_numel([Stored(one) for one in stored]) == whole.size  # type: ignore[misc]
        for wanted in regions(draw, shape):
            assert filled(index, wanted, whole).tolist() == values(wanted, whole).tolist(), (seed, wanted)
        lost = draw.choice(stored)
        rest = FragmentIndex([Stored(one) for one in stored if one is not lost])
        with pytest.raises(DamagedError, match="in no stored fragment"):
            rest.cover(lost)
        with pytest.raises(DamagedError, match="in no stored fragment"):
            rest.cover(Fragment("w", "fp32", 0, whole.size))
        if len(stored) > 1:
            twice = draw.choice([one for one in regions(draw, shape) if one.numel])
            with pytest.raises(DamagedError, match="overlap"):
                FragmentIndex([Stored(one) for one in [*stored, twice]])


@pytest.mark.parametrize("cases", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_regions_fill_any_others(cases: int) -> None:
    check(range(cases))


@pytest.mark.parametrize(
    ("name", "mutant"),
    {
        "holes are not counted": ("cut_range", lambda shape, start, stop: list(cut_range(shape, start, stop))[:1]),
        "steps are forgotten": ("steps_between", lambda sizes, source, target: None),
        "overlaps pass": ("BoxTree", lambda name, boxes, dims: _Scan(boxes, dims)),
    }.items(),
)
def test_mutants_are_caught(name: str, mutant: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.fragments, *mutant)
    with pytest.raises((AssertionError, pytest.fail.Exception, DamagedError, ValueError)):
        check(range(300))


class _Scan(BoxTree):
    """A tree that looks at every box, and would see no overlap."""

    def __init__(self, boxes: Sequence[Any], dims: int) -> None:
        self.alone = [BoxTree("w", [box], dims) for box in boxes]

    def meet(self, boxes: Sequence[Any]) -> Any:
        found = [
            (part, own + number, *rest)
            for number, one in enumerate(self.alone)
            for part, own, *rest in [one.meet(boxes)]
        ]
        return [np.concatenate(columns) for columns in zip(*found, strict=True)]


def test_a_box_whose_elements_follow_each_other_is_a_flat_range() -> None:
    rows = Fragment.of_box("w", "fp32", Box((2, 0), (3, 4), (7, 4)))
    assert rows == Fragment("w", "fp32", 8, 12)
    columns = Fragment.of_box("w", "fp32", Box((0, 1), (7, 2), (7, 4)))
    assert (columns.start, columns.numel, columns.box) == (1, 14, Box((0, 1), (7, 2), (7, 4)))
    assert Fragment.of_box("w", "fp32", Box((3, 1), (1, 2), (7, 4))) == Fragment("w", "fp32", 13, 2)


@pytest.mark.parametrize("boxes", [[(0, 0, 2, 3), (0, 3, 3, 2), (2, 0, 3, 2), (3, 2, 2, 3), (2, 2, 1, 1)]])
def test_what_no_mesh_makes_is_refused(boxes: list[tuple[int, int, int, int]]) -> None:
    """A pinwheel tiles the tensor, but no cut separates it: looking for overlaps there would take all pairs."""
    with pytest.raises(DamagedError, match="of no mesh"):
        FragmentIndex([Stored(Fragment.of_box("w", "fp32", Box(one[:2], one[2:], (5, 5)))) for one in boxes])


def test_a_staircase_does_not_take_the_recursion_limit() -> None:
    steps = [((n, n), (1, 5000 - n)) for n in range(3000)] + [((n + 1, n), (5000 - n, 1)) for n in range(3000)]
    with pytest.raises(DamagedError, match="of no mesh"):
        BoxTree("w", steps, 2)


ENTRY = {
    "layer": "l", "slot": "fp32", "fqn": "w", "start": 1, "numel": 14, "box": [[0, 1], [7, 2], [7, 4]], "dtype": "F32",
    "encoding": "raw", "offset": 0, "nbytes": 56, "xxh3_128": "0" * 32,
}  # fmt: skip
LIES: dict[str, dict[str, Any]] = {
    "numel": {"numel": 13},
    "start": {"start": 0},
    "dimensions": {"box": [[0, 1], [7, 2], [7, 4, 1]]},
    "outside": {"box": [[0, 1], [7, 2], [6, 4]]},
    "negative": {"box": [[0, -1], [7, 2], [7, 4]], "start": -1},
    "empty": {"box": [[0, 1], [0, 2], [7, 4]], "numel": 0},
    "flat": {"box": [[0, 0], [7, 2], [7, 2]], "start": 0},
    "text": {"box": "all"},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_record_whose_box_lies_is_damaged(lie: str) -> None:
    from store.schema import seal

    assert from_bytes(Entry, seal(ENTRY), "it").box == Box((0, 1), (7, 2), (7, 4))
    with pytest.raises(DamagedError):
        from_bytes(Entry, seal({**ENTRY, **LIES[lie]}), "it")


def test_records_without_boxes_are_as_before_and_those_with_boxes_need_a_newer_reader() -> None:
    flat = Entry(**{key: value for key, value in ENTRY.items() if key != "box"})
    assert b"box" not in to_bytes(flat)
    assert from_bytes(Entry, to_bytes(flat.replace(box=Box((0, 1), (7, 2), (7, 4)))), "it").box
    unit = UnitRecord(
        layer="l", slot="fp32", save="00000001-000001", encoding="raw", numel=14, nbytes=56, drift=0.0, staleness=0,
        moving=True,
    )  # fmt: skip
    assert b"boxes" not in to_bytes(unit)
    boxed = unit.replace(boxes=True)
    assert from_bytes(UnitRecord, to_bytes(boxed), "it") == boxed
    readers = [head_of(SaveId(1, 1), 1).replace(units=(one,)).reader for one in (unit, boxed)]
    assert readers == [1, 4]
