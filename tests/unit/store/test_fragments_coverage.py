from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import DamagedError
from store.fragments import FragmentIndex, Source, covered_numel
from store.names import Fragment
from store.schema import Entry, PartRecord


def entry(start: int, numel: int, fqn: str = "w", slot: str = "fp32") -> Entry:
    return Entry(
        layer="l", slot=slot, fqn=fqn, start=start, numel=numel, dtype="F32", encoding="raw", offset=0,
        nbytes=4 * numel, xxh3_128="0" * 32,
    )  # fmt: skip


def part(rank: int) -> PartRecord:
    return PartRecord(
        store_id="0" * 32, step=1, epoch=1, rank=rank, world_size=1, plan="0" * 32, payload_bytes=0, header_bytes=0,
        header_xxh3_128="0" * 32, entries=(), run_state=None, run_tensors=(),
    )  # fmt: skip


def sources(cuts: list[int]) -> list[Source]:
    """Fragments between the cuts, one a rank; empty ones included."""
    return [Source(part(rank), entry(a, b - a)) for rank, (a, b) in enumerate(pairwise(cuts))]


@st.composite
def partitions(draw: st.DrawFn, numel: int) -> list[int]:
    """Cut points of a random partition among 1 to 9 ranks; some ranks may hold nothing."""
    inner = draw(st.lists(st.integers(0, numel), max_size=8))
    return [0, *sorted(inner), numel]


@given(st.data(), st.integers(0, 40), st.integers(0, 1 << 32))
def test_any_partition_covers_any_other(data: st.DataObject, numel: int, seed: int) -> None:
    """Resharding: what n ranks wrote fills what m ranks want, each element from the right place."""
    found = sources(data.draw(partitions(numel)))
    random.Random(seed).shuffle(found)
    index = FragmentIndex(found)
    values = list(range(numel))
    cuts = data.draw(partitions(numel))
    for a, b in pairwise(cuts):
        target: list[int | None] = [None] * (b - a)
        for copy in index.cover(Fragment("w", "fp32", a, b - a)):
            stored = values[copy.source.entry.start : copy.source.entry.stop]
            assert copy.numel > 0
            assert 0 <= copy.source_start <= copy.source_start + copy.numel <= len(stored)
            for i in range(copy.numel):
                assert target[copy.target_start + i] is None
                target[copy.target_start + i] = stored[copy.source_start + i]
        assert target == values[a:b]


@given(st.data(), st.integers(1, 40), st.integers(0, 1 << 32))
def test_every_hole_is_found(data: st.DataObject, numel: int, seed: int) -> None:
    found = [source for source in sources(data.draw(partitions(numel))) if source.entry.numel]
    hole = data.draw(st.sampled_from(found)).entry
    rest = [source for source in found if source.entry is not hole]
    random.Random(seed).shuffle(rest)
    index = FragmentIndex(rest)
    with pytest.raises(DamagedError, match="in no stored fragment"):
        index.cover(Fragment("w", "fp32", 0, numel))
    with pytest.raises(DamagedError, match="in no stored fragment"):
        index.cover(Fragment("w", "fp32", hole.start, 1))
    assert covered_numel(source.entry for source in rest) == numel - hole.numel
    if hole.start:
        assert sum(copy.numel for copy in index.cover(Fragment("w", "fp32", 0, hole.start))) == hole.start


@given(st.integers(0, 20), st.integers(1, 20), st.integers(0, 20), st.integers(1, 20), st.booleans())
def test_every_overlap_is_found(a: int, n: int, b: int, m: int, turn: bool) -> None:
    pair = [entry(a, n), entry(b, m)]
    pair = pair[::-1] if turn else pair
    overlap = max(a, b) < min(a + n, b + m)
    for check in (lambda: covered_numel(pair), lambda: FragmentIndex(Source(part(0), e) for e in pair)):
        if overlap:
            with pytest.raises(DamagedError, match="overlap"):
                check()
        else:
            check()


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6))
def test_overlap_means_that_an_element_is_there_twice(spans: list[tuple[int, int]]) -> None:
    counts = [sum(start <= at < start + numel for start, numel in spans) for at in range(24)]
    if max(counts) > 1:
        with pytest.raises(DamagedError, match="overlap"):
            covered_numel(entry(start, numel) for start, numel in spans)
    else:
        assert covered_numel(entry(start, numel) for start, numel in spans) == sum(counts)


def test_names_and_slots_are_apart() -> None:
    index = FragmentIndex(
        [
            Source(part(0), entry(0, 4)),
            Source(part(0), entry(0, 4, slot="exp_avg")),
            Source(part(0), entry(0, 4, fqn="v")),
        ]
    )
    assert set(index.names()) == {("w", "fp32"), ("w", "exp_avg"), ("v", "fp32")}
    assert index.dtype("w", "fp32") == "F32"
    assert index.dtype("u", "fp32") is None
    with pytest.raises(DamagedError, match="u/fp32"):
        index.cover(Fragment("u", "fp32", 0, 1))


def test_nothing_is_wanted_where_nothing_is() -> None:
    assert FragmentIndex([]).cover(Fragment("w", "fp32", 0, 0)) == []


def test_beyond_the_end_is_a_hole() -> None:
    with pytest.raises(DamagedError, match="elements 4 to 5"):
        FragmentIndex([Source(part(0), entry(0, 4))]).cover(Fragment("w", "fp32", 2, 3))
