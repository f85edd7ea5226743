"""From planned files to a directory: complete, durable, read back; and told rightly where it cannot be."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from merger.checkpoint import PlannedTensor
from merger.io.output_file import Container, Hole, OutFile, VerbatimFile
from merger.merge import produce
from merger.writers.safetensors import SafetensorsFile
from merger.writers.torch_zip import PtFile
from store.errors import DamagedError, MergeError, StorageError
from tests.support.extents import Spread, all_of, some_flaw, values
from tests.support.launch import python
from tests.support.slow import others_slow

ROOT = Path(__file__).parents[3]


@pytest.fixture
def spread(tmp_path: Path) -> Spread:
    (tmp_path / "source").mkdir()
    return Spread(tmp_path / "source")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def two_tensors(spread: Spread) -> tuple[OutFile, ...]:
    one, two = values(1000, torch.float32, 1), values(77, torch.bfloat16, 2)
    spread.tensor("one", one)
    spread.tensor("two", two)
    tied = all_of("one", one)
    return (
        OutFile("deep/er/x.pt", PtFile({"a": tied, "b": [tied, all_of("two", two)], "c": torch.ones(3), "d": 1})),
        OutFile("x.safetensors", SafetensorsFile({"one": all_of("one", one, torch.bfloat16)}, {"format": "pt"})),
        OutFile("script.py", VerbatimFile(b"print()"), 0o755),
        OutFile("sealed.txt", VerbatimFile(b"text"), 0o444),
    )


@pytest.mark.parametrize("workers", [1, 4])
def test_everything_is_there(spread: Spread, folder: Path, workers: int) -> None:
    told: list[int] = []
    written, flaws, _ = produce(folder, two_tensors(spread), spread.index, workers, told.append)
    assert flaws == {}
    assert sum(told) == 4154
    found = torch.load(folder / "deep/er/x.pt", weights_only=True)
    assert torch.equal(found["a"], spread.tensors["one"]) and torch.equal(found["b"][1], spread.tensors["two"])
    assert found["a"].data_ptr() == found["b"][0].data_ptr()
    assert torch.equal(load_file(folder / "x.safetensors")["one"], spread.tensors["one"].to(torch.bfloat16))
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert written == sum(path.stat().st_size for path in files)
    modes = {path.name: path.stat().st_mode & 0o777 for path in files}
    assert modes == {"x.pt": 0o644, "x.safetensors": 0o644, "script.py": 0o755, "sealed.txt": 0o444}


AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from merger.io.output_file import OutFile
from merger.io.output_file import VerbatimFile
from merger.merge import produce
from store.fragments import FragmentIndex
from tests.support.slow import others_slow
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
sealed = OutFile("sealed", VerbatimFile(b"text"), 0o444)
print(produce(Path(sys.argv[1]), [sealed], FragmentIndex([]), 1, lambda _: None))
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=False, env=environment, timeout=180, capture_output=True, text=True)


def test_a_file_that_nobody_may_write_to_is_written_by_a_user_without_privileges() -> None:
    import tempfile

    # Not below pytest's own directories, which other users cannot enter.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        done = run(AS_ANOTHER_USER, name)
        assert done.stdout == "(4, {}, {})\n", done.stderr


def test_a_version_that_is_not_whole_is_told_and_nothing_is_finished(spread: Spread, folder: Path) -> None:
    files = two_tensors(spread)
    flaw = some_flaw(spread.root)
    spread.damage(spread.tensor("bad", values(10, torch.float32, 3), flaw=flaw), 7)
    files = (*files, OutFile("bad.pt", PtFile({"a": all_of("bad", spread.tensors["bad"])})))
    written, flaws, _ = produce(folder, files, spread.index, 2, lambda _: None)
    assert (written, flaws.keys()) == (0, {flaw})


def test_damage_of_a_foreign_source_names_the_source(spread: Spread, folder: Path) -> None:
    files = two_tensors(spread)
    spread.damage(spread.blocks[0], 0)
    with pytest.raises(DamagedError, match="bytes 0 to 4000 of source-0"):
        produce(folder, files, spread.index, 2, lambda _: None)


def test_a_source_that_is_gone_is_never_said_to_be_an_output(spread: Spread, folder: Path) -> None:
    files = two_tensors(spread)
    (spread.root / spread.blocks[0].path).unlink()
    with pytest.raises(StorageError) as caught:
        produce(folder, files, spread.index, 2, lambda _: None)
    assert str(caught.value).startswith(f"cannot read {spread.root}/source-0")
    assert "write" not in str(caught.value)


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/x", "a\0b", "", "a//b", ".", "a/."])
def test_a_path_that_leaves_the_output_is_refused(spread: Spread, folder: Path, path: str) -> None:
    with pytest.raises(MergeError, match="is not a valid path inside the output"):
        produce(folder, [OutFile(path, VerbatimFile(b"data"))], spread.index, 1, lambda _: None)
    assert list(folder.parent.rglob("x")) == []


def test_two_files_of_one_name_are_refused(spread: Spread, folder: Path) -> None:
    with pytest.raises(MergeError, match="two files of the output have the path a/x"):
        produce(
            folder,
            [OutFile("a/x", VerbatimFile(b"1")), OutFile("a/x", VerbatimFile(b"2"))],
            spread.index,
            1,
            lambda _: 0,
        )


def test_a_device_without_room_is_told_before_anything_is_written(spread: Spread, folder: Path) -> None:
    planned = SafetensorsFile({"a": PlannedTensor((1 << 60,), torch.uint8, ())}, {})
    with pytest.raises(StorageError, match=r"needs \d+ bytes in .*, but \d+ are free"):
        produce(folder, [OutFile("x", planned)], spread.index, 1, lambda _: None)
    assert list(folder.iterdir()) == []


LIMITED = """
import resource, signal, sys
from pathlib import Path
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from merger.io.output_file import OutFile
from merger.writers.dcp import DcpFile, Item
from merger.writers.torch_zip import PtFile
from merger.writers.safetensors import SafetensorsFile
from merger.io.output_file import VerbatimFile
from merger.merge import produce
from store.errors import StorageError
from tests.support.extents import Spread, all_of
root = Path(sys.argv[1])
spread = Spread(root)
elements = torch.zeros(5000)
spread.tensor("a", elements)
stored = all_of("a", elements)
kinds = {"pt": PtFile({"a": stored}), "verbatim": VerbatimFile(bytes(5000))}
kinds["dcp"] = DcpFile((Item(MetadataIndex("a", torch.Size([0])), elements + 1), Item(MetadataIndex("b"), stored)))
kinds["safetensors"] = SafetensorsFile({"a": stored}, {})
(root / "out").mkdir()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), limits[1]))
try:
    produce(root / "out", [OutFile("x", kinds[sys.argv[2]])], spread.index, 2, lambda _: None)
except StorageError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)  # what is printed goes to a file, too
    print(error)
"""


@pytest.mark.parametrize("limit", [*(pytest.param(at, marks=pytest.mark.slow) for at in (1, 100, 600)), 3000])
@pytest.mark.parametrize("kind", others_slow(["verbatim", "pt", "dcp", "safetensors"]))
def test_a_device_that_takes_no_more(tmp_path: Path, kind: str, limit: int) -> None:
    """Whatever wrote the file, and wherever in it: the system's own words, and what to type."""
    (tmp_path / "limited.py").write_text(LIMITED)
    done = python([tmp_path / "limited.py", tmp_path, kind, limit], tmp_path)
    told = f"cannot write {tmp_path / 'out' / 'x'}: File too large; raise `ulimit -f`, or name another output directory"
    assert done.stdout.startswith(told), done.stdout + done.stderr
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (errno.ENOSPC, "No space left on device; free space or name another"),
        (errno.EDQUOT, "free space or name another"),
        (errno.EROFS, "Read-only file system; check the mount"),
        (errno.EACCES, "Permission denied; check its owner and mode"),
    ],
)
def test_what_to_do_follows_from_what_the_system_says(spread: Spread, folder: Path, code: int, told: str) -> None:
    class Refused(VerbatimFile):
        def make(self, path: Path) -> tuple[Hole, ...]:
            raise OSError(code, os.strerror(code))

    with pytest.raises(StorageError, match=rf"cannot write {folder}/x: .*{told}"):
        produce(folder, [OutFile("x", Refused(b"data"))], spread.index, 1, lambda _: None)


@dataclass
class Spoiled:
    """A container whose file is changed by the storage under it, between sealing and reading back."""

    inner: Container
    spoil: Callable[[Path], None]

    def make(self, path: Path) -> tuple[Hole, ...]:
        return self.inner.make(path)

    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        self.inner.seal(path, checksums)
        self.spoil(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("position", [3, -3, "middle"])
def test_what_does_not_read_back_is_not_a_result(
    spread: Spread, folder: Path, number: int, position: int | str
) -> None:
    def spoil(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position if isinstance(position, int) else len(data) // 2] ^= 0x20
        path.write_bytes(data)

    files = list(two_tensors(spread))
    files[number] = OutFile(files[number].path, Spoiled(files[number].container, spoil))
    with pytest.raises(MergeError, match=files[number].path):
        produce(folder, files, spread.index, 2, lambda _: None)


def test_an_output_that_cannot_be_read_back_is_told_so(spread: Spread, folder: Path) -> None:
    class Unreadable(VerbatimFile):
        def check(self, path: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(StorageError, match=f"cannot read back {folder}/x"):
        produce(folder, [OutFile("x", Unreadable(b"data"))], spread.index, 1, lambda _: None)
    gone = OutFile("y", Spoiled(VerbatimFile(b"data"), Path.unlink))
    with pytest.raises(StorageError, match=f"{folder}/y"):
        produce(folder, [gone], spread.index, 1, lambda _: None)


def test_every_file_is_made_durable(spread: Spread, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of files are the caller's; what is in them is synced after the last byte and the mode were set."""
    synced: dict[str, tuple[int, int]] = {}
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = (status.st_mtime_ns, status.st_ctime_ns)  # noqa: PTH115
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    produce(folder, two_tensors(spread), spread.index, 2, lambda _: None)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert synced == {str(path): (path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in files}
