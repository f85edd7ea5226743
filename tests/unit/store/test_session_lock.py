from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.errors import StorageError, StoreInUseError
from store.session import StoreLock, lock_holder

HOLD = """
import sys, time
from pathlib import Path
from store.session import StoreLock
lock = StoreLock(Path(sys.argv[1]), 0)
print("held", flush=True)
sys.stdin.readline()
lock.release()
print("released", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()


def test_a_second_process_is_refused_and_told_by_whom(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(StoreInUseError, match=f"process {holder.pid}"):
        StoreLock(tmp_path, 0)
    assert lock_holder(tmp_path) == holder.pid


def test_looking_for_the_holder_does_not_free_the_store(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    for _ in range(3):
        assert lock_holder(tmp_path) == holder.pid


def test_released_means_free(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "released\n"
    StoreLock(tmp_path, 0).release()


def test_kill_9_frees_the_store(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = StoreLock(tmp_path, 0)
    assert lock_holder(tmp_path) == os.getpid()
    lock.release()


def test_it_waits_for_a_holder_that_lets_go(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None
    release = threading.Timer(0.2, holder.stdin.write, ["\n"])
    release.start()
    StoreLock(tmp_path, 30).release()
    release.join()


def test_once_in_a_process(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path, 0)
    with pytest.raises(StoreInUseError, match="already in this process"):
        StoreLock(tmp_path / ".." / tmp_path.name, 0)
    assert lock_holder(tmp_path) == os.getpid()
    lock.release()
    lock.release()
    StoreLock(tmp_path, 0).release()


def test_a_forked_child_does_not_hold_it(tmp_path: Path) -> None:
    """A data-loader worker that outlives the job must not keep the store; nor free it while the job lives."""
    lock = StoreLock(tmp_path, 0)
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    child = os.fork()
    if child == 0:
        seen = lock_holder(tmp_path) == os.getppid()
        os.write(from_child, b"1" if seen else b"0")
        os.close(from_parent)
        os.read(to_child, 1)
        os._exit(0)
    try:
        assert os.read(to_parent, 1) == b"1", "the child takes itself for the holder"
        assert subprocess.run([sys.executable, "-c", TRY, str(tmp_path)], check=False, cwd=ROOT).returncode == 3
        lock.release()
        assert subprocess.run([sys.executable, "-c", TRY, str(tmp_path)], check=False, cwd=ROOT).returncode == 0
    finally:
        for descriptor in (to_child, from_parent, to_parent, from_child):
            os.close(descriptor)
        os.waitpid(child, 0)


ROOT = Path(__file__).parents[3]
TRY = """
import sys
from pathlib import Path
from store.errors import StoreInUseError
from store.session import StoreLock
try:
    StoreLock(Path(sys.argv[1]), 0)
except StoreInUseError:
    sys.exit(3)
"""


def test_nobody_holds_what_is_not_there(tmp_path: Path) -> None:
    assert lock_holder(tmp_path) is None
    assert lock_holder(tmp_path / "no") is None
    with pytest.raises(StorageError, match="cannot open"):
        StoreLock(tmp_path / "no", 0)


def test_a_symbolic_link_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("x")
    (tmp_path / "LOCK").symlink_to(tmp_path / "victim")
    with pytest.raises(StorageError):
        StoreLock(tmp_path, 0)
