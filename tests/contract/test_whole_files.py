"""What every implementation of ``store.storage.local.Files`` does for those who write through
``store.storage.atomic`` and read: a
directory, the simulated disk, and object stores: on moto, on Azurite, and on a server of our own for Google's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from store.catalog import open_or_create
from store.errors import DamagedError, ExistsError, MissingError, StorageError
from store.location import files_at
from store.storage.atomic import ensure_dir, remove_all, replace_hint, write_new
from store.storage.bucket import ObjectOptions
from store.storage.local import Files, LocalFiles, NewFile
from store.storage.object_store import ObjectFiles, _Spooled, _Streamed
from tests.crash.simulated import SimulatedFiles
from tests.support.azure import CONTAINER, Azurite
from tests.support.gcs import GoogleServer
from tests.support.s3 import BUCKET, KEYS, Server, tiny_parts

PART = 1 << 12
"""Bytes of an upload's parts here: what is larger does not go in one request."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server, tiny_parts():
        yield server


@pytest.fixture(scope="module")
def azurite() -> Iterator[Azurite]:
    with Azurite() as azurite:
        yield azurite


@pytest.fixture(scope="module")
def google() -> Iterator[GoogleServer]:
    with GoogleServer(least_part=1) as google:
        yield google


@pytest.fixture(params=["s3", "gs"])
def bucket(
    request: pytest.FixtureRequest, server: Server, google: GoogleServer, monkeypatch: pytest.MonkeyPatch
) -> tuple[Server | GoogleServer, str]:
    """A server whose objects can be changed behind the client's back, and the URL of its bucket."""
    found: Server | GoogleServer = server if request.param == "s3" else google
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    return found, f"{request.param}://{BUCKET}"


@pytest.fixture(params=["local", "simulated", "objects", "azure", "google"])
def files(request: pytest.FixtureRequest, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Files:
    """An empty root."""
    made: Files
    if request.param == "local":
        made = LocalFiles(tmp_path / "root")
    elif request.param == "simulated":
        made = SimulatedFiles(exists=False)
    elif request.param == "azure":
        for name, value in request.getfixturevalue("azurite").environment.items():
            monkeypatch.setenv(name, value)
        options = ObjectOptions(part_mib=PART / (1 << 20), connections=3, spool=str(tmp_path))
        made = files_at(f"az://{CONTAINER}/{tmp_path.name.replace('_', '-')}", options)
    elif request.param == "google":
        google: GoogleServer = request.getfixturevalue("google")
        monkeypatch.setenv("GCE_METADATA_HOST", google.environment["GCE_METADATA_HOST"])
        endpoint = f"http://127.0.0.1:{google.port}"
        options = ObjectOptions(
            endpoint, allow_http=True, part_mib=PART / (1 << 20), connections=3, spool=str(tmp_path)
        )
        made = files_at(f"gs://{BUCKET}/{tmp_path.name}", options)
    else:
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        endpoint = f"http://127.0.0.1:{server.port}"
        options = ObjectOptions(endpoint, part_mib=PART / (1 << 20), connections=3, spool=str(tmp_path))
        made = files_at(f"s3://{BUCKET}/{tmp_path.name}", options)
    made.make_dir("")
    return made


def in_azure(files: Files) -> bool:
    return isinstance(files, ObjectFiles) and str(files.root).startswith("az:")


def in_google(files: Files) -> bool:
    return isinstance(files, ObjectFiles) and str(files.root).startswith("gs:")


def put(files: Files, path: str, data: bytes = b"data") -> None:
    write_new(files, path, lambda file: file.write(data), most=len(data))


def bytes_of(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


SIZES = [0, 1, PART - 1, PART, PART + 1, 3 * PART, 10 * PART + 77]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read(files: Files, size: int) -> None:
    data = bytes_of(size)

    def fill(file: NewFile) -> None:
        for start in range(0, size, 1000):
            file.write(memoryview(data)[start : start + 1000])

    write_new(files, "a", fill, most=size)
    assert files.size("a") == size
    assert files.read("a", size) == data
    with pytest.raises(DamagedError):
        files.read("a", size - 1)
    target = bytearray(size)
    for start in range(0, size, 700):
        files.read_into("a", start, memoryview(target)[start : start + 700])
    assert target == data


def test_memory_that_was_written_may_be_used_again_at_once(files: Files) -> None:
    """An import reads into one buffer again and again."""
    data, buffer = bytes_of(10 * PART), bytearray(PART // 4)

    def fill(file: NewFile) -> None:
        for start in range(0, len(data), len(buffer)):
            buffer[:] = data[start : start + len(buffer)]
            file.write(memoryview(buffer))
            buffer[:] = bytes(len(buffer))

    write_new(files, "a", fill, most=len(data))
    assert files.read("a", len(data)) == data


@pytest.mark.parametrize("size", SIZES[2:])
def test_what_was_written_is_overwritten_in_place(files: Files, size: int) -> None:
    data, head = bytes_of(size), bytes_of(size // 2, seed=1)

    def fill(file: NewFile) -> None:
        file.write(data[:100])
        file.write(data[100:])
        file.write_at(0, head)
        file.write_at(size, b"")
        for offset in (-1, size + 1):
            with pytest.raises(ValueError, match="never written"):
                file.write_at(offset, b"")

    write_new(files, "a", fill, patched=True, most=size)
    assert files.read("a", size) == head + data[len(head) :]


@pytest.mark.parametrize("size", [5, 3 * PART])
@pytest.mark.parametrize("patched", [False, True])
def test_a_name_that_is_taken_stays_as_it_is(files: Files, size: int, patched: bool) -> None:
    put(files, "a", b"old")
    with pytest.raises(ExistsError):
        write_new(files, "a", lambda file: file.write(bytes_of(size)), patched=patched, most=size)
    assert files.read("a", 9) == b"old"
    assert files.list_dir("") == ["a"]


@pytest.mark.parametrize("size", [5, 3 * PART])
@pytest.mark.parametrize("patched", [False, True])
def test_a_write_that_ends_half_way_leaves_nothing(
    files: Files, server: Server, google: GoogleServer, size: int, patched: bool
) -> None:
    def fill(file: NewFile) -> None:
        file.write(bytes_of(size))
        raise StorageError("full")

    with pytest.raises(StorageError, match="full"):
        write_new(files, "a", fill, patched=patched, most=size)
    assert files.list_dir("") == []
    assert server.unfinished_uploads() == google.unfinished_uploads() == []
    name = "b" if in_azure(files) else "a"  # Azurite keeps the name of blocks that were given up
    put(files, name)
    assert files.read(name, 9) == b"data"


def test_hints_are_replaced(files: Files) -> None:
    replace_hint(files, "hint", b"one")
    replace_hint(files, "hint", b"two")
    assert files.read("hint", 9) == b"two"
    assert files.list_dir("") == ["hint"]


def test_directories(files: Files) -> None:
    ensure_dir(files, "d/e")
    for name in ("d/e/b", "d/e/a", "d/e/B", "d/f"):
        put(files, name)
    files.sync_dir("d/e")
    assert files.list_dir("d") == ["e", "f"]
    assert files.list_dir("d/e") == ["B", "a", "b"]
    for name in ("B", "a", "b"):
        files.unlink(f"d/e/{name}")
    files.remove_dir("d/e")
    assert files.list_dir("d") == ["f"]


def test_many_are_removed_at_once(files: Files) -> None:
    ensure_dir(files, "d")
    for name in "abc":
        put(files, f"d/{name}")
    remove_all(files, ["d/a", "d/gone", "d/c"])
    assert files.list_dir("d") == ["b"]
    remove_all(files, [])
    assert files.list_dir("d") == ["b"]


def test_a_directory_is_listed_to_its_end(files: Files, server: Server, google: GoogleServer, tmp_path: Path) -> None:
    """A server tells a thousand names at a time."""
    names = [f"{number:05d}" for number in range(2003)]
    ensure_dir(files, "d")
    if isinstance(files, LocalFiles | SimulatedFiles) or in_azure(files):
        names = names[:3]
        for name in names:
            put(files, f"d/{name}")
    else:
        behind = google if in_google(files) else server
        behind.put(tmp_path.name, {f"d/{name}": b"" for name in names})
    assert files.list_dir("d") == names


@pytest.mark.parametrize("patched", [False, True])
def test_an_upload_that_another_one_replaced_is_not_acknowledged(
    bucket: tuple[Server | GoogleServer, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patched: bool
) -> None:
    server, url = bucket
    files = files_at(f"{url}/{tmp_path.name}", ObjectOptions(part_mib=PART / (1 << 20), spool=str(tmp_path)))
    kind, size = _Spooled if patched else _Streamed, 3 * PART
    finish = kind.finish

    def then_replaced(upload: _Spooled | _Streamed) -> None:
        finish(upload)  # type: ignore[arg-type]
        server.put(tmp_path.name, {"a": bytes_of(size, 1)})

    monkeypatch.setattr(kind, "finish", then_replaced)
    with pytest.raises(StorageError, match="another"):
        write_new(files, "a", lambda file: file.write(bytes_of(size)), patched=patched, most=size)


def test_folders_that_a_console_made_are_empty(bucket: tuple[Server | GoogleServer, str], tmp_path: Path) -> None:
    server, url = bucket
    server.put(tmp_path.name, {"": b"", "epochs/": b""})
    files = files_at(f"{url}/{tmp_path.name}")
    assert files.list_dir("") == ["epochs"]
    assert files.list_dir("epochs") == []
    assert open_or_create(files).saves() == []


MISSING: dict[str, Callable[[Files], object]] = {
    "size": lambda files: files.size("no"),
    "read": lambda files: files.read("no", 9),
    "read_into": lambda files: files.read_into("no", 0, memoryview(bytearray(1))),
}


@pytest.mark.parametrize("what", MISSING)
def test_missing(files: Files, what: str) -> None:
    with pytest.raises(MissingError):
        MISSING[what](files)


@pytest.mark.parametrize("offset", [3, 5, 6, 1 << 40])
def test_read_beyond_the_end_is_damage(files: Files, offset: int) -> None:
    put(files, "a", b"12345")
    with pytest.raises(DamagedError):
        files.read_into("a", offset, memoryview(bytearray(3)))


def test_reading_fills_memory_of_any_shape(files: Files) -> None:
    values = np.arange(6, dtype="<f4")
    put(files, "a", values.tobytes())
    target = np.zeros((2, 3), dtype="<f4")
    files.read_into("a", 0, memoryview(target))
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]
    files.read_into("a", 0, memoryview(np.zeros((0, 3), dtype="<f4")))


def test_reading_here_and_there(files: Files) -> None:
    """Forward, backward, and two files in turn."""
    one, two = bytes_of(9 * PART), bytes_of(9 * PART, seed=1)
    put(files, "one", one)
    put(files, "two", two)
    for start, count in [(0, 10), (10, 5000), (5010, 20000), (25010, 3), (7, 7), (14, 30000), (0, 9 * PART)]:
        for name, data in (("one", one), ("two", two)):
            target = bytearray(count)
            files.read_into(name, start, memoryview(target))
            assert target == data[start : start + count], (name, start)


@pytest.mark.parametrize("path", ["../x", "a/../x", "/etc/passwd", "a//b", "./x", "a/.", "..", ".", "a/", "x\0y"])
def test_no_path_leaves_the_root(files: Files, path: str) -> None:
    ensure_dir(files, "a")
    put(files, "f")
    attempts: list[Callable[[], object]] = [
        lambda: put(files, path),
        lambda: replace_hint(files, path, b""),
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
    assert files.read("f", 9) == b"data"
