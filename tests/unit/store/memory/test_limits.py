"""Shared memory that is too small, filled by others, read-only or limited: said before it is used, never SIGBUS."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from store.errors import StorageError
from store.memory.arena import Arena
from store.memory.limits import cgroup_free_bytes, free_bytes, reserve
from store.names import SaveId
from tests.support.cli import environment
from tests.support.control_groups import group
from tests.support.made_versions import keep, tier_at, values, wanted
from tests.support.mounts import tmpfs

MIB = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 MiB, as a container has it."""
    with tmpfs(tmp_path / "small", "64m") as place:
        yield place


def in_process(script: str, place: Path) -> str:
    """What the script printed, in a process of its own: SIGBUS would end this one."""
    done = subprocess.run(
        [sys.executable, "-c", _BEFORE + script, str(place)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=180,
        check=False,
    )
    assert done.returncode != -signal.SIGBUS, "SIGBUS"
    assert done.returncode == 0, done.stderr
    return done.stdout


_BEFORE = """
import sys
from pathlib import Path
from store.errors import StorageError
from store.memory.arena import Arena
from store.names import SaveId
from tests.support.made_versions import keep, tier_at, values, wanted
MIB = 1 << 20
place = Path(sys.argv[1])
tier = tier_at(place)
def fill(memory, byte):
    for start in range(0, len(memory), MIB):
        memory[start:start + MIB] = bytes([byte]) * len(memory[start:start + MIB])
def hog():
    with open(place / "hog", "wb", buffering=0) as file:
        try:
            while file.write(b"h" * MIB):
                pass
        except OSError:
            pass
"""


@pytest.mark.needs_root
def test_too_small_is_said_before_anything_is_written(small: Path) -> None:
    said = in_process(
        """
arena = Arena(tier, 1, 0)
fill(arena.room(0, 40 * MIB), 1)
try:
    arena.room(1, 40 * MIB)
except StorageError as error:
    print(error)
assert not tier.generation(1).payload(0, 1).stat().st_blocks
arena.close(remove=True)
assert not list(tier.home.rglob("*"))
""",
        small,
    )
    assert "no room in memory for 41.9 MB more" in said
    assert "the filesystem has 25." in said
    assert "--shm-size" in said and "versions: 1" in said and "enabled: false" in said


@pytest.mark.needs_root
def test_others_may_fill_it_between_two_versions(small: Path) -> None:
    in_process(
        """
arena = Arena(tier, 1, 0)
one, two = arena.room(0, 20 * MIB), arena.room(1, 20 * MIB)
keep(arena, 0, SaveId(1, 1))
hog()
fill(arena.room(1, 20 * MIB), 2)          # reserved: nobody can take it
try:
    arena.room(1, 24 * MIB)
    raise SystemExit("there was room?")
except StorageError as error:
    print(error)
assert values(tier, SaveId(1, 1)) == wanted(SaveId(1, 1))
fill(arena.room(1, 20 * MIB), 3)
assert values(tier, SaveId(1, 1)) == wanted(SaveId(1, 1))
""",
        small,
    )


@pytest.mark.needs_root
def test_no_room_for_the_record_leaves_the_other_version(small: Path) -> None:
    in_process(
        """
arena = Arena(tier, 1, 0)
arena.room(1, 4096)
keep(arena, 0, SaveId(1, 1))
hog()
try:
    keep(arena, 1, SaveId(2, 1))
    raise SystemExit("there was room?")
except StorageError as error:
    print(error)
assert values(tier, SaveId(1, 1)) == wanted(SaveId(1, 1))
assert not list(tier.home.rglob("*.new"))
""",
        small,
    )


@pytest.mark.needs_root
def test_what_a_killed_process_made_long_but_not_real_is_backed_before_use(small: Path) -> None:
    """Killed between making a file long and having it backed: as long as needed, and not a page of it there."""
    in_process(
        """
place_1 = tier.generation(1)
place_1.make()
with open(place_1.payload(0, 0), "wb") as file:
    file.truncate(40 * MIB)
arena = Arena(tier, 2, 0)
arena.take_over(None)
hog()
try:
    fill(arena.room(0, 40 * MIB), 1)
    raise SystemExit("there was room?")
except StorageError:
    pass
(place / "hog").unlink()
fill(arena.room(0, 40 * MIB), 1)
""",
        small,
    )


@pytest.mark.needs_root
def test_no_more_inodes_is_a_typed_error(small: Path) -> None:
    subprocess.run(["mount", "-o", "remount,nr_inodes=5", small], check=True)
    said = in_process(
        """
try:
    keep(Arena(tier, 1, 0), 0, SaveId(1, 1))
except StorageError as error:
    print(error)
""",
        small,
    )
    assert "No space left" in said


@pytest.mark.needs_root
def test_read_only_is_a_typed_error_and_is_still_read(small: Path) -> None:
    said = in_process(
        """
arena = Arena(tier, 1, 0)
keep(arena, 0, SaveId(1, 1))
arena.close(remove=False)
""",
        small,
    )
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    said = in_process(
        """
from store.memory.cleanup import clear_old
assert values(tier, SaveId(1, 1)) == wanted(SaveId(1, 1))
for attempt in (lambda: Arena(tier, 2, 0), lambda: Arena(tier, 1, 0)):
    try:
        attempt()
    except StorageError as error:
        print(error)
""",
        small,
    )
    assert said.count("Read-only file system") == 2


def test_a_file_may_not_be_longer_than_allowed(tmp_path: Path) -> None:
    """RLIMIT_FSIZE: a signal that would end the process where it is not ignored, and python ignores it."""
    in_process(
        """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
arena = Arena(tier, 1, 0)
try:
    arena.room(0, 2 * MIB)
    raise SystemExit("there was room?")
except StorageError as error:
    assert "no room" in str(error) or "refused" in str(error), error
keep(arena, 0, SaveId(1, 1))
""",
        tmp_path,
    )


def test_more_than_the_machine_has_is_refused_by_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    with pytest.raises(StorageError, match="no room in memory for"):
        reserve(descriptor, 1 << 60, path)
    assert os.fstat(descriptor).st_size == 0
    os.close(descriptor)
    assert 0 < free_bytes(tmp_path) < 1 << 60


def test_memory_that_is_there_is_not_asked_for_again(tmp_path: Path) -> None:
    tier = tier_at(tmp_path / "shm")
    arena = Arena(tier, 1, 0)
    memory = arena.room(0, MIB)
    keep(arena, 0, SaveId(1, 1))
    assert arena.room(0, MIB) is memory
    keep(arena, 0, SaveId(2, 1))
    assert values(tier, SaveId(2, 1)) == wanted(SaveId(2, 1))
    arena.close(remove=True)


@pytest.mark.parametrize("hole", [None, 0, 20 << 20, 40 * MIB - 4096])
def test_only_a_file_with_a_hole_is_backed_again(
    small: Path, monkeypatch: pytest.MonkeyPatch, hole: int | None
) -> None:
    path, nbytes = small / "payload", 40 * MIB
    path.write_bytes(b"x" * nbytes)
    asked = list[int]()
    kept = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *given: (asked.append(given[1]), kept(*given)))
    with path.open("r+b") as file:
        if hole is not None:
            subprocess.run(["fallocate", "-p", "-o", str(hole), "-l", "4096", path], check=True)
            assert os.fstat(file.fileno()).st_blocks * 512 == nbytes - 4096
        reserve(file.fileno(), nbytes, path)
        assert os.fstat(file.fileno()).st_blocks * 512 == nbytes
    assert len(asked) == (0 if hole is None else 5)


RANK = """
import os, sys
from pathlib import Path
from store.errors import StorageError
from store.memory.limits import reserve
Path(sys.argv[1]).write_text(str(os.getpid()))
path = Path(sys.argv[2])
descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
print("ready", flush=True)
sys.stdin.readline()
try:
    reserve(descriptor, 200 << 20, path)
    print("reserved", flush=True)
except StorageError as error:
    print(os.fstat(descriptor).st_size, error, flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_ranks_that_reserve_at_the_same_time_are_refused_and_not_killed(tmp_path: Path) -> None:
    """Each alone would fit into the control group, whose limit brings the out-of-memory killer for all of them."""
    with tmpfs(tmp_path / "shm", "2g") as place, group(700 * MIB) as limited:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(limited / "cgroup.procs"), str(place / str(rank))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment(),
            )
            for rank in range(4)
        ]
        assert [line(one) for one in ranks] == ["ready"] * 4
        for one in ranks:
            say(one)
        told = [line(one) for one in ranks]
        for one in ranks:
            say(one)
        assert [one.wait(180) for one in ranks] == [0] * 4, "the kernel killed some"
        assert any(text.startswith("0 no room in memory for") for text in told), told
        assert set(told) - {"reserved"} == {text for text in told if "the control group may take" in text}
        for path in place.iterdir():
            path.unlink()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write("go\n")
        process.stdin.flush()


# ---- control groups, read from files as the kernel has them


def put(place: Path, **files: object) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (place / f"memory.{name}").write_text(f"{value}\n")


def own(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "cgroup"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_the_least_that_any_group_above_leaves_counts(tmp_path: Path) -> None:
    root = tmp_path / "sys"
    put(root / "a", max=1000, current=100, stat="anon 5\ninactive_file 30\nactive_file 7")
    put(root / "a" / "b", max="max", current=90, stat="")
    put(root / "a" / "b" / "c", max=5000, current=10, stat="inactive_file 0")
    assert cgroup_free_bytes(root, own(tmp_path, "0::/a/b/c")) == 1000 - 100 + 30


def test_version_1_of_control_groups_counts_too(tmp_path: Path) -> None:
    root = tmp_path / "sys"
    job = root / "memory" / "job"
    put(job, limit_in_bytes=700, usage_in_bytes=100, stat="inactive_file 1\ntotal_inactive_file 50")
    put(root / "memory", limit_in_bytes=9223372036854771712, usage_in_bytes=5, stat="")
    lines = ("9:name=systemd:/", "5:devices:/", "4:memory:/job", "0::/")
    assert cgroup_free_bytes(root, own(tmp_path, *lines)) == 650


def test_without_limits_or_groups_nothing_is_known(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path, tmp_path / "nothing") is None
    assert cgroup_free_bytes(tmp_path, own(tmp_path, "0::/")) is None
    put(tmp_path / "sys" / "a", max="max", current=1, stat="")
    assert cgroup_free_bytes(tmp_path / "sys", own(tmp_path, "0::/a", "rubbish")) is None


def test_a_group_of_a_container_is_read_from_its_root(tmp_path: Path) -> None:
    """The path in /proc is the host's, and in the container only the root of it is there."""
    put(tmp_path / "sys", max=400, current=100, stat="")
    assert cgroup_free_bytes(tmp_path / "sys", own(tmp_path, "0::/kubepods/pod1/abc")) == 300
