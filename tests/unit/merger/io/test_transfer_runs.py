"""Run a transfer on several threads: progress, errors, interrupts, a full device and bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from merger.io.output_file import Hole, OutputError
from merger.io.transfer import check_cancelled, plan_transfer, run_parallel, transfer
from tests.support.extents import Spread, all_of, some_flaw, values

ROOT = Path(__file__).parents[4]


def test_an_output_that_cannot_be_written_is_an_error_and_not_a_flaw(spread: Spread) -> None:
    elements = values(10, torch.float32, 8)
    spread.tensor("a", elements, flaw=some_flaw(spread.root))
    plan = plan_transfer(spread.index, [(0, Hole(0, all_of("a", elements)))])
    with pytest.raises(OutputError, match=r"cannot write .*/nowhere: No such file or directory"):
        transfer(plan, [spread.root / "nowhere"], 1, lambda _: None)


@pytest.mark.parametrize("workers", [1, 4])
def test_an_exception_of_progress_ends_the_transfer(spread: Spread, workers: int) -> None:
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


def test_progress_is_called_by_one_thread_at_a_time(spread: Spread) -> None:
    for i in range(40):
        spread.tensor(f"t{i}", values(100, torch.float32, i))
    inside = threading.Lock()

    def progress(_: int) -> None:
        assert inside.acquire(blocking=False)
        inside.release()

    spread.root.joinpath("out").write_bytes(bytes(16000))
    holes = [(0, Hole(400 * i, all_of(f"t{i}", spread.tensors[f"t{i}"]))) for i in range(40)]
    transfer(plan_transfer(spread.index, holes), [spread.root / "out"], 4, progress)


def test_run_parallel_starts_no_task_after_an_error() -> None:
    begun: list[int] = []

    def work(item: int, stop: threading.Event) -> None:
        begun.append(item)
        if item == 3:
            raise KeyError(item)

    with pytest.raises(KeyError):
        run_parallel(work, range(1000), 1)
    assert begun == [0, 1, 2, 3]


def test_run_parallel_cancels_running_tasks_and_raises_the_first_error() -> None:
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
reported = []
def progress(count):
    reported.append(count)
    if len(reported) == 2:
        os.kill(os.getpid(), signal.SIGINT)
try:
    transfer(plan, [out], 2, progress)
except KeyboardInterrupt:
    print("interrupted", len(reported), threading.active_count())
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, with the command-line arguments."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=False, env=environment, timeout=180, capture_output=True, text=True)


def test_an_interrupt_ends_the_transfer_of_a_large_block(tmp_path: Path) -> None:
    done = run(INTERRUPTED, str(tmp_path))
    assert done.stdout.startswith("interrupted"), done.stderr
    _, reported, threads = done.stdout.split()
    assert int(reported) < 10  # of 24 chunks
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


@pytest.mark.slow
def test_a_full_device_names_the_output(tmp_path: Path) -> None:
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
def test_memory_does_not_grow_with_the_size_of_the_transfer(tmp_path: Path, workers: int) -> None:
    done = run(MEASURED, str(tmp_path), str(workers))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100_000_000
