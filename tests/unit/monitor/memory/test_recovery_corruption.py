"""Wrong bytes in memory, of fragments, run state and records: found, told, and never resumed from as if right."""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from monitor.config.load import Config
from store.catalog import open_catalog
from store.errors import DamagedError
from store.memory.index import scan_node
from store.memory.layout import Generation
from store.memory.overlay import Overlay
from store.names import SaveId, payload_path
from store.schema import Entry, PartRecord, StateTensor
from store.segment import PayloadPiece, read_piece
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.jobs import Job, same
from tests.support.kept import abandoned, catalog_of, memory, tier_of
from tests.support.memory_jobs import kept_steps, killed_at, leaves_in, run, sources, state_in, version


def place_of(store: Path) -> Generation:
    return tier_of(store).generations()[0]


@pytest.mark.slow
def test_every_flipped_byte_of_a_version_is_detected_or_harmless(store: Path) -> None:
    """Fragments and run state, byte by byte: found by a hash, or between two fragments, where nothing is."""
    kept = killed_at(store, 3, width=1)
    held = scan_node(tier_of(store)).versions[SaveId(3, 1)][0]
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
    placed = PayloadPiece(piece.offset, piece.nbytes, piece.xxh3_128)
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
    held = scan_node(tier_of(store)).versions[SaveId(7, 1)][0]
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
    held = scan_node(tier_of(store)).versions[save][0]
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
    assert "fell back" in caplog.text and "(exact" not in caplog.text
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


def test_a_damaged_commit_does_not_hide_a_version_before_it(
    store: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest commit was torn on disk; memory has the step before, and the store only an older one."""
    monkeypatch.setattr(Config, "shares_memory", lambda _: False)
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
    held = scan_node(tier_of(store)).versions[SaveId(15, 1)][0]
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
    held = scan_node(tier_of(store)).versions[SaveId(15, 1)][0]
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
