"""Damage at rest: every byte of a small store, every file of it, and stores made to do harm.

Reading gives exactly what was written for the version it claims, or a typed error, and never in silence: where
anything is not as it was committed, the reader is told. The store is in memory, and records that did not change
are parsed once.
"""

from __future__ import annotations

import itertools
import os
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import store.schema
import store.segment
from store.catalog import open_catalog
from store.errors import DamagedError, DriftpointError, MissingError, NewerFormatError, StoreError
from store.names import SaveId, manifest_path, part_path, payload_path
from store.retention import Retention, execute, plan_prune
from store.schema import READER, digest
from store.storage.local import LocalFiles
from store.verify import verify
from tests.crash.checker import Reading, assert_true_to_write, read_newest
from tests.crash.damage import edit, forge, put, remove
from tests.crash.simulated import SimulatedFiles
from tests.crash.workload import Job, Memory

SILENT = ("LATEST", "proven/", "epochs/")
"""Files whose content no reader believes."""


@pytest.fixture(scope="module")
def small() -> tuple[SimulatedFiles, list[SaveId]]:
    """Three commits, the last two composites; the first is proven."""
    files = SimulatedFiles()
    job = Job(files, Memory())
    saves = []
    for number in range(3):
        saves.append(job.save())
        if number == 0:
            job.prove()
    return files, saves


@pytest.fixture
def files(small: tuple[SimulatedFiles, list[SaveId]]) -> SimulatedFiles:
    return SimulatedFiles(small[0].disk.copied())


@pytest.fixture
def saves(small: tuple[SimulatedFiles, list[SaveId]]) -> list[SaveId]:
    return small[1]


@pytest.fixture
def parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing is a pure function of the bytes: unchanged records need not be parsed for each flipped byte."""
    remembered = cache(store.schema.from_bytes)
    monkeypatch.setattr(store.schema, "from_bytes", remembered)
    monkeypatch.setattr(store.segment, "from_bytes", remembered)


def outcome(files: SimulatedFiles) -> Reading | None:
    """What a resume gets, checked to be what was written; None where it is told that there is nothing to get."""
    try:
        reading = read_newest(open_catalog(files))
    except StoreError:
        return None
    assert_true_to_write(reading)
    return reading


def verdict(files: SimulatedFiles) -> bool:
    """Whether verify finds nothing wrong."""
    try:
        return verify(open_catalog(files)).ok
    except StoreError:
        return False


def same(one: Reading | None, other: Reading | None) -> bool:
    return (
        one is not None
        and other is not None
        and (one.save, one.versions, one.tensors, repr(one.run_states))
        == (other.save, other.versions, other.tensors, repr(other.run_states))
    )


def assert_never_wrong(files: SimulatedFiles, healthy: Reading, path: str, what: object) -> None:
    """After damage to one file: detected, or harmless."""
    reading = outcome(files)
    if not same(reading, healthy):
        assert reading is None or reading.reported, (path, what, "other values, and nobody was told")
        assert reading is None or reading.save <= healthy.save
    if path.startswith(SILENT):
        assert same(reading, healthy), (path, what)
    else:
        assert not verdict(files), (path, what, "verify did not see it")
        assert path == "STORE.json" or reading is not None, (path, what, "one bad file must not cost every commit")


@pytest.mark.slow
@pytest.mark.usefixtures("parsed_once")
@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_every_byte_flipped(small: tuple[SimulatedFiles, list[SaveId]], mask: int) -> None:
    base = small[0]
    healthy = outcome(base)
    assert healthy is not None
    for path, data in base.disk.files().items():
        node = base.disk.find(path)
        for at in range(0 if mask == 0x01 else 1, len(data), 1 if mask == 0x01 else 7):
            node.live[at] ^= mask  # type: ignore[union-attr]
            try:
                assert_never_wrong(base, healthy, path, at)
            finally:
                node.live[at] ^= mask  # type: ignore[union-attr]
    assert same(outcome(base), healthy)


def harms(data: bytes) -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    yield "zeroed", bytes(len(data))
    yield "longer by a zero", data + b"\0"
    yield "longer by itself", data + data
    yield "without its first byte", data[1:]
    for cut in (1, len(data) // 3, len(data) // 2, len(data) - 1):
        yield f"cut to {cut}", data[:cut]
    for sector in (512, 4096):
        yield f"last sector of {sector} zeroed", data[: (len(data) - 1) // sector * sector].ljust(len(data), b"\0")


@pytest.mark.usefixtures("parsed_once")
def test_every_file_hurt_or_missing(small: tuple[SimulatedFiles, list[SaveId]]) -> None:
    hurt_each(small[0])


def hurt_each(base: SimulatedFiles) -> None:
    healthy = outcome(base)
    assert healthy is not None
    for path, data in base.disk.files().items():
        for what, changed in harms(data):
            if changed != data:
                hurt = SimulatedFiles(base.disk.copied())
                put(hurt, path, changed)
                assert_never_wrong(hurt, healthy, path, what)
        hurt = SimulatedFiles(base.disk.copied())
        remove(hurt, path)
        if not path.startswith("manifests/"):
            assert_never_wrong(hurt, healthy, path, "missing")
        elif (reading := outcome(hurt)) is not None:  # a commit without its manifest never was
            assert same(reading, healthy) or reading.save < healthy.save


@pytest.mark.usefixtures("parsed_once")
def test_every_two_files_swapped_or_one_in_the_others_place(small: tuple[SimulatedFiles, list[SaveId]]) -> None:
    swap_each(small[0], itertools.permutations(small[0].disk.files(), 2))


def swap_each(base: SimulatedFiles, pairs: Iterable[tuple[str, str]]) -> None:
    healthy = outcome(base)
    assert healthy is not None
    contents = base.disk.files()
    for one, other in pairs:
        hurt = SimulatedFiles(base.disk.copied())
        put(hurt, one, contents[other])
        assert_never_wrong(hurt, healthy, one, f"is a copy of {other}")
        if one < other:
            put(hurt, other, contents[one])
            reading = outcome(hurt)
            assert same(reading, healthy) or reading is None or reading.reported, (one, other, "swapped")


@pytest.mark.usefixtures("parsed_once")
def test_files_duplicated_under_other_names(small: tuple[SimulatedFiles, list[SaveId]]) -> None:
    """A stray copy may be reported; it never changes what is read, nor what a prune keeps."""
    base, saves = small
    healthy = outcome(base)
    newer = SaveId(saves[2].step + 10, 1)
    copies = {
        manifest_path(saves[0]): manifest_path(newer),
        manifest_path(saves[1]): f"manifests/{saves[1]}.json.bak",
        part_path(saves[2], 0): part_path(saves[2], 7),
        payload_path(saves[2], 0): payload_path(saves[2], 7),
        "STORE.json": "epochs/STORE.json",
    }
    for source, target in copies.items():
        hurt = SimulatedFiles(base.disk.copied())
        put(hurt, target, hurt.read(source, 1 << 20))
        assert same(outcome(hurt), healthy), target
        plan = plan_prune(open_catalog(hurt), Retention(keep_last=1, log_spaced=False))
        execute(hurt, plan)
        assert same(outcome(hurt), healthy), target


def test_without_its_epochs_and_marks_a_store_is_as_good(files: SimulatedFiles, saves: list[SaveId]) -> None:
    """Scenario 28: copied without some files."""
    healthy = outcome(files)
    for path in files.disk.files():
        if path.startswith(("epochs/", "proven/", "LATEST")):
            remove(files, path)
    for folder in ("epochs", "proven"):
        files.remove_dir(folder)
    assert same(outcome(files), healthy)
    assert Job(files, Memory()).save() > saves[2]


HUGE = (1 << 62) - 1

HOSTILE: dict[str, Callable[[SimulatedFiles, list[SaveId]], None]] = {
    "world size of the group": lambda f, s: forge(f, manifest_path(s[2]), _group(s[2], world_size=HUGE)),
    "world size of the manifest": lambda f, s: forge(f, manifest_path(s[2]), _set(world_size=HUGE)),
    "payload size of the group": lambda f, s: forge(f, manifest_path(s[2]), _group(s[2], payload_bytes=HUGE)),
    "no groups": lambda f, s: forge(f, manifest_path(s[2]), _set(groups={})),
    "no units": lambda f, s: forge(f, manifest_path(s[2]), _set(units=[])),
    "numel of the units": lambda f, s: forge(f, manifest_path(s[2]), _units(numel=HUGE)),
    "units of a save that is not there": lambda f, s: forge(f, manifest_path(s[2]), _units(save="99999999-000001")),
    "a path as save": lambda f, s: forge(f, manifest_path(s[2]), _units(save="../../../../etc/passwd")),
    "a path as group": lambda f, s: forge(f, manifest_path(s[2]), _group_at("../../../etc")),
    "negative sizes": lambda f, s: forge(f, part_path(s[2], 0), _entries(offset=-4)),
    "manifest of another step": lambda f, s: forge(f, manifest_path(s[2]), _set(step=HUGE)),
    "a list as record": lambda f, s: forge(f, manifest_path(s[2]), lambda body: [body]),
    "payload size of the part": lambda f, s: forge(f, part_path(s[2], 0), _set(payload_bytes=HUGE)),
    "header size of the part": lambda f, s: forge(f, part_path(s[2], 0), _set(header_bytes=HUGE)),
    "both sizes of the part": lambda f, s: forge(f, part_path(s[2], 0), _set(header_bytes=HUGE, payload_bytes=HUGE)),
    "numel of the entries": lambda f, s: forge(f, part_path(s[2], 0), _entries(numel=HUGE, nbytes=HUGE)),
    "offset of the entries": lambda f, s: forge(f, part_path(s[2], 0), _entries(offset=HUGE)),
    "overlapping entries": lambda f, s: forge(f, part_path(s[2], 0), _entries(start=0, offset=0)),
    "repeated entries": lambda f, s: forge(f, part_path(s[2], 0), _twice("entries")),
    "dtype of the entries": lambda f, s: forge(f, part_path(s[2], 0), _entries(dtype="O")),
    "names with dots": lambda f, s: forge(f, part_path(s[2], 0), _entries(fqn="../../../etc/passwd", layer="..")),
    "shape of the run state": lambda f, s: forge(f, part_path(s[2], 0), _tensors(shape=[HUGE, HUGE])),
    "dtype of the run state": lambda f, s: forge(f, part_path(s[2], 0), _tensors(dtype="O")),
    "tags of the run state": lambda f, s: forge(f, part_path(s[2], 0), _set(run_state={"$": "reduce", "v": ["exit"]})),
    "leaf of the run state": lambda f, s: forge(f, part_path(s[2], 0), _set(run_state={"$": "ndarray", "v": HUGE})),
    "deep JSON": lambda f, s: put(f, part_path(s[2], 0), _sealed(b"[" * 200_000 + b"]" * 200_000)),
    "deep run state": lambda f, s: edit(f, part_path(s[2], 0), _deep_run_state),
    "a number without end": lambda f, s: put(f, part_path(s[2], 0), _sealed(b"1" * 100_000)),
    "NaN": lambda f, s: put(f, manifest_path(s[2]), _sealed(b"NaN")),
    "not UTF-8": lambda f, s: put(f, manifest_path(s[2]), _sealed(b'"\xff\xfe"')),
    "a directory as part": lambda f, s: (remove(f, part_path(s[2], 0)), f.make_dir(part_path(s[2], 0))),
    "a directory as manifest": lambda f, s: (remove(f, manifest_path(s[2])), f.make_dir(manifest_path(s[2]))),
    "a file as group": lambda f, s: (_clear(f, s[2]), put(f, f"segments/{s[2]}", b"x")),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_store_gets_a_typed_answer(files: SimulatedFiles, saves: list[SaveId], what: str) -> None:
    """Checksums are right throughout. No reader hangs, grows, follows a path or runs anything."""
    HOSTILE[what](files, saves)
    tracemalloc.start()
    try:
        reading = read_newest(open_catalog(files))
        assert reading.save in saves
        found = verify(open_catalog(files))
        assert found.resumable is not None
        plan = plan_prune(open_catalog(files), Retention(keep_last=1, log_spaced=False))
        execute(files, plan)
    except DriftpointError as error:
        assert str(error)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert read_newest(open_catalog(files)).save in saves, "one hostile file must not cost every commit"


def test_a_header_bomb_is_never_parsed(files: SimulatedFiles, saves: list[SaveId]) -> None:
    """The safetensors header claims 2^63 bytes, or is a mountain of JSON: our readers go by the part's offsets."""
    healthy = outcome(files)
    path = payload_path(saves[2], 0)
    for bomb in ((1 << 63).to_bytes(8, "little"), (1 << 20).to_bytes(8, "little"), bytes(8), b"\xff" * 8):
        edit(files, path, lambda data, bomb=bomb: bomb + data[8:])  # type: ignore[misc]
        assert same(outcome(files), healthy)
        assert not verdict(files)


class TestOnARealFilesystem:
    """Things that are no files: pipes, links, devices; and files that are far larger than they should be."""

    @pytest.fixture
    def root(self, small: tuple[SimulatedFiles, list[SaveId]], tmp_path: Path) -> Path:
        for path, data in small[0].disk.files().items():
            target = tmp_path / "store" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        return tmp_path / "store"

    def read(self, root: Path) -> Reading:
        reading = read_newest(open_catalog(LocalFiles(root)))
        assert_true_to_write(reading)
        return reading

    @pytest.mark.parametrize("kind", ["pipe", "link", "dangling link", "link to a device", "huge", "directory"])
    @pytest.mark.parametrize("which", ["manifest", "part", "payload"])
    def test_in_place_of_a_file(self, root: Path, saves: list[SaveId], kind: str, which: str) -> None:
        paths = {
            "manifest": manifest_path(saves[2]),
            "part": part_path(saves[2], 1),
            "payload": payload_path(saves[2], 1),
        }
        place = root / paths[which]
        aside = place.rename(root.parent / "aside")
        if kind == "pipe":
            os.mkfifo(place)
        elif kind == "link":
            place.symlink_to(aside)
        elif kind == "dangling link":
            place.symlink_to(root / "nowhere")
        elif kind == "link to a device":
            place.symlink_to("/dev/zero")
        elif kind == "huge":
            with place.open("wb") as file:
                file.truncate(1 << 42)
        else:
            place.mkdir()
        reading = self.read(root)
        assert reading.save == saves[1]
        assert reading.reported
        assert not verify(open_catalog(LocalFiles(root))).ok

    def test_a_group_that_is_a_link_elsewhere(self, root: Path, saves: list[SaveId], tmp_path: Path) -> None:
        group = root / "segments" / saves[2].name
        group.rename(tmp_path / "elsewhere")
        group.symlink_to(tmp_path / "elsewhere")
        assert self.read(root).save == saves[1]
        before = sorted(p.name for p in (tmp_path / "elsewhere").iterdir())
        plan = plan_prune(open_catalog(LocalFiles(root)), Retention(keep_last=1, log_spaced=False))
        execute(LocalFiles(root), plan)
        assert sorted(p.name for p in (tmp_path / "elsewhere").iterdir()) == before

    @pytest.mark.parametrize("folder", ["manifests", "segments"])
    def test_a_folder_that_is_a_link_elsewhere(self, root: Path, tmp_path: Path, folder: str) -> None:
        (root / folder).rename(tmp_path / "elsewhere")
        (root / folder).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StoreError):
            self.read(root)

    def test_a_pipe_as_the_store_record(self, root: Path) -> None:
        (root / "STORE.json").unlink()
        os.mkfifo(root / "STORE.json")
        with pytest.raises(DamagedError):
            open_catalog(LocalFiles(root))

    def test_a_commit_that_was_never_there(self, root: Path) -> None:
        with pytest.raises((DamagedError, MissingError)):
            open_catalog(LocalFiles(root)).manifest(SaveId(77, 1))


def test_an_old_reader_refuses_a_newer_format(files: SimulatedFiles) -> None:
    forge(files, "STORE.json", _set(reader=READER + 1, format=READER + 1))
    with pytest.raises(NewerFormatError):
        open_catalog(files)


def test_keys_of_a_later_release_are_ignored(files: SimulatedFiles, saves: list[SaveId]) -> None:
    healthy = outcome(files)
    for path in files.disk.files():
        if path.startswith("manifests/"):
            forge(files, path, _set(later={"more": [1, 2]}))
    assert same(outcome(files), healthy)


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update(values)


def _group(save: SaveId, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["groups"][save.name].update(values)


def _group_at(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["groups"].update({name: next(iter(body["groups"].values()))})


def _twice(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update({key: body[key] * 2})


def _units(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update(units=[{**unit, **values} for unit in body["units"]])


def _entries(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update(entries=[{**entry, **values} for entry in body["entries"]])


def _tensors(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update(run_tensors=[{**tensor, **values} for tensor in body["run_tensors"]])


def _sealed(text: bytes) -> bytes:
    return b'{"body":' + text + b',"xxh3_128":"' + digest(text).encode() + b'"}\n'


def _deep_run_state(data: bytes) -> bytes:
    text = data[len(b'{"body":') : -len(b',"xxh3_128":"' + b"0" * 32 + b'"}\n')]
    head, _, tail = text.partition(b'"run_state":')
    return _sealed(head + b'"run_state":' + b"[" * 900 + b"]" * 900 + b',"was":' + tail)


def _clear(files: SimulatedFiles, save: SaveId) -> None:
    for name in files.list_dir(f"segments/{save}"):
        remove(files, f"segments/{save}/{name}")
    files.remove_dir(f"segments/{save}")
