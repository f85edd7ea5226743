"""Importing a checkpoint into a store: the same bits, one commit or none, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import merger.import_checkpoint
import merger.io.blocks
import merger.io.output_dir
from merger.import_checkpoint import ImportResult, import_checkpoint, plan_import
from merger.merge import merge
from merger.sources.store import StoreSource
from store.catalog import open_catalog, open_or_create
from store.errors import (
    DamagedError,
    FencedError,
    MergeError,
    NoStoreError,
    NothingToResumeError,
    StorageError,
    StoreInUseError,
    UsageError,
)
from store.names import SaveId, Unit, payload_path
from store.segment import SegmentDraft, read_part, write_segment
from store.session import StoreLock, claim_epoch
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.imports import IN_PLACES, alike, begin, left, saves, segments
from tests.support.plain_stores import PlainStore, digest_of, rebuilt, same
from tests.support.slow import others_slow
from tests.support.stores import FakeLayer, flip_byte

ROOT = Path(__file__).parents[3]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target" / "store"


def imported(source: Path, target: Path, step: str | None = None, progress: Any = lambda _: None) -> ImportResult:
    return import_checkpoint(plan_import(source, step), target, progress)


def test_the_whole_state_is_there(store: PlainStore, target: Path, tmp_path: Path) -> None:
    store.save(10)
    before, told = digest_of(store.root), list[int]()
    plan = plan_import(store.root)
    found = import_checkpoint(plan, target, told.append)
    assert digest_of(store.root) == before
    assert sum(told) == plan.bytes_to_read == sum(12 * layer.numel for layer in store.layers)
    assert (found.save, found.problems, found.notes) == (SaveId(10, 1), (), ())
    assert found.certificate.exact and found.certificate.max_drift == 0
    merge(target, tmp_path / "out")
    assert same(rebuilt(tmp_path / "out"), store.expected(10))
    one, other = (StoreSource(root).checkpoint(None, frozenset()) for root in (store.root, target))
    assert alike(one.framework_state, other.framework_state)
    assert (one.tensors, one.layers, one.facts, one.step) == (other.tensors, other.layers, other.facts, other.step)
    assert one.run_states.keys() == other.run_states.keys() == {0, 1}
    for rank in (0, 1):
        assert alike(one.run_states[rank].rng, other.run_states[rank].rng)
        assert alike(one.run_states[rank].user, other.run_states[rank].user)


def test_it_is_a_commit_like_any_other(store: PlainStore, target: Path) -> None:
    store.save(10)
    imported(store.root, target)
    catalog = open_catalog(LocalFiles(target))
    report = verify(catalog)
    assert report.ok and report.resumable == SaveId(10, 1)
    manifest = catalog.manifest(SaveId(10, 1))
    assert (manifest.policy, manifest.commits, manifest.previous, manifest.framework) == ("import", 1, None, "torch")
    assert {unit.unit for unit in manifest.units} == set(store.units)
    assert all((unit.drift, unit.staleness, unit.moving) == (0, 0, True) for unit in manifest.units)
    assert (target / "LATEST").read_text() == "00000010-000001\n"
    original = open_catalog(store.files).manifest(SaveId(10, 1))
    assert {unit.unit: (unit.numel, unit.nbytes) for unit in manifest.units} == {
        unit.unit: (unit.numel, unit.nbytes) for unit in original.units
    }


def test_large_tensors_are_cut_so_that_ranks_need_not_read_all_of_them(
    store: PlainStore, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merger.io.blocks, "FRAGMENT_BYTES", 40)
    monkeypatch.setattr(merger.io.blocks, "READ", 24)
    store.save(10)
    imported(store.root, target)
    catalog = open_catalog(LocalFiles(target))
    manifest = catalog.manifest(SaveId(10, 1))
    part = catalog.group(SaveId(10, 1), manifest.groups["00000010-000001"]).parts[0]
    assert max(entry.nbytes for entry in part.entries) == 40
    merge(target, tmp_path / "out")
    assert same(rebuilt(tmp_path / "out"), store.expected(10))


def test_frozen_layers_and_an_older_step(tmp_path: Path, target: Path) -> None:
    store = PlainStore(tmp_path / "store", layers=[FakeLayer("one", 20), FakeLayer("two", 30, frozen=True)])
    store.save(10)
    store.save(20)
    found = imported(store.root, target, "10")
    assert found.certificate.step == 10
    units = {(unit.layer, unit.slot): unit.moving for unit in found.certificate.units}
    assert units["two", "frozen"] is False and units["one", "fp32"] is True
    # What does not move is of an older save in the store, and still exact.
    assert imported(store.root, tmp_path / "second").certificate.exact


def test_an_empty_directory_and_a_store_without_commits(store: PlainStore, target: Path, tmp_path: Path) -> None:
    store.save(10)
    target.mkdir(parents=True)
    imported(store.root, target)
    catalog = open_or_create(LocalFiles(tmp_path / "empty"))
    claim_epoch(catalog.files, catalog.store_id)
    assert imported(store.root, tmp_path / "empty").save == SaveId(10, 2)


def test_a_composite_is_refused(store: PlainStore, target: Path) -> None:
    store.save(10)
    store.save(20, layers=("layers.0",), drift=0.5)
    with pytest.raises(UsageError, match="is a composite: layers of it are up to 10 steps older"):
        plan_import(store.root)
    assert imported(store.root, target, "10").certificate.exact


def test_a_version_that_stands_in_for_a_damaged_one_is_refused(store: PlainStore, target: Path) -> None:
    store.save(10)
    second = store.save(20)
    (store.root / payload_path(second, 1)).unlink()
    found = plan_import(store.root)  # the run state is gone with it: the commit before is taken
    assert found.checkpoint.step == 10 and found.checkpoint.problems


def test_a_store_with_commits_is_refused(store: PlainStore, target: Path) -> None:
    store.save(10)
    imported(store.root, target)
    before = digest_of(target)
    with pytest.raises(UsageError, match="already has the commit 00000010-000001"):
        imported(store.root, target)
    assert {path.name for path in (target / "epochs").iterdir()} == {"000001.json"}
    assert digest_of(target) == before


def test_a_store_in_use_is_refused(store: PlainStore, target: Path) -> None:
    store.save(10)
    open_or_create(LocalFiles(target))
    lock = StoreLock(target, 0)
    try:
        with pytest.raises(StoreInUseError):
            imported(store.root, target)
    finally:
        lock.release()
    imported(store.root, target)


@pytest.mark.parametrize("place", ["", "inside", "above"])
def test_source_and_store_must_be_apart(store: PlainStore, tmp_path: Path, place: str) -> None:
    store.save(10)
    before = digest_of(store.root)
    at = {"": store.root, "inside": store.root / "inside", "above": tmp_path}[place]
    with pytest.raises(UsageError, match="contains the other"):
        imported(store.root, at)
    assert digest_of(store.root) == before


def test_a_directory_with_something_else_is_refused(store: PlainStore, target: Path) -> None:
    store.save(10)
    target.mkdir(parents=True)
    (target / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"is no store and not empty \(it holds 'notes\.txt'\)"):
        imported(store.root, target)
    assert [path.name for path in target.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("below", ["", "runs/one"])
def test_a_symbolic_link_to_nothing_is_told_as_what_it_is(store: PlainStore, tmp_path: Path, below: str) -> None:
    store.save(10)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match=r"link is a symbolic link to nothing: name a new directory"):
        imported(store.root, link / below)
    assert not (tmp_path / "gone").exists()


def test_no_checkpoint_no_store(store: PlainStore, tmp_path: Path) -> None:
    with pytest.raises(NothingToResumeError):
        plan_import(store.root)
    with pytest.raises(NoStoreError):
        plan_import(tmp_path / "nowhere")
    store.save(10)
    with pytest.raises(MergeError, match="has no commit 11"):
        plan_import(store.root, "11")


@IN_PLACES
@pytest.mark.parametrize("rank", [0, 1])
def test_damage_in_the_source_makes_no_commit(store: PlainStore, target: Path, rank: int, begun: bool) -> None:
    save, epochs = store.save(10), begin(target, begun)
    part = read_part(store.files, store.store_id, save, rank)
    position = part.header_bytes + part.entries[-1].offset
    flip_byte(store.payload(save, rank), position)
    with pytest.raises(DamagedError, match=r"lm_head/exp_avg_sq of save 00000010-000001: .* do not match"):
        imported(store.root, target)
    assert left(target, begun) == []
    flip_byte(store.payload(save, rank), position)
    assert imported(store.root, target).save == SaveId(10, 1 + 2 * epochs)
    assert verify(open_catalog(LocalFiles(target))).ok


@IN_PLACES
def test_what_does_not_read_back_makes_no_commit(
    store: PlainStore, target: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    store.save(10)
    begin(target, begun)

    def spoiled(position: int) -> Callable[[LocalFiles, SegmentDraft], None]:
        def write(files: LocalFiles, draft: SegmentDraft) -> None:
            write_segment(files, draft)
            if draft.rank == 0:
                flip_byte(files.root / payload_path(draft.save, draft.rank), position)

        return write

    for position in (20, 4000, -1):  # the header, a tensor, run state
        monkeypatch.setattr(merger.import_checkpoint, "write_segment", spoiled(position))
        with pytest.raises(DamagedError, match="check `dmesg` for disk errors"):
            imported(store.root, target)
        assert left(target, begun) == []


@IN_PLACES
def test_an_interrupt_makes_no_commit(store: PlainStore, target: Path, begun: bool) -> None:
    store.save(10)
    begin(target, begun)

    def progress(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        imported(store.root, target, progress=progress)
    assert left(target, begun) == []
    imported(store.root, target)


def test_a_job_that_takes_the_store_meanwhile_wins(store: PlainStore, target: Path) -> None:
    store.save(10)
    catalog = open_or_create(LocalFiles(target))
    claimed: list[int] = []

    def progress(count: int) -> None:
        if not claimed:
            claimed.append(claim_epoch(catalog.files, catalog.store_id).epoch)

    with pytest.raises(FencedError, match="epoch 1 lost the store to epoch 2"):
        imported(store.root, target, progress=progress)
    assert saves(target) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import merger.io.blocks
from merger.import_checkpoint import plan_import
from merger.import_checkpoint import import_checkpoint
merger.io.blocks.READ = 64
left = [int(sys.argv[3])]
def progress(count):
    left[0] -= count
    if left[0] <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
import_checkpoint(plan_import(Path(sys.argv[1])), Path(sys.argv[2]), progress)
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, check=False, env=environment, timeout=180, capture_output=True, text=True)


@IN_PLACES
@pytest.mark.parametrize("after", others_slow([1, 2000]))
def test_a_killed_import_leaves_no_commit_and_the_next_one_clears_it_away(
    store: PlainStore, target: Path, after: int, begun: bool
) -> None:
    store.save(10)
    epochs = begin(target, begun)
    assert run(KILLED, store.root, target, after).returncode == -signal.SIGKILL
    assert target.exists() is begun and left(target, begun), "in a new place, under a temporary name"
    assert not begun or saves(target) == []
    found = imported(store.root, target)
    assert (found.save, found.problems) == (SaveId(10, 1 + 2 * epochs), ())
    assert segments(target)[0] == found.save.name
    assert [path.name for path in target.parent.iterdir()] == ["store"]
    assert verify(open_catalog(LocalFiles(target))).ok


FULL = """
import resource, signal, sys
from pathlib import Path
from merger.import_checkpoint import plan_import
from merger.import_checkpoint import import_checkpoint
from store.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
plan = plan_import(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    import_checkpoint(plan, Path(sys.argv[2]))
except StorageError as error:
    sys.exit(f"StorageError: {error}")
"""


@pytest.mark.slow
def test_a_device_that_takes_no_more(store: PlainStore, target: Path) -> None:
    store.save(10)
    done = run(FULL, store.root, target)
    assert done.returncode == 1
    assert "the file-size limit is reached" in done.stderr
    assert left(target) == []


def test_a_device_without_room_is_told_first(store: PlainStore, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(10)
    monkeypatch.setattr(merger.io.output_dir.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100})())
    with pytest.raises(StorageError, match=r"needs 5472 bytes .* but 100 are free"):
        imported(store.root, target)
    assert left(target) == []


MEASURED = """
import sys
from pathlib import Path
from merger.import_checkpoint import plan_import
from merger.import_checkpoint import import_checkpoint
import_checkpoint(plan_import(Path(sys.argv[1])), Path(sys.argv[2]))

def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

Path("/proc/self/clear_refs").write_text("5")
before = field("VmRSS")
import_checkpoint(plan_import(Path(sys.argv[3])), Path(sys.argv[4]))
print(field("VmHWM") - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    small, large = PlainStore(tmp_path / "small"), PlainStore(tmp_path / "large", layers=[FakeLayer("one", 20_000_000)])
    small.save(10)
    large.save(10)
    done = run(MEASURED, small.root, tmp_path / "first", large.root, tmp_path / "second")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50_000_000
    values = rebuilt(merge(tmp_path / "second", tmp_path / "out").out)["one.weight"]["fp32"]
    assert values.tobytes() == large.values(Unit("one", "fp32"), 10).tobytes()
