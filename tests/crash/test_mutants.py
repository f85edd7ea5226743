"""Testing the tests: each safeguard of the store taken out in turn must be caught, by the layer that is named.

L0 is the simulated disk, L2 the real power loss, CORRUPTION the flipped bytes, FENCING two jobs on one store,
SLOW RANK a rank that never writes, CLASH a save that is made twice. Each check passes without the mutant.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import store.retention
from store.catalog import open_catalog
from store.commit import Expected, Group, commit
from store.errors import DriftpointError, ExistsError, FencedError, SaveError
from store.names import SaveId, payload_path
from store.schema import GroupRecord, to_bytes
from store.segment import PayloadPiece, parts_digest, present_parts, read_part
from store.storage.local import Files, NewFile
from store.verify import verify
from tests.crash import workload
from tests.crash.checker import Promise, assert_true_to_write, check, check_reading, promised, read_commit, read_newest
from tests.crash.damage import flip
from tests.crash.models import RANKS
from tests.crash.simulated import Disk, Op, SimulatedFiles, disk_after, every_crash
from tests.crash.workload import Job, Memory, Save

pytestmark = pytest.mark.slow

Make = Callable[[], SimulatedFiles]


def power_loss(make: Make = SimulatedFiles) -> None:
    """L0: three saves, a mark and a prune; every crash state at every change, the extreme ones where there are many."""
    files = make()
    start = files.disk.copied()
    journal = Memory(lambda: len(files.log))
    job = Job(files, journal)
    job.save()
    job.prove()
    job.save()
    job.save()
    job.prune()
    seen = set()
    for done in range(len(files.log) + 1):
        events = [e for e in journal.events if e["at"] < done or (e["at"] == done and e["event"] != "dropping")]
        for disk in every_crash(disk_after(start, files.log[:done]), 4):
            key = hashlib.md5(repr((disk.files(), len(events))).encode()).digest()
            if key not in seen:
                seen.add(key)
                check(SimulatedFiles(disk), promised(events))


def corruption(make: Make = SimulatedFiles) -> None:
    """CORRUPTION: one byte of a fragment, one of a run state, one of each record."""
    job = Job(make(), Memory())
    saves = [job.save() for _ in range(3)]
    part = read_part(job.files, job.catalog.store_id, saves[2], 1)
    places = [
        (payload_path(saves[2], 1), part.header_bytes + part.entries[0].offset),
        (payload_path(saves[2], 1), part.header_bytes + part.run_tensors[0].offset),
        (f"manifests/{saves[2]}.json", 60),
        (f"segments/{saves[2]}/rank-00001.json", 60),
    ]
    for path, at in places:
        hurt = SimulatedFiles(job.files.disk.copied())
        flip(hurt, path, at)
        reading = read_newest(open_catalog(hurt))
        assert_true_to_write(reading)
        assert reading.reported, path
        assert not verify(open_catalog(hurt)).ok, path


def fencing(make: Make = SimulatedFiles) -> None:
    """FENCING: a job is stopped in the middle of its commit, another takes over and prunes, the first wakes up."""
    files = make()
    journal = Memory()
    old = Job(files, journal)
    old.save()
    draft = old.plan()
    for rank in range(RANKS):
        old.write(draft, rank)

    def take_over(op: Op) -> None:
        if op.verb == "create" and op.path.startswith("manifests/"):
            files.before = lambda op: None
            newer = Job(files, Memory())
            newer.save()
            newer.prune()

    files.before = take_over
    with suppress(FencedError):
        old.commit(draft)
    for event in journal.events:
        if event["event"] == "acknowledged":
            assert_true_to_write(read_commit(open_catalog(files), SaveId.parse(event["save"])))


def fencing_before_the_prune(make: Make = SimulatedFiles) -> None:
    """FENCING: the first wakes up before the other has pruned."""
    files = make()
    old = Job(files, Memory())
    draft = old.plan()
    for rank in range(RANKS):
        old.write(draft, rank)
    Job(files, Memory())
    with pytest.raises(FencedError):
        old.commit(draft)


def slow_rank(make: Make = SimulatedFiles) -> None:
    """SLOW RANK: one never writes; what is acknowledged must be whole all the same."""
    files = make()
    journal = Memory()
    job = Job(files, journal)
    job.save()
    draft = job.plan()
    job.write(draft, 0)
    with suppress(SaveError):
        job.commit(draft)
    check_reading(files, promised(journal.events))


def clash(make: Make = SimulatedFiles) -> None:
    """CLASH: the same commit and the same segment once more, with other content; what was there must stay."""
    files = make()
    journal = Memory()
    job = Job(files, journal)
    save = job.save()
    assert job.last is not None
    for again in (
        lambda: commit(files, job.last.replace(units=())),  # type: ignore[union-attr]
        lambda: job.write(Save(save, ()), 0),
    ):
        with suppress(ExistsError):
            again()
    check_reading(files, promised(journal.events))


LAYERS = {
    "L0": power_loss,
    "CORRUPTION": corruption,
    "FENCING": fencing,
    "FENCING before the prune": fencing_before_the_prune,
    "SLOW RANK": slow_rank,
    "CLASH": clash,
}


@pytest.mark.parametrize("layer", LAYERS)
def test_without_a_mutant_each_layer_is_content(layer: str) -> None:
    LAYERS[layer]()


class NoFileSync(SimulatedFiles):
    """File fsync dropped."""

    def create(self, path: str) -> NewFile:
        file = super().create(path)
        file.sync = lambda: None  # type: ignore[method-assign]
        return file


def no_directory_sync(dropped: Callable[[str], bool]) -> Make:
    """Directory fsync dropped, for some directories."""

    class NoDirectorySync(SimulatedFiles):
        def sync_dir(self, path: str) -> None:
            if not dropped(path):
                super().sync_dir(path)

    return NoDirectorySync


Content = bytes | Callable[[NewFile], None]


def put(file: NewFile, content: Content) -> None:
    if isinstance(content, bytes):
        file.write(content)
    else:
        content(file)


def write_in_place(files: Files, path: str, content: Content, **_: object) -> None:
    """Temporary name dropped."""
    file = files.create(path)
    put(file, content)
    file.sync()
    file.close()
    files.sync_dir(path.rpartition("/")[0])


def write_by_rename(files: Files, path: str, content: Content, **_: object) -> None:
    """A rename, which replaces, in place of the link, which does not."""
    folder = path.rpartition("/")[0]
    temporary = f"{folder}/.tmp-{secrets.token_hex(6)}-x".lstrip("/")
    file = files.create(temporary)
    put(file, content)
    file.sync()
    file.close()
    files.rename(temporary, path)
    files.sync_dir(folder)


def name_first(files: Files, path: str, content: Content, **_: object) -> None:
    """The final name given before the bytes are synced."""
    folder = path.rpartition("/")[0]
    temporary = f"{folder}/.tmp-{secrets.token_hex(6)}-x".lstrip("/")
    file = files.create(temporary)
    put(file, content)
    files.link(temporary, path)
    files.sync_dir(folder)
    file.sync()
    file.close()
    files.unlink(temporary)


def read_unchecked(files: Files, path: str, header_bytes: int, piece: PayloadPiece, target: memoryview) -> None:
    """Hash check dropped."""
    files.read_into(path, header_bytes + piece.offset, target)


def text_unchecked(data: bytes, what: str) -> bytes:
    """Record checksum dropped."""
    return json.dumps(json.loads(data)["body"]).encode()


def take_what_is_there(files: Files, expected: Expected, timeout: float) -> Group:
    """Wait for parts dropped."""
    ranks = present_parts(files, expected.save)
    parts = tuple(read_part(files, expected.store_id, expected.save, rank) for rank in ranks)
    digest = parts_digest(to_bytes(part) for part in parts)
    return Group(parts, GroupRecord(world_size=len(parts), payload_bytes=0, parts=digest))


def patched_everywhere(monkeypatch: pytest.MonkeyPatch, name: str, mutant: object) -> None:
    """In every module that has the name, because modules import names from one another."""
    modules = [found for key, found in sys.modules.items() if key == "tests.crash.workload" or key.startswith("store.")]
    for module in modules:
        if hasattr(module, name):
            monkeypatch.setattr(module, name, mutant)


def caught(layer: Callable[[Make], None], make: Make = SimulatedFiles) -> bool:
    """Whether the layer fails. Only by an assertion, or by the store's own answer to what it finds."""
    try:
        layer(make)
    except (AssertionError, DriftpointError, ValueError, pytest.fail.Exception):
        return True
    return False


FILES_MUTANTS: dict[str, tuple[str, Make]] = {
    "file fsync dropped": ("L0", NoFileSync),
    "directory fsync dropped": ("L0", no_directory_sync(lambda path: True)),
    "directory fsync dropped: manifests": ("L0", no_directory_sync(lambda path: path == "manifests")),
    "directory fsync dropped: segment groups": ("L0", no_directory_sync(lambda path: path.startswith("segments/"))),
    "directory fsync dropped: new groups": ("L0", no_directory_sync(lambda path: path == "segments")),
    "directory fsync dropped: marks": ("L0", no_directory_sync(lambda path: path == "proven")),
    "directory fsync dropped: root": ("L0", no_directory_sync(lambda path: path == "")),
}


@pytest.mark.parametrize("mutant", FILES_MUTANTS)
def test_a_dropped_sync_is_caught(mutant: str) -> None:
    layer, make = FILES_MUTANTS[mutant]
    assert caught(LAYERS[layer], make), f"{mutant} survives {layer}"


CODE_MUTANTS: dict[str, tuple[str, str, object]] = {
    "temporary name dropped": ("L0", "write_new", write_in_place),
    "name before fsync": ("L0", "write_new", name_first),
    "link replaced by rename": ("CLASH", "write_new", write_by_rename),
    "hash check dropped": ("CORRUPTION", "read_piece", read_unchecked),
    "record checksum dropped": ("CORRUPTION", "sealed_text", text_unchecked),
    "wait for parts dropped": ("SLOW RANK", "wait_for_group", take_what_is_there),
    "epoch check dropped": ("FENCING", "require_newest", lambda files, epoch: None),
    "epoch check dropped, no prune": ("FENCING before the prune", "require_newest", lambda files, epoch: None),
}


@pytest.mark.parametrize("mutant", CODE_MUTANTS)
def test_a_dropped_safeguard_is_caught(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    layer, name, replacement = CODE_MUTANTS[mutant]
    assert caught_with(monkeypatch, layer, name, replacement), f"{mutant} survives {layer}"


def caught_with(monkeypatch: pytest.MonkeyPatch, layer: str, name: str, replacement: object) -> bool:
    patched_everywhere(monkeypatch, name, replacement)
    return caught(LAYERS[layer])


def test_pruning_segments_before_manifests_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = store.retention.execute

    def backwards(files: Files, plan: Any) -> None:
        for group in plan.groups:
            store.retention._remove_group(files, group)
        real(files, plan)

    monkeypatch.setattr(workload, "execute", backwards)
    files = SimulatedFiles()
    journal = Memory(lambda: len(files.log))
    job = Job(files, journal)
    for _ in range(5):
        job.save()
    at = len(files.log)
    job.prune()
    states = itertools.chain.from_iterable(
        every_crash(disk_after(Disk(), files.log[:done]), 4) for done in range(at, len(files.log))
    )
    with pytest.raises(AssertionError):
        for disk in states:
            check(SimulatedFiles(disk), Promise())


@pytest.mark.needs_root
@pytest.mark.parametrize("mutant", ["file", "directory"])
def test_a_dropped_sync_is_caught_by_a_real_power_loss(
    mutant: str,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L2, at the moment of the last acknowledgement: the mutant's commit must be lost or damaged."""
    from tests.crash import test_power_loss

    makes = test_power_loss.machine.__wrapped__(tmp_path_factory)
    machine = next(makes)
    request.addfinalizer(lambda: next(makes, None))
    outcome = None
    machine.fresh("base")
    with machine.mounted() as place:
        outcome = machine.zygote.doomed(f"commit-without-{mutant}-sync", place, machine.folder / "journal", 1_000_000)
        assert outcome.code == 0, outcome
    promise = promised([*machine.base_events, *outcome.events])
    with machine.mounted() as place, pytest.raises((AssertionError, DriftpointError)):
        check(_local(place), promise)


def _local(place: Path) -> Files:
    from store.storage.local import LocalFiles

    return LocalFiles(place)
