"""Moving blocks into files: bytes to their places, every block checked, in bounded memory, on any number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import merger.io.output_file
import merger.io.transfer
from merger.checkpoint import PlannedTensor
from merger.io.blocks import Block, Extent
from merger.io.output_file import Hole, OutputError
from merger.io.transfer import (
    CHUNK,
    TransferPlan,
    TransferResult,
    check_cancelled,
    check_hole,
    checksums,
    plan_transfer,
    run_parallel,
    transfer,
)
from store.errors import DamagedError, MergeError, StorageError
from store.fragments import FragmentIndex
from tests.support.extents import DTYPES, Spread, all_of, some_flaw, values, wanted

ROOT = Path(__file__).parents[4]

Files = Sequence[Sequence[tuple[int, PlannedTensor]]]
"""By file: planned tensors and where they begin."""


@pytest.fixture
def spread(tmp_path: Path) -> Spread:
    return Spread(tmp_path)


def carry_out(
    spread: Spread, files: Files, *, workers: int = 1, told: list[int] | None = None
) -> tuple[list[Path], TransferResult]:
    """Make empty files, move everything, and return them."""
    paths, holes = [], []
    for number, content in enumerate(files):
        path = spread.root / f"out-{number}"
        path.write_bytes(bytes(max((offset + stored.nbytes for offset, stored in content), default=0)))
        paths.append(path)
        holes += [(number, Hole(offset, stored)) for offset, stored in content]
    plan = plan_transfer(spread.index, holes)
    moved = transfer(plan, paths, workers, (told if told is not None else []).append)
    if told is not None:
        assert sum(told) == plan.bytes_to_read
    return paths, moved


def require_right(spread: Spread, files: Files, paths: Sequence[Path], moved: TransferResult) -> None:
    """Every file holds what it should, and the checksums say so."""
    assert not moved.flaws
    for number, content in enumerate(files):
        data = paths[number].read_bytes()
        holes = [Hole(offset, stored) for offset, stored in content]
        crcs = checksums(moved.pieces.get(number, ()), holes)
        for hole in holes:
            found = data[hole.offset : hole.offset + hole.stored.nbytes]
            assert found == spread.expected(hole.stored)
            assert crcs[hole.offset] == zlib.crc32(found)
            check_hole(paths[number], hole, crcs[hole.offset])


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_casts_across_chunks(spread: Spread, source: torch.dtype, target: torch.dtype, workers: int) -> None:
    elements = values(1000, source, 1)
    spread.tensor("a", elements, before=13)
    content = [[(5, all_of("a", elements, target))]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merger.io.transfer, "CHUNK", 96)
        require_right(spread, content, *carry_out(spread, content, workers=workers))


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("gap", [1, 2, 3, 5])
def test_elements_that_straddle_two_chunks(spread: Spread, gap: int, target: torch.dtype) -> None:
    """A place in a block need not be a multiple of the dtype's size: then a chunk ends within an element."""
    one, two = values(100, torch.float32, 1), values(77, torch.float32, 2)
    spread.tensors |= {"a": one, "b": two}
    spread.block([("a", 0, one), ("b", 0, two)], gap=gap)
    content = [[(0, all_of("a", one, target)), (1000, all_of("b", two, target))]]
    for chunk in (16, 20, 64):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(merger.io.transfer, "CHUNK", chunk)
            require_right(spread, content, *carry_out(spread, content))


def test_a_block_larger_than_a_chunk_at_an_odd_place(spread: Spread) -> None:
    elements = values(CHUNK // 4 * 2 + 12345, torch.float32, 3)
    spread.tensor("a", elements, before=3)
    content = [
        [(7, all_of("a", elements))],
        [(64, all_of("a", elements, torch.bfloat16))],
        [(1, wanted(CHUNK // 4 + 2, torch.float32, ("a", CHUNK // 8 + 1, CHUNK // 4, 1)))],
    ]
    told: list[int] = []
    paths, moved = carry_out(spread, content, told=told)
    require_right(spread, content, paths, moved)
    assert told == [CHUNK, CHUNK, 4 * elements.numel() - 2 * CHUNK]


@pytest.mark.parametrize("workers", [1, 4])
def test_more_files_than_are_kept_open(spread: Spread, workers: int) -> None:
    numel = 3 * merger.io.output_file.OPEN_FILES
    elements = values(2 * numel, torch.float32, 4)
    spread.tensor("a", elements)
    content = [[(0, wanted(2, torch.float32, ("a", 2 * i, 2, 0)))] for i in range(numel)]
    content[::7] = [[(3, all_of("a", elements))] for _ in content[::7]]
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    require_right(spread, content, *carry_out(spread, content, workers=workers))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_one_source_byte_goes_to_many_places(spread: Spread) -> None:
    elements = values(50, torch.float32, 5)
    spread.tensor("a", elements)
    content = [
        [
            (0, all_of("a", elements)),
            (200, wanted(60, torch.float64, ("a", 10, 20, 3), ("a", 10, 20, 30))),
            (1000, wanted(1, torch.bfloat16, ("a", 49, 1, 0))),
        ],
        [(0, all_of("a", elements))],
    ]
    require_right(spread, content, *carry_out(spread, content))


@st.composite
def layouts(
    draw: st.DrawFn,
) -> tuple[list[tuple[int, torch.dtype, list[int]]], list[list[PlannedTensor]], int, int, int]:
    """(tensors with their dtype and where they are cut, planned tensors by file, gap, chunk, workers)."""
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        numel = draw(st.integers(1, 70))
        cuts = sorted(draw(st.sets(st.integers(1, numel), max_size=4)) | {numel})
        tensors.append((numel, draw(st.sampled_from(DTYPES)), cuts))
    files: list[list[PlannedTensor]] = []
    for _ in range(draw(st.integers(1, 4))):
        content = []
        for _ in range(draw(st.integers(0, 3))):
            position, pieces = draw(st.integers(0, 3)), []
            for _ in range(draw(st.integers(0, 4))):
                number = draw(st.integers(0, len(tensors) - 1))
                start = draw(st.integers(0, tensors[number][0]))
                count = draw(st.integers(0, tensors[number][0] - start))
                pieces.append((f"t{number}", start, count, position))
                position += count + draw(st.integers(0, 3))
            content.append(wanted(position, draw(st.sampled_from(DTYPES)), *pieces))
        files.append(content)
    return (
        tensors,
        files,
        draw(st.integers(0, 9)),
        draw(st.sampled_from([1, 8, 16, 24, 37, 1000])),
        draw(st.sampled_from([1, 4])),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layouts())
def test_anything_from_anywhere_to_anywhere(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[list[tuple[int, torch.dtype, list[int]]], list[list[PlannedTensor]], int, int, int],
) -> None:
    tensors, files, gap, chunk, workers = case
    spread = Spread(tmp_path_factory.mktemp("any"))
    fragments = []
    for number, (numel, dtype, cuts) in enumerate(tensors):
        elements = spread.tensors[f"t{number}"] = values(numel, dtype, number)
        fragments += [
            (f"t{number}", start, elements[start:stop]) for start, stop in zip([0, *cuts[:-1]], cuts, strict=True)
        ]
    # Every other fragment shares a block with those of other tensors and dtypes.
    spread.block(fragments[::2], gap=gap, crc=True)
    for fragment in fragments[1::2]:
        spread.block([fragment], gap=gap, before=gap)
    content = []
    for planned in files:
        offset, places = gap, []
        for stored in planned:
            places.append((offset, stored))
            offset += stored.nbytes + gap
        content.append(places)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merger.io.transfer, "CHUNK", chunk)
        patch.setattr(merger.io.output_file, "OPEN_FILES", 2)
        told: list[int] = []
        paths, moved = carry_out(spread, content, workers=workers, told=told)
    # Planned tensors without elements share their place with the next one, and have no checksum of their own.
    solid = [[place for place in places if place[1].nbytes] for places in content]
    require_right(spread, solid, paths, moved)
    for path, places in zip(paths, content, strict=True):
        inside = {i for offset, stored in places for i in range(offset, offset + stored.nbytes)}
        assert not any(byte for i, byte in enumerate(path.read_bytes()) if i not in inside)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("place", [0, CHUNK + 5, 2 * CHUNK + 99])
def test_damage_without_anything_to_stand_in_ends_it(spread: Spread, place: int, workers: int) -> None:
    elements = values(CHUNK // 4 * 2 + 100, torch.float32, 6)
    block = spread.tensor("a", elements, before=50)
    spread.damage(block, place)
    with pytest.raises(DamagedError, match=rf"bytes 50 to {50 + block.nbytes} of source-0"):
        carry_out(spread, [[(0, all_of("a", elements))]], workers=workers)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("place", [0, 2 * CHUNK + 99])
def test_damage_that_something_can_stand_in_for_is_collected_and_nothing_else_is_lost(
    spread: Spread, place: int, workers: int, crc: bool
) -> None:
    elements = values(CHUNK // 4 * 2 + 100, torch.float32, 7)
    flaw = some_flaw(spread.root)
    bad = spread.tensor("bad", elements, crc=crc, flaw=flaw)
    others = {f"good{i}": values(1000 + i, torch.float32, i) for i in range(6)}
    for fqn, tensor in others.items():
        spread.tensor(fqn, tensor, crc=crc)
    spread.damage(bad, place)
    content = [[(0, all_of("bad", elements))], *([(0, all_of(fqn, tensor))] for fqn, tensor in others.items())]
    paths, moved = carry_out(spread, content, workers=workers, told=[])
    (problem,) = moved.flaws.values()
    assert moved.flaws.keys() == {flaw}
    assert "source-0 do not match their checksum" in problem
    assert 0 not in moved.pieces  # what is known to be wrong is not counted as written
    moved.flaws.clear()
    require_right(spread, [[], *content[1:]], paths, moved)


def test_all_flaws_are_collected(spread: Spread, tmp_path: Path) -> None:
    flaws = [some_flaw(tmp_path / str(i)) for i in range(5)]
    for i, flaw in enumerate(flaws):
        block = spread.tensor(f"t{i}", values(10, torch.float32, i), flaw=flaw)
        spread.damage(block, i)
    _, moved = carry_out(spread, [[(0, all_of(f"t{i}", spread.tensors[f"t{i}"])) for i in range(5)][:1]])
    assert moved.flaws.keys() == {flaws[0]}  # what nobody asked for is not read
    content = [[(100 * i, all_of(f"t{i}", spread.tensors[f"t{i}"])) for i in range(5)]]
    assert carry_out(spread, content, workers=4)[1].flaws.keys() == set(flaws)


@pytest.mark.parametrize("with_flaw", [False, True])
def test_a_file_that_ends_early(spread: Spread, with_flaw: bool) -> None:
    elements = values(100, torch.float32, 8)
    block = spread.tensor("a", elements, flaw=some_flaw(spread.root) if with_flaw else None)
    os.truncate(spread.root / block.path, 200)
    content = [[(0, all_of("a", elements))]]
    if with_flaw:
        assert "source-0 ends at byte 200" in next(iter(carry_out(spread, content)[1].flaws.values()))
    else:
        with pytest.raises(DamagedError, match=r"source-0.* 200"):
            carry_out(spread, content)


def test_a_file_that_is_gone_is_not_said_to_be_the_output(spread: Spread) -> None:
    elements = values(100, torch.float32, 8)
    block = spread.tensor("a", elements)
    (spread.root / block.path).unlink()
    with pytest.raises(StorageError, match="source-0"):
        carry_out(spread, [[(0, all_of("a", elements))]])


class Raw:
    """Reads without telling errors in our words."""

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("with_flaw", [False, True])
def test_an_error_of_the_system_while_reading_names_what_was_read(spread: Spread, with_flaw: bool) -> None:
    elements = values(10, torch.float32, 8)
    block = spread.tensor("a", elements, flaw=some_flaw(spread.root) if with_flaw else None)
    spread.extents = [replace(spread.extents[0], block=replace(block, files=Raw()))]
    content = [[(0, all_of("a", elements))]]
    if with_flaw:
        problems = carry_out(spread, content)[1].flaws.values()
        assert "cannot read source-0: Input/output error" in next(iter(problems))
    else:
        with pytest.raises(StorageError, match="block source-0: cannot read source-0"):
            carry_out(spread, content)


def test_an_output_that_cannot_be_written_is_named_and_is_no_flaw(spread: Spread) -> None:
    elements = values(10, torch.float32, 8)
    spread.tensor("a", elements, flaw=some_flaw(spread.root))
    plan = plan_transfer(spread.index, [(0, Hole(0, all_of("a", elements)))])
    with pytest.raises(OutputError, match=r"cannot write .*/nowhere: No such file or directory"):
        transfer(plan, [spread.root / "nowhere"], 1, lambda _: None)


@pytest.mark.parametrize("workers", [1, 4])
def test_what_progress_raises_ends_it(spread: Spread, workers: int) -> None:
    for i in range(20):
        spread.tensor(f"t{i}", values(100, torch.float32, i))
    content = [[(400 * i, all_of(f"t{i}", spread.tensors[f"t{i}"])) for i in range(20)]]

    class Stop(Exception):
        pass

    calls: list[int] = []

    def progress(count: int) -> None:
        calls.append(count)
        raise Stop

    spread.root.joinpath("out").write_bytes(bytes(8000))
    plan = plan_transfer(spread.index, [(0, Hole(offset, stored)) for offset, stored in content[0]])
    with pytest.raises(Stop):
        transfer(plan, [spread.root / "out"], workers, progress)
    assert len(calls) <= workers


def test_progress_is_never_told_by_two_threads_at_a_time(spread: Spread) -> None:
    for i in range(40):
        spread.tensor(f"t{i}", values(100, torch.float32, i))
    inside = threading.Lock()

    def progress(_: int) -> None:
        assert inside.acquire(blocking=False)
        inside.release()

    spread.root.joinpath("out").write_bytes(bytes(16000))
    holes = [(0, Hole(400 * i, all_of(f"t{i}", spread.tensors[f"t{i}"]))) for i in range(40)]
    transfer(plan_transfer(spread.index, holes), [spread.root / "out"], 4, progress)


def test_a_plan_wants_every_element(spread: Spread) -> None:
    spread.block([("a", 0, values(10, torch.float32, 1))])
    spread.block([("a", 12, values(10, torch.float32, 1))])
    with pytest.raises(MergeError, match=r"a/fp32: elements 10 to 22 are in no stored fragment"):
        plan_transfer(spread.index, [(0, Hole(0, wanted(22, torch.float32, ("a", 0, 22, 0))))])
    with pytest.raises(MergeError, match=r"nobody/fp32"):
        plan_transfer(spread.index, [(0, Hole(0, wanted(1, torch.float32, ("nobody", 0, 1, 0))))])


@pytest.mark.parametrize(("offset", "stop"), [(4, 10), (0, 11), (40, 10), (-4, 10)])
def test_an_extent_that_does_not_lie_in_its_block_is_refused(spread: Spread, offset: int, stop: int) -> None:
    """Otherwise what lies beyond would stay zero, and nobody would know."""
    block = spread.block([("a", 0, values(10, torch.float32, 1))])
    index = FragmentIndex([Extent("a", "fp32", 0, stop, "F32", block, offset)])
    with pytest.raises(DamagedError, match=r"a/fp32: elements 0 to \d+ do not lie in block source-0"):
        plan_transfer(index, [(0, Hole(0, wanted(stop, torch.float32, ("a", 0, stop, 0))))])


def test_what_was_not_filled_as_planned_is_refused(spread: Spread) -> None:
    elements = values(10, torch.float32, 1)
    spread.tensor("a", elements)
    content = [[(0, all_of("a", elements))]]
    _, moved = carry_out(spread, content)
    moved.pieces[0].pop()
    with pytest.raises(MergeError, match=r"0 of 40 bytes"):
        checksums(moved.pieces[0], [Hole(*content[0][0])])


@pytest.mark.parametrize("position", [0, 100, 399])
def test_a_hole_that_reads_back_otherwise(spread: Spread, position: int) -> None:
    elements = values(100, torch.float32, 9)
    spread.tensor("a", elements)
    hole = Hole(11, all_of("a", elements))
    (path,), moved = carry_out(spread, [[(11, hole.stored)]])
    crc = checksums(moved.pieces[0], [hole])[11]
    check_hole(path, hole, crc)
    data = bytearray(path.read_bytes())
    data[11 + position] ^= 1
    path.write_bytes(data)
    with pytest.raises(MergeError, match=str(path)):
        check_hole(path, hole, crc)
    path.write_bytes(data[:-1])
    with pytest.raises(MergeError, match=str(path)):
        check_hole(path, hole, crc)


def test_nothing_to_move(spread: Spread) -> None:
    assert transfer(TransferPlan({}), [], 4, lambda _: None) == TransferResult({}, {})


def test_the_first_error_ends_it_and_what_waits_is_not_begun() -> None:
    begun: list[int] = []

    def work(item: int, stop: threading.Event) -> None:
        begun.append(item)
        if item == 3:
            raise KeyError(item)

    with pytest.raises(KeyError):
        run_parallel(work, range(1000), 1)
    assert begun == [0, 1, 2, 3]


def test_work_that_takes_long_is_stopped_and_the_error_is_what_is_told() -> None:
    begun, before = threading.Barrier(4), set(threading.enumerate())  # other tests leave threads on storage that hangs

    def work(item: int, stop: threading.Event) -> None:
        begun.wait(timeout=180)
        if item == 3:
            raise KeyError(item)
        assert stop.wait(timeout=180)
        check_cancelled(stop)

    with pytest.raises(KeyError):
        run_parallel(work, range(1000), 4)
    assert set(threading.enumerate()) <= before


INTERRUPTED = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from merger.io.output_file import Hole
from merger.io.transfer import plan_transfer, transfer
from tests.support.extents import Spread, all_of
from store.storage.local import LocalFiles

class Slow(LocalFiles):
    def read_into(self, path, offset, target):
        time.sleep(0.05)
        super().read_into(path, offset, target)

spread = Spread(Path(sys.argv[1]))
elements = torch.zeros(100_000_000 // 4)
block = spread.tensor("a", elements)
object.__setattr__(block, "files", Slow(spread.root))
out = spread.root / "out"
out.write_bytes(b"")
plan = plan_transfer(spread.index, [(0, Hole(0, all_of("a", elements)))] )
told = []
def progress(count):
    told.append(count)
    if len(told) == 2:
        os.kill(os.getpid(), signal.SIGINT)
try:
    transfer(plan, [out], 2, progress)
except KeyboardInterrupt:
    print("interrupted", len(told), threading.active_count())
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=False, env=environment, timeout=180, capture_output=True, text=True)


def test_an_interrupt_does_not_wait_for_the_rest_of_a_large_block(tmp_path: Path) -> None:
    done = run(INTERRUPTED, str(tmp_path))
    assert done.stdout.startswith("interrupted"), done.stderr
    _, told, threads = done.stdout.split()
    assert int(told) < 10  # of 24 chunks
    assert int(threads) == 1


LIMITED = """
import resource, signal, sys
from pathlib import Path
import torch
from merger.io.output_file import Hole
from merger.io.output_file import OutputError
from merger.io.transfer import plan_transfer, transfer
from tests.support.extents import Spread, all_of, some_flaw
spread = Spread(Path(sys.argv[1]))
elements = torch.zeros(5000)
spread.tensor("a", elements, flaw=some_flaw(spread.root))
out = spread.root / "out"
out.write_bytes(b"")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    transfer(plan_transfer(spread.index, [(0, Hole(0, all_of("a", elements)))]), [out], 2, lambda _: None)
except OutputError as error:
    print(error)
"""


def test_a_device_that_takes_no_more(tmp_path: Path) -> None:
    done = run(LIMITED, str(tmp_path))
    assert done.stdout == f"cannot write {tmp_path / 'out'}: File too large\n", done.stderr


MEASURED = """
import sys, threading, time
from pathlib import Path
import torch, xxhash
from merger.io.blocks import Block, Extent, xxh3
from merger.io.output_file import Hole
from merger.io.transfer import run_parallel
from merger.io.transfer import check_hole, checksums, plan_transfer, transfer
from store.fragments import FragmentIndex
from store.storage.local import LocalFiles
from tests.support.extents import all_of, wanted

root, workers = Path(sys.argv[1]), int(sys.argv[2])
block_bytes, blocks = 300_000_000, 2
state = xxhash.xxh3_128()
with (root / "source").open("wb") as file:
    for _ in range(block_bytes // 1_000_000):
        piece = b"\\x3f" * 1_000_000
        state.update(piece)
        file.write(piece)
numel = block_bytes // 4
extents = []
for i in range(blocks):
    block = Block(LocalFiles(root), "source", 0, block_bytes, xxh3, state.hexdigest(), "source")
    extents.append(Extent(f"t{i}", "fp32", 0, numel, "F32", block, 0))
index = FragmentIndex(extents)
paths, holes = [root / "out-0", root / "out-1"], []
for i, path in enumerate(paths):
    path.write_bytes(b"")
    holes.append((i, Hole(3, wanted(numel, torch.bfloat16 if i else torch.float32, (f"t{i}", 0, numel, 0)))))

def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

warm = torch.zeros(10).to(torch.bfloat16)
Path("/proc/self/clear_refs").write_text("5")
before = field("VmRSS")
moved = transfer(plan_transfer(index, holes), paths, workers, lambda _: None)
assert not moved.flaws
for number, hole in holes:
    check_hole(paths[number], hole, checksums(moved.pieces[number], [hole])[hole.offset])
print(field("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 4])
def test_memory_does_not_grow_with_what_is_moved(tmp_path: Path, workers: int) -> None:
    done = run(MEASURED, str(tmp_path), str(workers))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100_000_000


def test_blocks_of_one_file_are_told_apart(spread: Spread) -> None:
    """Two blocks may name the same bytes: each is read and checked for itself."""
    elements = values(10, torch.float32, 1)
    one = spread.tensor("a", elements)
    other = Block(one.files, one.path, one.offset, one.nbytes, one.checksum, "0" * 32, "the other")
    spread.extents.append(Extent("b", "fp32", 0, 10, "F32", other, 0))
    spread.tensors["b"] = elements
    require_right(spread, [[(0, all_of("a", elements))]], *carry_out(spread, [[(0, all_of("a", elements))]]))
    with pytest.raises(DamagedError, match="the other"):
        carry_out(spread, [[(0, all_of("b", elements))]])
