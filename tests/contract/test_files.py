"""What every implementation of ``store.storage.local.Files`` does: the real one and the simulated disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from store.errors import DamagedError, ExistsError, MissingError, StorageError
from store.storage.local import Files, LocalFiles
from tests.crash.simulated import SimulatedFiles

ESCAPES = ["../x", "a/../x", "/etc/passwd", "a//b", "./x", "a/.", "..", ".", "a/", "x\0y"]


@pytest.fixture(params=["local", "simulated"])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    """A root that does not exist yet."""
    return LocalFiles(tmp_path / "deep" / "root") if request.param == "local" else SimulatedFiles(exists=False)


@pytest.fixture
def files(fresh: Files) -> Files:
    fresh.make_dir("")
    return fresh


def put(files: Files, path: str, data: bytes = b"data") -> None:
    file = files.create(path)
    file.write(data)
    file.sync()
    file.close()


def test_root_is_made_once(fresh: Files) -> None:
    with pytest.raises(MissingError):
        fresh.list_dir("")
    assert fresh.make_dir("") is True
    assert fresh.make_dir("") is False
    assert fresh.list_dir("") == []


def test_what_is_written_is_read(files: Files) -> None:
    file = files.create("a")
    file.write(b"one ")
    file.write(bytearray(b"two "))
    file.write(memoryview(b"three"))
    file.write(b"")
    file.sync()
    file.close()
    assert files.read("a", 13) == b"one two three"
    assert files.size("a") == 13
    target = bytearray(5)
    files.read_into("a", 4, memoryview(target))
    assert target == b"two t"


def test_read_into_fills_memory_of_any_shape(files: Files) -> None:
    import numpy as np

    put(files, "a", np.arange(6, dtype="<f4").tobytes())
    target = np.zeros((2, 3), dtype="<f4")
    files.read_into("a", 0, memoryview(target))
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_write_takes_memory_of_any_shape(files: Files) -> None:
    import numpy as np

    file = files.create("a")
    file.write(memoryview(np.arange(6, dtype="<f4").reshape(2, 3)))
    file.write(memoryview(np.zeros(0, dtype="<f4")))
    file.write(memoryview(np.zeros((0, 3), dtype="<f4")))
    file.close()
    assert files.size("a") == 24
    files.read_into("a", 0, memoryview(np.zeros((0, 3), dtype="<f4")))


def test_limit_is_the_largest_size_that_is_read(files: Files) -> None:
    put(files, "a", b"12345")
    assert files.read("a", 5) == b"12345"
    with pytest.raises(DamagedError):
        files.read("a", 4)


@pytest.mark.parametrize("offset", [3, 5, 6, 1 << 40])
def test_read_beyond_the_end_is_damage(files: Files, offset: int) -> None:
    put(files, "a", b"12345")
    with pytest.raises(DamagedError):
        files.read_into("a", offset, memoryview(bytearray(3)))


def test_reading_nothing_is_fine_anywhere(files: Files) -> None:
    put(files, "a", b"")
    assert files.read("a", 0) == b""
    files.read_into("a", 0, memoryview(bytearray(0)))


def test_create_never_replaces(files: Files) -> None:
    put(files, "a", b"old")
    with pytest.raises(ExistsError):
        files.create("a")
    assert files.read("a", 9) == b"old"


def test_link_gives_a_second_name_and_never_replaces(files: Files) -> None:
    put(files, "a", b"new")
    put(files, "b", b"old")
    with pytest.raises(ExistsError):
        files.link("a", "b")
    files.link("a", "c")
    files.unlink("a")
    assert files.read("b", 9) == b"old"
    assert files.read("c", 9) == b"new"
    assert files.list_dir("") == ["b", "c"]


def test_rename_replaces(files: Files) -> None:
    put(files, "a", b"new")
    put(files, "b", b"old")
    files.rename("a", "b")
    assert files.list_dir("") == ["b"]
    assert files.read("b", 9) == b"new"


def test_directories(files: Files) -> None:
    assert files.make_dir("d") is True
    assert files.make_dir("d") is False
    assert files.make_dir("d/e") is True
    put(files, "d/e/f")
    files.sync_dir("")
    files.sync_dir("d/e")
    assert files.list_dir("d") == ["e"]
    with pytest.raises(StorageError):
        files.remove_dir("d/e")
    files.unlink("d/e/f")
    files.remove_dir("d/e")
    assert files.list_dir("d") == []


def test_names_are_listed_in_order(files: Files) -> None:
    for name in ("b", "a", "c", "B"):
        put(files, name)
    assert files.list_dir("") == ["B", "a", "b", "c"]


MISSING: dict[str, Callable[[Files], object]] = {
    "link": lambda files: files.link("no", "x"),
    "rename": lambda files: files.rename("no", "x"),
    "unlink": lambda files: files.unlink("no"),
    "remove_dir": lambda files: files.remove_dir("no"),
    "sync_dir": lambda files: files.sync_dir("no"),
    "list_dir": lambda files: files.list_dir("no"),
    "size": lambda files: files.size("no"),
    "read": lambda files: files.read("no", 9),
    "read_into": lambda files: files.read_into("no", 0, memoryview(bytearray(1))),
    "create in it": lambda files: files.create("no/x"),
    "make_dir in it": lambda files: files.make_dir("no/x"),
}


@pytest.mark.parametrize("what", MISSING)
def test_missing(files: Files, what: str) -> None:
    with pytest.raises(MissingError):
        MISSING[what](files)


NOT_A_FILE: dict[str, Callable[[Files], object]] = {
    "size": lambda files: files.size("d"),
    "read": lambda files: files.read("d", 9),
    "read_into": lambda files: files.read_into("d", 0, memoryview(bytearray(1))),
}


@pytest.mark.parametrize("what", NOT_A_FILE)
def test_a_directory_in_place_of_a_file_is_damage(files: Files, what: str) -> None:
    files.make_dir("d")
    with pytest.raises(DamagedError):
        NOT_A_FILE[what](files)


REFUSED: dict[str, Callable[[Files], object]] = {
    "unlink a directory": lambda files: files.unlink("d"),
    "remove a file": lambda files: files.remove_dir("f"),
    "list a file": lambda files: files.list_dir("f"),
    "sync a file": lambda files: files.sync_dir("f"),
    "rename onto a directory": lambda files: files.rename("f", "d"),
    "create below a file": lambda files: files.create("f/x"),
    "read below a file": lambda files: files.read("f/x", 9),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(files: Files, what: str) -> None:
    files.make_dir("d")
    put(files, "f")
    with pytest.raises(StorageError) as caught:
        REFUSED[what](files)
    assert type(caught.value) is StorageError
    assert files.list_dir("") == ["d", "f"]


def test_a_name_taken_by_a_directory(files: Files) -> None:
    files.make_dir("d")
    put(files, "f")
    with pytest.raises(ExistsError):
        files.create("d")
    with pytest.raises(ExistsError):
        files.link("f", "d")


@pytest.mark.parametrize("path", ESCAPES)
def test_no_path_leaves_the_root(files: Files, path: str) -> None:
    files.make_dir("a")
    put(files, "f")
    attempts: list[Callable[[], object]] = [
        lambda: files.create(path),
        lambda: files.link("f", path),
        lambda: files.link(path, "g"),
        lambda: files.rename("f", path),
        lambda: files.unlink(path),
        lambda: files.make_dir(path),
        lambda: files.remove_dir(path),
        lambda: files.sync_dir(path),
        lambda: files.list_dir(path),
        lambda: files.size(path),
        lambda: files.read(path, 9),
        lambda: files.read_into(path, 0, memoryview(bytearray(1))),
    ]
    for attempt in attempts:
        with pytest.raises(DamagedError):
            attempt()
    assert files.list_dir("") == ["a", "f"]


def test_what_was_written_is_overwritten_in_place(files: Files) -> None:
    file = files.create("a")
    file.write(b"header......")
    file.write(b"payload")
    file.write_at(2, b"ADER: 12")
    file.write_at(19, b"")
    for offset, data in ((18, b"xy"), (-1, b"x"), (20, b"")):
        with pytest.raises(ValueError, match="never written"):
            file.write_at(offset, data)
    file.sync()
    file.close()
    assert files.read("a", 100) == b"heADER: 12..payload"


def test_a_closed_file_takes_no_more(files: Files) -> None:
    file = files.create("a")
    file.close()
    file.close()
    with pytest.raises(StorageError):
        file.write(b"x")
    with pytest.raises(StorageError):
        file.sync()


class TestLocalOnly:
    """What only a real filesystem has: links, pipes, and other hands on the files."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        (tmp_path / "root").mkdir()
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "secret").write_bytes(b"secret")
        return tmp_path / "root"

    def test_a_symbolic_link_as_directory_is_never_followed(self, root: Path) -> None:
        files = LocalFiles(root)
        put(files, "f")
        (root / "d").symlink_to(root.parent / "outside")
        attempts: list[Callable[[], object]] = [
            lambda: files.read("d/secret", 99),
            lambda: files.size("d/secret"),
            lambda: files.create("d/new"),
            lambda: files.link("f", "d/new"),
            lambda: files.rename("f", "d/new"),
            lambda: files.unlink("d/secret"),
            lambda: files.make_dir("d/new"),
            lambda: files.list_dir("d"),
            lambda: files.sync_dir("d"),
        ]
        for attempt in attempts:
            with pytest.raises(DamagedError):
                attempt()
        assert [path.name for path in (root.parent / "outside").iterdir()] == ["secret"]

    def test_a_symbolic_link_as_file_is_never_followed(self, root: Path) -> None:
        files = LocalFiles(root)
        (root / "f").symlink_to(root.parent / "outside" / "secret")
        attempts: list[Callable[[], object]] = [
            lambda: files.read("f", 99),
            lambda: files.read_into("f", 0, memoryview(bytearray(3))),
            lambda: files.size("f"),
            lambda: files.create("f"),
        ]
        for attempt in attempts:
            with pytest.raises((DamagedError, StorageError)):
                attempt()
        files.unlink("f")
        assert (root.parent / "outside" / "secret").read_bytes() == b"secret"

    def test_the_root_itself_may_be_a_symbolic_link(self, root: Path) -> None:
        (root.parent / "short").symlink_to(root)
        files = LocalFiles(root.parent / "short")
        files.make_dir("d")
        put(files, "d/f", b"fine")
        assert (root / "d" / "f").read_bytes() == b"fine"

    def test_a_pipe_does_not_hang_the_reader(self, root: Path) -> None:
        files = LocalFiles(root)
        os.mkfifo(root / "pipe")
        with pytest.raises(DamagedError):
            files.read("pipe", 99)
        with pytest.raises(DamagedError):
            files.size("pipe")

    def test_missing_parents_of_the_root_are_made(self, root: Path) -> None:
        assert LocalFiles(root / "a" / "b").make_dir("") is True
        assert (root / "a" / "b").is_dir()

    def test_a_relative_root_stays_where_it_was(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(root)
        files = LocalFiles("here")
        files.make_dir("")
        monkeypatch.chdir("/")
        put(files, "f")
        assert (root / "here" / "f").exists()

    def test_no_descriptor_is_leaked(self, root: Path) -> None:
        files = LocalFiles(root)
        put(files, "f")
        os.mkfifo(root / "pipe")
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            files.sync_dir("")
            files.read("f", 9)
            with pytest.raises(DamagedError):
                files.read("f", 1)
            with pytest.raises(DamagedError):
                files.read("pipe", 1)
            with pytest.raises(ExistsError):
                files.create("f")
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    def test_every_error_names_the_place_and_what_to_do(self, root: Path) -> None:
        with pytest.raises(MissingError, match=str(root / "no")):
            LocalFiles(root).read("no", 1)
