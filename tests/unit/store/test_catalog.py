from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from store.catalog import open_catalog, open_or_create, restore_store_record
from store.errors import DamagedError, ExistsError, NewerFormatError, NoStoreError, NothingToResumeError, StorageError
from store.names import STORE
from store.resolve import newest_resumable
from store.schema import READER, StoreRecord, seal, to_bytes
from store.session import mark_closed
from store.storage.atomic import write_new
from store.storage.local import LocalFiles
from tests.crash.checker import assert_true_to_write, read_newest
from tests.crash.damage import flip, forge, put, remove
from tests.crash.simulated import Op, SimulatedFiles
from tests.crash.workload import Job, Memory
from tests.support.records import unseal

ROOT = Path(__file__).parents[3]


def test_made_once_and_found_again(tmp_path: Path) -> None:
    made = open_or_create(LocalFiles(tmp_path / "new" / "store"))
    assert sorted(p.name for p in (tmp_path / "new" / "store").iterdir()) == [
        "STORE.json", "epochs", "manifests", "proven", "segments",
    ]  # fmt: skip
    assert open_or_create(LocalFiles(tmp_path / "new" / "store")).store_id == made.store_id
    assert open_catalog(LocalFiles(tmp_path / "new" / "store")).store_id == made.store_id
    assert open_or_create(LocalFiles(tmp_path / "other")).store_id != made.store_id


def test_an_empty_store_has_nothing_to_resume(files: SimulatedFiles) -> None:
    catalog = open_or_create(files)
    assert catalog.saves() == []
    assert catalog.proven() == set()
    with pytest.raises(NothingToResumeError, match="no commit yet"):
        newest_resumable(catalog)


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(NoStoreError, match=str(tmp_path)):
        open_catalog(LocalFiles(tmp_path))
    with pytest.raises(NoStoreError):
        open_catalog(LocalFiles(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()


def test_it_never_moves_in_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(StorageError, match=r"thesis\.tex"):
        open_or_create(LocalFiles(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_fresh_volume_counts_as_empty(tmp_path: Path) -> None:
    """ext4 puts ``lost+found`` into every new filesystem, and a volume is often mounted right here."""
    (tmp_path / "lost+found").mkdir()
    open_or_create(LocalFiles(tmp_path))


def test_what_an_interrupted_creation_left_is_completed(files: SimulatedFiles) -> None:
    files.make_dir("epochs")
    put(files, ".tmp-0123456789ab-STORE.json", b"half")
    open_or_create(files)
    open_catalog(files)


def test_two_processes_that_create_agree_on_one_store(files: SimulatedFiles) -> None:
    other: list[str] = []

    def race(op: Op) -> None:
        if op.verb == "link" and op.target == "STORE.json":
            files.before = lambda op: None
            other.append(open_or_create(files).store_id)

    files.before = race
    assert [open_or_create(files).store_id] == other


def test_a_store_without_its_record_is_never_made_anew_over_its_commits(job: Job) -> None:
    """A silent restart from step 0 is the worst that could happen here."""
    job.save()
    remove(job.files, "STORE.json")
    before = job.files.disk.files()
    for opened in (open_catalog, open_or_create):
        with pytest.raises(DamagedError, match=r"holds commits but its STORE\.json is missing"):
            opened(job.files)
    assert job.files.disk.files() == before


def test_a_damaged_record_is_told(job: Job) -> None:
    flip(job.files, "STORE.json", 15)
    for opened in (open_catalog, open_or_create):
        with pytest.raises(DamagedError, match=r"STORE\.json"):
            opened(job.files)


def test_a_newer_format_is_told_from_damage(files: SimulatedFiles) -> None:
    write_new(
        files, "STORE.json", lambda f: f.write(to_bytes(StoreRecord(format=2, reader=READER + 1, store_id="0" * 32)))
    )
    for opened in (open_catalog, open_or_create):
        with pytest.raises(NewerFormatError, match="pip install"):
            opened(files)


def test_a_newer_format_that_old_readers_may_read(files: SimulatedFiles) -> None:
    open_or_create(files)
    forge(files, "STORE.json", lambda body: body.update(format=7, reader=1, later="more"))
    open_catalog(files)


def test_lost_manifests_are_not_taken_for_a_fresh_store(job: Job) -> None:
    """A store copied without ``manifests/`` must not look as if nothing had ever been saved."""
    saved = job.save()
    remove(job.files, f"manifests/{saved.name}.json")
    job.files.remove_dir("manifests")
    with pytest.raises(DamagedError, match="manifests"):
        newest_resumable(open_catalog(job.files))
    with pytest.raises(DamagedError, match="manifests"):
        Job(job.files, Memory())


def test_a_read_only_directory(tmp_path: Path) -> None:
    """Under another user where the tests run as root, because root may write anywhere."""
    store = tmp_path / "store"
    job = Job(LocalFiles(store), Memory())
    saved = job.save()
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    for directory in (fresh, *(p for p in store.rglob("*") if p.is_dir()), store):
        directory.chmod(0o555)
    for parent in tmp_path.parents:
        if os.geteuid() == 0 and parent.is_relative_to("/tmp/pytest-of-root"):
            parent.chmod(0o755)
    tmp_path.chmod(0o755)
    found = subprocess.run(
        [sys.executable, "-c", READ_ONLY, str(store), str(fresh)], check=False, cwd=ROOT, capture_output=True, text=True
    )
    for directory in (fresh, *(p for p in store.rglob("*") if p.is_dir()), store):
        directory.chmod(0o755)
    assert found.stdout.split("\n")[:3] == [saved.name, "StorageError", "StorageError"], found


READ_ONLY = """
import os, sys
from store.catalog import open_catalog
from store.session import claim_epoch
from store.errors import StorageError
from store.storage.local import LocalFiles
from store.catalog import open_or_create
from store.resolve import newest_resumable
if os.geteuid() == 0:
    os.setuid(65534)
catalog = open_or_create(LocalFiles(sys.argv[1]))
print(newest_resumable(catalog)[0].manifest.save)
for attempt in (lambda: claim_epoch(catalog.files, catalog.store_id), lambda: open_or_create(LocalFiles(sys.argv[2]))):
    try:
        attempt()
    except StorageError as error:
        assert "permission" in str(error), error
        print(type(error).__name__)
"""


def test_a_lost_store_record_is_restored_from_the_others(job: Job) -> None:
    job.save()
    mark_closed(job.files, job.catalog.store_id, job.epoch, 1.0)
    before = job.files.read(STORE, 1 << 16)
    remove(job.files, STORE)
    with pytest.raises(DamagedError, match="--repair"):
        open_or_create(job.files)
    catalog = restore_store_record(job.files)
    assert job.files.read(STORE, 1 << 16) == before
    assert_true_to_write(read_newest(catalog))


def test_a_store_record_that_is_whole_is_not_replaced(job: Job) -> None:
    before = job.files.read(STORE, 1 << 16)
    with pytest.raises(ExistsError):
        restore_store_record(job.files)
    put(job.files, STORE, seal({**unseal(before, STORE), "reader": 99}))
    newer = job.files.read(STORE, 1 << 16)
    with pytest.raises(NewerFormatError):
        restore_store_record(job.files)
    assert job.files.read(STORE, 1 << 16) == newer


def test_a_damaged_store_record_is_restored(job: Job) -> None:
    job.save()
    before = job.files.read(STORE, 1 << 16)
    flip(job.files, STORE, 20)
    with pytest.raises(DamagedError):
        open_catalog(job.files)
    catalog = restore_store_record(job.files)
    assert job.files.read(STORE, 1 << 16) == before
    assert_true_to_write(read_newest(catalog))


def test_a_store_of_records_of_two_stores_is_not_repaired(job: Job) -> None:
    other = Job(SimulatedFiles(), Memory())
    put(job.files, "epochs/000002.json", other.files.read("epochs/000001.json", 1 << 16))
    remove(job.files, STORE)
    with pytest.raises(DamagedError, match="2 store ids"):
        restore_store_record(job.files)
