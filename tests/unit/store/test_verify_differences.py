"""Checking a fragment with its differences: a writer's faults are found, each byte is read once, in little memory."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from store.catalog import open_catalog
from store.encoding import CHUNK, ENCODINGS
from store.encoding.base import Bytes, chunk_sizes
from store.encoding.stream import EncodedEntry, Packing
from store.errors import DamagedError, StorageError
from store.fragments import FragmentReader, Source
from store.names import SaveId, part_path
from store.schema import PartRecord, digest
from store.segment import SegmentDraft, StagedFragment, write_segment
from store.verify import check_stored, check_with_differences, verify
from tests.crash.damage import forge
from tests.crash.models import RANKS, VARIED
from tests.crash.simulated import SimulatedFiles
from tests.crash.workload import PLAN, Job, Memory
from tests.support.entries import iter_chunks
from tests.support.reference_encodings import encode_chunk

STORE = "0" * 32
NUMEL = CHUNK + 77


def chunks_of(encoding: str, values: NDArray[Any]) -> list[Bytes]:
    return [encode_chunk(ENCODINGS[encoding], chunk) for chunk in iter_chunks(values)]


def noise(seed: int, numel: int = NUMEL) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32)


def write(files: SimulatedFiles, step: int, *fragments: StagedFragment) -> PartRecord:
    draft = SegmentDraft(STORE, SaveId(step, 1), 0, 1, PLAN, fragments, None, (), {})
    return write_segment(files, draft)


def staged(encoding: str, values: NDArray[Any], packing: Packing | None, base: str | None = None, **kwargs: Any) -> Any:
    data = EncodedEntry(
        ENCODINGS[encoding], values.size, "F32", lambda: chunks_of(encoding, values), packing, (base,) if base else ()
    )
    return StagedFragment("l", "fp32", "l.w", 0, values.size, "F32", encoding, data, **kwargs)


def family(
    files: SimulatedFiles, encoding: str, packed: bool, versions: Iterable[NDArray[np.float32]]
) -> tuple[Source, list[Source]]:
    """The first stored whole, the others as differences to it."""
    first, *others = versions
    part = write(files, 1, staged(encoding, first, Packing(1) if packed else None))
    base = Source(part, part.entries[0])
    found = []
    for step, values in enumerate(others, 2):
        packing = Packing(1, chunks_of(encoding, first))
        own = write(files, step, staged(encoding, values, packing, part.save.name))
        found.append(Source(own, own.entries[0], base))
    return base, found


class Counting:
    """How often each byte of each file is read."""

    def __init__(self, files: SimulatedFiles) -> None:
        self._files = files
        self.spans: list[tuple[str, int, int]] = []

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        self._files.read_into(path, offset, target)
        self.spans.append((path, offset, offset + len(target)))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("numel", [NUMEL, 100, 0])
def test_a_healthy_family_is_read_once(files: SimulatedFiles, encoding: str, packed: bool, numel: int) -> None:
    """Every byte exactly once, the base's too, in order; and it is the same that a reader sees."""
    values = np.abs(noise(0, numel))
    base, others = family(files, encoding, packed, [values, values * 1.01, values * 0.99])
    counting = Counting(files)
    assert check_with_differences(counting, base, others) == []
    by_path: dict[str, list[tuple[int, int]]] = {}
    for path, start, stop in counting.spans:
        if stop > start:
            by_path.setdefault(path, []).append((start, stop))
    assert all(one[1] == other[0] for spans in by_path.values() for one, other in pairwise(spans))
    assert sum(stop - start for _, start, stop in counting.spans) == sum(s.entry.nbytes for s in (base, *others))
    for source in (base, *others):
        assert sum(chunk.nbytes for chunk in FragmentReader(files, source).chunks()) == 4 * numel


def test_memory_does_not_grow_with_the_family(files: SimulatedFiles) -> None:
    """Twelve differences that do not pack, of two chunks each."""
    base, others = family(files, "raw", True, (noise(seed) for seed in range(13)))
    assert sum(source.entry.nbytes for source in others) > 40 << 20
    tracemalloc.start()
    assert check_with_differences(files, base, others) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20, peak


@pytest.fixture(scope="module")
def three() -> tuple[SimulatedFiles, Source, list[Source]]:
    files = SimulatedFiles()
    return files, *family(files, "int8-block", True, [noise(0), noise(1), noise(2)])


@dataclass
class Flipped:
    """Bytes that come back wrong, by path: the first, from the first read that has it."""

    files: SimulatedFiles
    at: dict[str, int]
    refused: str = ""

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        if path == self.refused:
            raise StorageError(f"cannot read {path}: the device reported an I/O error")
        self.files.read_into(path, offset, target)
        at = self.at.get(path, -1) - offset
        if 0 <= at < len(target):
            target[at] ^= 1


def place(source: Source, at: int) -> tuple[str, int]:
    path = f"segments/{source.part.save}/rank-00000.safetensors"
    return path, source.part.header_bytes + source.entry.offset + at % source.entry.nbytes


def chained(files: SimulatedFiles, encoding: str, versions: Iterable[NDArray[Any]]) -> tuple[Source, list[Source]]:
    """A whole fragment, and the differences to it and to each other."""
    source, before, found = None, None, []
    for step, values in enumerate(versions, 1):
        packing = Packing(1, None if before is None else chunks_of(encoding, before))
        part = write(files, step, staged(encoding, values, packing, source and source.part.save.name))
        source, before = Source(part, part.entries[0], source), values
        found.append(source)
    return found[0], found[1:]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("numel", [NUMEL, 100, 0])
def test_a_chain_is_read_once_and_comes_back(files: SimulatedFiles, encoding: str, numel: int) -> None:
    values = np.abs(noise(0, numel))
    versions = [values * (1 + 0.01 * step) for step in range(4)]
    base, others = chained(files, encoding, versions)
    counting = Counting(files)
    assert check_with_differences(counting, base, others) == []
    assert sum(stop - start for _, start, stop in counting.spans) == sum(s.entry.nbytes for s in (base, *others))
    for source, made in zip((base, *others), versions, strict=True):
        encoded = (encode_chunk(ENCODINGS[encoding], chunk) for chunk in iter_chunks(made.astype("<f4")))
        parts = zip(encoded, chunk_sizes(numel), strict=True)
        wanted = [ENCODINGS[encoding].decode(chunk, size, "F32").view("<f4") for chunk, size in parts]
        found = [chunk.view("<f4") for chunk in FragmentReader(files, source).chunks()]
        assert all(map(np.array_equal, found, wanted))


@pytest.mark.parametrize("at", [0, 5, 1000, -1])
def test_in_a_chain_only_the_one_that_is_damaged_is_told(files: SimulatedFiles, at: int) -> None:
    base, others = chained(files, "int8-block", [noise(seed) for seed in range(4)])
    for hurt in (base, *others):
        flipped = Flipped(files, dict([place(hurt, at)]))
        assert [one.source for one in check_with_differences(flipped, base, others)] == [hurt]
        reader = FragmentReader(Flipped(files, dict([place(hurt, at)])), others[-1])
        with pytest.raises(DamagedError):
            list(reader.chunks())
        assert reader.at_fault == hurt.part.save


@pytest.mark.parametrize("at", [0, 5, 1000, -1])
def test_what_is_wrong_is_told_of_the_one_that_is(three: tuple[SimulatedFiles, Source, list[Source]], at: int) -> None:
    files, base, others = three
    for hurt in (base, *others):
        found = check_with_differences(Flipped(files, dict([place(hurt, at)])), base, others)
        assert [finding.source for finding in found] == [hurt]
    both = Flipped(files, dict([place(base, at), place(others[1], at)]))
    assert [finding.source for finding in check_with_differences(both, base, others)] == [base, others[1]]
    finding = check_stored(Flipped(files, dict([place(others[1], at)])), others[1])
    assert finding is not None
    assert finding.source == others[1]
    assert check_stored(files, others[1]) is None


def test_what_storage_refuses_is_told(three: tuple[SimulatedFiles, Source, list[Source]]) -> None:
    files, base, others = three
    for hurt in (base, *others):
        found = check_with_differences(Flipped(files, {}, refused=place(hurt, 0)[0]), base, others)
        assert [finding.source for finding in found] == [hurt]
        assert "I/O error" in str(found[0].error)


def test_a_writers_faults_are_found_before_they_are_needed(files: SimulatedFiles) -> None:
    """The stored bytes have their hash, and yet do not decode or do not unpack to what was meant."""
    values = noise(0, 200)
    good = chunks_of("int8-block", values)
    nan_scale = good[0].copy()
    nan_scale[-4:] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    for packing in (None, Packing(1)):
        disk = SimulatedFiles()
        data = EncodedEntry(ENCODINGS["int8-block"], 200, "F32", lambda: [nan_scale], packing)
        part = write(disk, 1, StagedFragment("l", "fp32", "l.w", 0, 200, "F32", "int8-block", data))
        (finding,) = check_with_differences(disk, Source(part, part.entries[0]), [])
        assert "scale" in str(finding.error)
    base, (other,) = family(files, "int8-block", False, [values, values * 1.5])
    entry = other.entry.replace(encoded_xxh3_128=digest(b""))
    (finding,) = check_with_differences(files, base, [Source(other.part, entry, base)])
    assert "does not unpack to what was packed, as the difference to 00000001-000001" in str(finding.error)


def test_verify_reads_no_byte_twice(files: SimulatedFiles) -> None:
    job = Job(files, Memory(), VARIED)
    for _ in range(6):
        job.save(everything=True)
    catalog = open_catalog(files)
    counting = Counting(files)
    real, files.read_into = files.read_into, counting.read_into  # type: ignore[method-assign]
    counting._files = SimulatedFiles(files.disk)
    assert verify(catalog).ok
    files.read_into = real  # type: ignore[method-assign]
    read: Counter[str] = Counter()
    for path, start, stop in counting.spans:
        read[path] += stop - start
    assert read == {path: files.size(path) for path in files.disk.files() if path.endswith(".safetensors")}


def test_verify_finds_a_writers_fault_and_says_what_a_resume_takes(files: SimulatedFiles) -> None:
    job = Job(files, Memory(), VARIED)
    first = job.save(everything=True)
    draft = job.plan(everything=True)
    for rank in range(RANKS):
        job.write(draft, rank)

    def change(body: dict[str, Any]) -> None:
        for entry in body["entries"]:
            if "encoded_xxh3_128" in entry:
                entry["encoded_xxh3_128"] = "0" * 32

    forge(files, part_path(draft.id, 1), change)  # before the commit, so that it commits it
    job.commit(draft)
    report = verify(open_catalog(files))
    assert [commit.state for commit in report.commits] == ["fallback", "ok"]
    assert report.resumable == draft.id
    assert report.problems
    assert all("does not unpack" in problem for problem in report.problems)
    assert first < draft.id
