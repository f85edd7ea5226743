"""The memory tier in trouble, in one process: training never sees it, nothing whole is lost, nothing is kept quiet."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import monitor.memory
from store.catalog import open_catalog
from store.errors import DamagedError, StorageError
from store.files import LocalFiles
from store.layout import payload_path
from store.memory.arena import Arena
from store.memory.cleaning import clear_old
from store.memory.held import look
from store.memory.overlay import Overlay
from store.memory.tier import Generation
from store.names import SaveId
from store.payload import Placed, read_piece
from store.schema import Entry, PartRecord, StateTensor
from store.verify import verify
from tests.support.jobs import Job, same
from tests.support.kept import catalog_of, memory, tier_of
from tests.support.memory_jobs import abandoned, kept_steps, leaves_in, settled, sources, state_in, version
from tests.support.mounts import tmpfs


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def run(one: Job, steps: int) -> None:
    for _ in range(steps):
        one.step()
        settled(one)


def killed_at(store: Path, steps: int, **settings: Any) -> dict[str, torch.Tensor]:
    """A job that was killed after so many steps; its state."""
    one = Job(store, **{"every": 4, "memory": memory(store), **settings})
    one.ckpt.resume()
    run(one, steps)
    kept = one.weights()
    abandoned(one)
    return kept


def place_of(store: Path) -> Generation:
    return tier_of(store).generations()[0]


# ---- wrong bytes


def test_every_flipped_byte_of_a_version_is_detected_or_harmless(store: Path) -> None:
    """Fragments and run state, byte by byte: found by a hash, or between two fragments, where nothing is."""
    kept = killed_at(store, 3, width=1)
    held = look(tier_of(store)).versions[SaveId(3, 1)][0]
    data = held.payload.read_bytes()
    pieces = [*held.record.part.entries, *held.record.part.run_tensors]
    files = Overlay(LocalFiles(store), version(store))
    descriptor = os.open(held.payload, os.O_RDWR)
    for at in range(held.record.part.payload_bytes):
        os.pwrite(descriptor, bytes([data[at] ^ 1 << at % 8]), at)
        found = [piece for piece in pieces if not sound(files, held.record.part, piece)]
        assert found == [piece for piece in pieces if piece.offset <= at < piece.offset + piece.nbytes]
        os.pwrite(descriptor, data[at : at + 1], at)
    os.close(descriptor)
    assert same(state_in(store), kept) and leaves_in(store)


def sound(files: Overlay, part: PartRecord, piece: Entry | StateTensor) -> bool:
    """Whether the bytes are those of the hash, as all that reads a store finds it out."""
    placed = Placed(piece.offset, piece.nbytes, piece.xxh3_128)
    try:
        read_piece(files, payload_path(part.save, part.rank), 0, placed, memoryview(bytearray(piece.nbytes)))
    except DamagedError:
        return False
    return True


@pytest.mark.slow
def test_what_a_resume_makes_of_flipped_bytes_is_right_or_not_called_exact(tmp_path: Path) -> None:
    """Sampled over record and payload, each resumed for real."""
    store = tmp_path / "one" / "store"
    settings = {"width": 2, "resume": {"at": "newest"}}
    (tmp_path / "one").mkdir()
    kept = killed_at(store, 7, **settings)
    held = look(tier_of(store)).versions[SaveId(7, 1)][0]
    record = held.payload.with_suffix(".json")
    used = held.record.part.payload_bytes
    flips = [(held.payload, at) for at in range(0, used, used // 40)]
    flips += [(record, at) for at in range(0, record.stat().st_size, record.stat().st_size // 6)]
    outcomes = Counter[str]()
    for number, (path, at) in enumerate(flips):
        again = tmp_path / str(number) / "store"
        shutil.copytree(tmp_path / "one", again.parent)
        with (again.parent / path.relative_to(tmp_path / "one")).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << at % 8]))
        two = Job(again, every=4, memory=memory(again), **settings)
        step = two.ckpt.resume()
        certificate, found = two.ckpt.certificate, two.weights()
        assert certificate is not None
        wrong = {key for key in kept if not torch.equal(found[key], kept[key])}
        if step == 7 and certificate.exact:
            assert not wrong, (path.name, at)
            outcomes["exact"] += 1
        elif step == 7:
            fallen = {f"{unit.layer}/{unit.slot}" for unit in certificate.units if unit.fallback}
            assert fallen and {_unit_of(key) for key in wrong} <= fallen, (path.name, at)
            outcomes["fallback"] += 1
        else:
            assert certificate.exact and step == certificate.step in (4, 6), (path.name, at)
            outcomes["older"] += 1
        two.ckpt.close()
        shutil.rmtree(again.parent)
    assert outcomes["fallback"] and outcomes["older"] >= 6, outcomes


def _unit_of(key: str) -> str:
    name, _, slot = key.partition("/")
    return f"{'.'.join(name.split('.')[:2]) if name.startswith('blocks') else name.split('.')[0]}/{slot}"


def flipped(store: Path, save: SaveId, *, run_state: bool = False) -> None:
    """A byte of the layer ``blocks.1``, or of the run state, is wrong."""
    held = look(tier_of(store)).versions[save][0]
    entry: Entry | StateTensor = next(
        one for one in held.record.part.entries if one.layer == "blocks.1" and one.slot == "fp32"
    )
    if run_state:
        entry = held.record.part.run_tensors[0]
    data = bytearray(held.payload.read_bytes())
    data[entry.offset] ^= 1
    held.payload.write_bytes(data)


@pytest.mark.parametrize("both", [False, True])
def test_a_layer_whose_bytes_are_wrong_falls_back_and_is_told(
    store: Path, caplog: pytest.LogCaptureFixture, both: bool
) -> None:
    """To the version in memory before it, else to that on disk. What is saved next points to neither version."""
    kept = killed_at(store, 7)
    before = state_in(store, SaveId(6, 1))
    for step in (6, 7) if both else (7,):
        flipped(store, SaveId(step, 1))
    two = Job(store, every=4, memory=memory(store), resume={"at": "newest"})
    with caplog.at_level(logging.INFO, "driftpoint"):
        assert two.ckpt.resume() == 7
    certificate = two.ckpt.certificate
    assert certificate is not None and not certificate.exact
    assert {(unit.layer, unit.slot) for unit in certificate.units if unit.fallback} == {("blocks.1", "fp32")}
    assert {(unit.source, unit.staleness) for unit in certificate.units if unit.fallback} == {
        ("", 3) if both else ("memory", 1)
    }
    assert "fell back" in caplog.text and "exact" not in caplog.text
    found = two.weights()
    wrong = {key for key in kept if not torch.equal(found[key], kept[key])}
    assert wrong == {"blocks.1.0.weight/fp32", "blocks.1.0.bias/fp32"}
    assert both or all(torch.equal(found[key], before[key].reshape(found[key].shape)) for key in wrong)
    run(two, 1)
    two.ckpt.flush()
    newest = catalog_of(store).manifest(SaveId(8, 2))
    assert {unit.save for unit in newest.units if unit.moving} == {newest.save.name}
    run(two, 5)
    two.ckpt.close()
    assert verify(open_catalog(LocalFiles(store))).ok


def test_wrong_run_state_in_memory_is_no_version(store: Path) -> None:
    """The version before is, and without one the newest commit."""
    killed_at(store, 6)
    killed = state_in(store, SaveId(5, 1))
    flipped(store, SaveId(6, 1), run_state=True)
    two = Job(store, every=4, memory=memory(store))
    assert two.ckpt.resume() == 5 and same(two.weights(), killed)
    certificate = two.ckpt.certificate
    assert certificate is not None and certificate.exact and sources(two) == {"memory"}
    abandoned(two)
    assert kept_steps(store) == [5], "it stands on that one"
    flipped(store, SaveId(5, 1), run_state=True)
    three = Job(store, every=4, memory=memory(store))
    assert three.ckpt.resume() == 4
    assert sources(three) == {""}
    three.ckpt.close()


def test_wrong_bytes_before_the_first_commit_begin_the_job_anew(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is nothing else to resume, and a job must not refuse to start for what was never promised."""
    killed_at(store, 3)
    for path in place_of(store).folder.glob("*.payload"):
        path.write_bytes(bytes(path.stat().st_size))
    two = Job(store, every=4, memory=memory(store))
    assert two.ckpt.resume() == 0
    assert two.ckpt.certificate is None
    assert "memory" in caplog.text
    run(two, 3)
    assert kept_steps(store)[-1] == 3
    two.ckpt.close()


def test_a_damaged_commit_does_not_hide_a_version_before_it(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest commit was torn on disk; memory has the step before, and the store only an older one."""
    one = Job(store, every=4, memory=memory(store))
    one.ckpt.resume()
    run(one, 7)
    kept = one.weights()
    run(one, 1)
    abandoned(one)
    manifest = store / "manifests" / "00000008-000001.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    two = Job(store, every=4, memory=memory(store))
    assert two.ckpt.resume() == 7
    assert same(two.weights(), kept)
    assert "00000008-000001" in caplog.text
    run(two, 3)
    two.ckpt.close()


@pytest.mark.parametrize(("at", "step"), [("effective", 15), ("newest", 16)])
def test_a_composite_does_not_hide_what_is_newer_in_memory(store: Path, at: str, step: int) -> None:
    """A commit of some layers is newer by its name; what it has of the others is not."""
    settings = {"every": 4, "policy": {"name": "parity", "k": 4}, "resume": {"at": at}}
    one = Job(store, **settings, memory=memory(store))
    one.ckpt.resume()
    run(one, 15)
    before = one.weights()
    run(one, 1)
    after = one.weights()
    abandoned(one)
    assert catalog_of(store).saves()[0].step == 16
    two = Job(store, **settings, memory=memory(store))
    assert two.ckpt.resume() == step
    found, certificate = two.weights(), two.ckpt.certificate
    assert certificate is not None
    if at == "effective":  # back to the step of the version: then all of it, and not some layers a step ahead
        assert certificate.exact and same(found, before)
    else:
        assert all(torch.equal(found[key], before[key]) or torch.equal(found[key], after[key]) for key in after)
        assert certificate.max_staleness == 1 and not certificate.exact
    run(two, 6)
    two.ckpt.save(wait=True)
    two.ckpt.close()
    assert verify(catalog_of(store)).ok


def test_where_the_version_that_a_composite_goes_back_to_is_damaged_the_composite_stands(store: Path) -> None:
    settings = {"every": 4, "policy": {"name": "parity", "k": 4}}
    one = Job(store, **settings, memory=memory(store))
    one.ckpt.resume()
    run(one, 16)
    abandoned(one)
    held = look(tier_of(store)).versions[SaveId(15, 1)][0]
    data = bytearray(held.payload.read_bytes())
    data[held.record.part.entries[0].offset] ^= 1
    held.payload.write_bytes(data)
    two = Job(store, **settings, memory=memory(store))
    assert two.ckpt.resume() == 15
    certificate = two.ckpt.certificate
    assert certificate is not None and certificate.save == SaveId(16, 1).name and not certificate.exact
    assert sources(two) == {"", "memory"}
    two.ckpt.close()


def test_wrong_run_state_in_memory_leaves_a_composite_its_own(store: Path) -> None:
    settings = {"every": 4, "policy": {"name": "parity", "k": 4}}
    one = Job(store, **settings, memory=memory(store))
    one.ckpt.resume()
    run(one, 16)
    abandoned(one)
    held = look(tier_of(store)).versions[SaveId(15, 1)][0]
    tensor = held.record.part.run_tensors[0]
    data = bytearray(held.payload.read_bytes())
    data[tensor.offset] ^= 1
    held.payload.write_bytes(data)
    two = Job(store, **settings, memory=memory(store))
    assert two.ckpt.resume() in (12, 16)
    assert two.ckpt.certificate is not None and two.ckpt.certificate.save == SaveId(16, 1).name
    two.ckpt.close()


def test_memory_above_a_store_whose_commits_cannot_be_read_builds_on_none_of_them(store: Path) -> None:
    """In the same process: what the job knew of them is forgotten, and the next save is a first one."""
    one = Job(store, every=4, memory=memory(store), policy={"name": "parity", "k": 2})
    one.ckpt.resume()
    run(one, 10)
    for path in (store / "manifests").iterdir():
        path.write_bytes(b"rubbish")
    kept = one.weights()
    assert one.ckpt.resume() == 10
    assert same(one.weights(), kept)
    run(one, 2)
    abandoned(one)
    newest = open_catalog(LocalFiles(store)).saves()[0]
    assert newest.step == 12
    units = open_catalog(LocalFiles(store)).manifest(newest).units
    assert {unit.save for unit in units if unit.moving} == {newest.name}


# ---- what a user's objects and the machine do


class Moody:
    """An object of the user's that raises when it is told to."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"a": 1}


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyError("k"), OSError("gone"), AssertionError()])
def test_what_a_users_object_raises_never_reaches_training(
    store: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    moody = Moody()
    one = Job(store, every=100, memory=memory(store), state=[moody])
    one.ckpt.resume()
    run(one, 3)
    kept = one.weights()
    moody.error = error
    run(one, 2)
    moody.error = None
    assert kept_steps(store) == [3], "the version before is still there"
    assert "no version of step 4 in memory" in caplog.text
    assert same(state_in(store), kept)
    run(one, 2)
    assert kept_steps(store)[-1] == 7
    one.ckpt.close()


def test_refused_again_and_again_it_goes_off_and_leaves_the_last_version(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moody = Moody()
    one = Job(store, every=100, memory=memory(store), state=[moody])
    one.ckpt.resume()
    run(one, 3)
    kept = one.weights()
    moody.error = StorageError("broken for good")
    run(one, 8)
    assert "the memory tier is off" in caplog.text and "broken for good" in caplog.text
    moody.error = None
    run(one, 2)
    assert kept_steps(store) == [3]
    assert len(list((store.parent / "shm").rglob("*.payload"))) == 1
    abandoned(one)
    two = Job(store, every=100, memory=memory(store), state=[Moody()])
    assert two.ckpt.resume() == 3
    assert same(two.weights(), kept)
    two.ckpt.close()
    assert not list((store.parent / "shm").rglob("rank-*"))


def test_memory_that_is_removed_under_it_goes_off(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By a cleaner of /dev/shm, say: what the background thread writes is refused then, for ever."""
    one = Job(store, every=4, memory=memory(store))
    one.ckpt.resume()
    run(one, 3)
    shutil.rmtree(tier_of(store).home)
    run(one, 8)
    assert caplog.text.count("the memory tier is off") == 1 and caplog.text.count("no version of step") == 3
    assert one.metric("driftpoint_memory_on") == 0.0
    one.ckpt.close()
    assert [save.step for save in catalog_of(store).saves()] == [8, 4]


def test_off_it_is_given_back_at_the_end(store: Path) -> None:
    moody = Moody()
    one = Job(store, every=100, memory=memory(store), state=[moody])
    one.ckpt.resume()
    run(one, 3)
    moody.error = StorageError("broken for good")
    run(one, 8)
    moody.error = None
    one.ckpt.save(wait=True)
    one.ckpt.close()
    assert not list((store.parent / "shm").rglob("rank-*"))


def test_memory_that_cannot_be_mapped_is_a_version_less(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = [torch.zeros(10)]

    class Grown:
        def state_dict(self) -> dict[str, Any]:
            return {"x": grown[0]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            grown[0] = state["x"]

    one = Job(store, every=100, memory=memory(store), state=[Grown()])
    one.ckpt.resume()
    run(one, 3)
    real = mmap.mmap

    def refused(*_: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refused)
        grown[0] = torch.zeros(1_000_000)
        run(one, 1)
    assert mmap.mmap is real
    assert kept_steps(store) == [3] or kept_steps(store) == [2, 3]
    run(one, 2)
    assert kept_steps(store)[-1] == 6
    one.ckpt.close()


def test_a_record_that_cannot_be_removed_stays_out_of_training(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder stands where a record should be removed: at a failed version, and at giving back."""
    one = Job(store, every=100, memory=memory(store))
    one.ckpt.resume()
    run(one, 3)
    with torch.no_grad():
        one.model.head.weight[0, 0] = float("nan")
    one.step()
    settled(one)
    whole = one.ckpt._memory._whole  # type: ignore[union-attr]
    assert whole is not None
    blocked = place_of(store).record(0, 1 - whole[0])
    blocked.mkdir()
    (blocked / "x").touch()
    run(one, 4)
    assert "memory" in caplog.text
    one.ckpt.close()
    assert blocked.exists()


@pytest.mark.needs_root
def test_a_folder_of_others_turns_it_off_and_says_so(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = memory(store)
    (store.parent / "shm" / f"driftpoint-{os.getuid()}").mkdir(mode=0o777)
    (store.parent / "shm" / f"driftpoint-{os.getuid()}").chmod(0o777)
    one = Job(store, every=4, memory=settings)
    assert one.ckpt.resume() == 0
    assert "the memory tier is off" in caplog.text and "is not a folder that only user" in caplog.text
    run(one, 5)
    one.ckpt.close()
    assert open_catalog(LocalFiles(store)).saves()[0].step == 4


# ---- little room


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "small", "6m") as place:
        yield place


WIDE = 320
"""The model has 3.8 MB of state: with a margin, one version fits into 6 MB, and two do not."""


@pytest.mark.needs_root
def test_without_room_the_store_alone_goes_on(store: Path, small: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = {"enabled": True, "every": 1, "path": str(small)}
    one = Job(store, every=4, memory=shared, width=WIDE)
    assert one.ckpt.resume() == 0
    run(one, 7)  # the optimizer has no state at first, and so there was room for what was known to be needed
    assert "the memory tier is off" in caplog.text and "versions: 1" in caplog.text
    one.ckpt.close()
    assert not list(small.rglob("rank-*"))
    assert open_catalog(LocalFiles(store)).saves()[0].step == 4


@pytest.mark.needs_root
def test_one_version_survives_one_restart_after_the_other(store: Path, small: Path) -> None:
    """Room for one payload and not for two: what the job stands on is replaced by its own first version."""
    shared = {"enabled": True, "every": 1, "path": str(small), "versions": 1}
    at, kept = 0, None
    for _ in range(4):
        one = Job(store, every=100, memory=shared, width=WIDE)
        assert one.ckpt.resume() == at
        assert kept is None or same(one.weights(), kept)
        run(one, 3)
        kept, at = one.weights(), at + 3
        assert not one.ckpt._memory._off  # type: ignore[union-attr]
        abandoned(one)
    last = Job(store, every=100, memory=shared, width=WIDE)
    assert last.ckpt.resume() == at
    last.ckpt.close()
    assert not list(small.rglob("rank-*"))


# ---- ends


def test_memory_stays_until_the_save_under_way_is_committed(store: Path) -> None:
    """Killed while close() waits for the disk, the job must not have thrown its newest state away."""
    one = Job(store, every=4, memory=memory(store))
    one.ckpt.resume()
    run(one, 7)
    blocked, released = threading.Event(), threading.Event()

    def wait(_: str, path: str) -> None:
        if "segments" in path:
            blocked.set()
            assert released.wait(60)

    one.hook().before = wait
    one.step(flush=False)
    assert blocked.wait(60)
    closing = threading.Thread(target=one.ckpt.close)
    closing.start()
    closing.join(1.0)
    assert closing.is_alive()
    assert kept_steps(store)[-1] == 7, "as long as it is the newest state that there is"
    released.set()
    closing.join(60)
    assert not list((store.parent / "shm").rglob("rank-*"))
    assert open_catalog(LocalFiles(store)).saves()[0].step == 8


def test_a_job_that_kept_nothing_itself_gives_back_what_it_began_with(store: Path) -> None:
    killed_at(store, 7)
    two = Job(store, every=4, memory=memory(store))
    assert two.ckpt.resume() == 7
    two.ckpt.close()
    assert not list((store.parent / "shm").rglob("rank-*"))


def test_after_an_error_memory_stays(store: Path) -> None:
    one = Job(store, every=4, memory=memory(store))
    kept = {}
    with pytest.raises(ZeroDivisionError), one.ckpt:
        one.ckpt.resume()
        run(one, 7)
        kept = one.weights()
        raise ZeroDivisionError
    two = Job(store, every=4, memory=memory(store))
    assert two.ckpt.resume() == 7
    assert same(two.weights(), kept)
    two.ckpt.close()


def test_a_version_that_is_not_finished_when_the_job_goes_back_is_not_written_over(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background thread is slow, and close timeouts short: its payload must not be used before it is done."""
    one = Job(store, every=100, memory=memory(store), timeouts={"close": 0.0})
    one.ckpt.resume()
    for _ in range(4):
        one.step(flush=False)
        settled(one)
    begun, go_on = threading.Event(), threading.Event()
    real = monitor.memory.remember

    def slow(version: Any) -> float:
        begun.set()
        assert go_on.wait(60)
        return real(version)

    monkeypatch.setattr(monitor.memory, "remember", slow)
    one.step(flush=False)
    assert begun.wait(60)
    monkeypatch.setattr(monitor.memory, "remember", real)
    assert one.ckpt.resume() == 4
    for _ in range(3):
        one.step(flush=False)
    go_on.set()
    settled(one)
    for _ in range(3):
        one.step(flush=False)
        settled(one)
    kept = one.weights()
    assert same(state_in(store), kept)
    abandoned(one)
    two = Job(store, every=100, memory=memory(store))
    assert two.ckpt.resume() == 10
    assert same(two.weights(), kept)
    two.ckpt.close()


def test_the_arena_is_let_go_of_even_where_it_cannot_be_given_back(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = Job(store, every=4, memory=memory(store))
    one.ckpt.resume()
    run(one, 3)

    def close(arena: Arena, *, remove: bool) -> None:
        arena._owner.release()
        raise StorageError(f"cannot remove anything, remove={remove}")

    monkeypatch.setattr(Arena, "close", close)
    one.ckpt.close()
    assert "cannot remove anything" in caplog.text


def test_what_a_job_came_back_for_is_not_old_any_more(store: Path) -> None:
    """After a weekend: only the first restart would find it, and cleaning would take it from under that one."""
    kept = killed_at(store, 6)
    weekend_ago = time.time() - 2.5 * 24 * 3600
    for path in place_of(store).folder.iterdir():
        os.utime(path, (weekend_ago, weekend_ago))
    two = Job(store, every=4, memory=memory(store))
    assert two.ckpt.resume() == 6
    clear_old(store.parent / "shm")  # as the daemon of the node does
    abandoned(two)
    three = Job(store, every=4, memory=memory(store))
    assert three.ckpt.resume() == 6 and same(three.weights(), kept)
    three.ckpt.close()


# ---- one identity, two stores


def test_a_copy_of_the_store_and_its_jobs_are_another_history(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a job on a copy kept is newer than everything here, and has the store's identity."""
    kept = killed_at(store, 6)
    copy = store.parent / "copy"
    shutil.copytree(store, copy)
    two = Job(copy, every=4, memory=memory(store), resume={"at": "newest"})
    assert two.ckpt.resume() == 6 and same(two.weights(), kept)
    run(two, 9)
    abandoned(two)
    assert kept_steps(store)[-1] == 15

    one = Job(store, every=4, memory=memory(store), resume={"at": "newest"})
    assert one.ckpt.resume() == 4 and sources(one) == {""}
    assert "on a copy of this store" in caplog.text
    run(one, 1)
    one.ckpt.close()


def test_a_store_that_was_restored_knows_nothing_of_the_epochs_since(store: Path) -> None:
    """The next job there claims their numbers anew, and finds their versions under its own."""
    first = Job(store, every=4)
    for _ in range(4):
        first.step()
    first.ckpt.close()
    shutil.copytree(store, store.parent / "backup")
    killed_at(store, 6)
    assert kept_steps(store)[-1] == 10
    shutil.rmtree(store)
    shutil.copytree(store.parent / "backup", store)

    again = Job(store, every=4, memory=memory(store), resume={"at": "newest"})
    assert again.ckpt.resume() == 4 and sources(again) == {""}
    run(again, 3)
    abandoned(again)
    last = Job(store, every=4, memory=memory(store), resume={"at": "newest"})
    assert last.ckpt.resume() == 7 and sources(last) == {"memory"}
    last.ckpt.close()
