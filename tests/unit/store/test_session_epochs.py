from __future__ import annotations

import threading
from pathlib import Path

import pytest

from store.catalog import open_catalog, open_or_create
from store.commit import commit
from store.errors import DamagedError, ExistsError, FencedError, MissingError, StorageError
from store.names import SaveId, epoch_path, manifest_path, segment_dir
from store.session import claim_epoch, newest_epoch, read_epoch, require_newest
from store.storage.atomic import ensure_dir
from store.storage.local import LocalFiles
from tests.crash.damage import flip, put, remove
from tests.crash.simulated import Fault, Op, SimulatedFiles
from tests.crash.workload import Job, Memory


def test_each_claim_takes_the_next_number(files: SimulatedFiles) -> None:
    store_id = open_or_create(files).store_id
    assert newest_epoch(files) == 0
    records = [claim_epoch(files, store_id) for _ in range(3)]
    assert [record.epoch for record in records] == [1, 2, 3]
    assert len({record.token for record in records}) == 3
    assert newest_epoch(files) == 3
    assert [read_epoch(files, record.epoch) for record in records] == records


def test_the_older_owner_is_fenced(files: SimulatedFiles) -> None:
    store_id = open_or_create(files).store_id
    old = claim_epoch(files, store_id).epoch
    require_newest(files, old)
    new = claim_epoch(files, store_id).epoch
    require_newest(files, new)
    with pytest.raises(FencedError, match="epoch 1 lost the store to epoch 2"):
        require_newest(files, old)


def test_a_taken_number_is_left_to_its_owner(files: SimulatedFiles) -> None:
    """Another job claims between the look and the claim."""
    store_id = open_or_create(files).store_id

    def race(op: Op) -> None:
        if op.verb == "link":
            files.before = lambda op: None
            rivals.append(claim_epoch(files, store_id))

    rivals: list[object] = []
    files.before = race
    mine = claim_epoch(files, store_id)
    assert [rival.epoch for rival in rivals] == [1]  # type: ignore[attr-defined]
    assert mine.epoch == 2
    assert read_epoch(files, 1) == rivals[0]


def test_many_claimants_at_once_get_different_numbers(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    store_id = open_or_create(files).store_id
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(claim_epoch(files, store_id).epoch)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(1, 9))


def test_a_claim_that_could_not_be_synced_is_not_owned(files: SimulatedFiles) -> None:
    store_id = open_or_create(files).store_id
    files.faults = [Fault("sync_dir", path="epochs")]
    with pytest.raises(StorageError):
        claim_epoch(files, store_id)


def test_damaged_and_missing_records(files: SimulatedFiles) -> None:
    store_id = open_or_create(files).store_id
    claim_epoch(files, store_id)
    with pytest.raises(MissingError):
        read_epoch(files, 2)
    put(files, epoch_path(2), files.read(epoch_path(1), 999))
    with pytest.raises(DamagedError, match="copied or renamed"):
        read_epoch(files, 2)
    flip(files, epoch_path(1), 20)
    with pytest.raises(DamagedError):
        read_epoch(files, 1)
    assert claim_epoch(files, store_id).epoch == 3  # its number stays taken all the same


def test_numbers_in_use_are_not_claimed_again_when_the_claims_are_lost(job: Job) -> None:
    """A store that was copied without ``epochs/``: the next save must not collide with what is there."""
    saved = job.save()
    remove(job.files, epoch_path(job.epoch))
    job.files.remove_dir("epochs")
    again = Job(job.files, Memory())
    assert again.epoch > saved.epoch
    assert again.save() > saved


def test_a_record_of_the_journal_counts_as_a_number_in_use(files: SimulatedFiles) -> None:
    """Else a later job's records could have the names of these, and lead to them."""
    store_id = open_or_create(files).store_id
    assert claim_epoch(files, store_id).epoch == 1
    ensure_dir(files, f"journal/{segment_dir(SaveId(7, 1))}")
    remove(files, epoch_path(1))
    assert claim_epoch(files, store_id).epoch == 2


def test_an_uncommitted_segment_group_counts_as_a_number_in_use(job: Job) -> None:
    job.write(job.plan(), 0)
    remove(job.files, epoch_path(job.epoch))
    assert Job(job.files, Memory()).epoch > job.epoch


class TestFencing:
    def test_the_older_job_commits_nothing_more(self, job: Job) -> None:
        """Scenario 15: a stopped writer wakes up after losing its epoch."""
        job.save()
        draft = job.plan()
        for rank in (0, 1):
            job.write(draft, rank)
        newer = Job(job.files, Memory())
        with pytest.raises(FencedError):
            job.commit(draft)
        assert draft.id not in open_catalog(job.files).saves()
        assert newer.save() in open_catalog(job.files).saves()

    def test_a_job_fenced_between_check_and_name_is_not_told_that_it_committed(self, job: Job) -> None:
        """The window that no check can close: the commit may exist, but nobody was told so."""
        job.save()
        draft = job.plan()
        for rank in (0, 1):
            job.write(draft, rank)
        files = job.files
        newer: list[Job] = []

        def claim(op: Op) -> None:
            if op.verb == "link" and op.target == manifest_path(draft.id):
                files.before = lambda op: None
                newer.append(Job(files, Memory()))

        files.before = claim
        with pytest.raises(FencedError):
            job.commit(draft)
        assert newer[0].save() == open_catalog(files).saves()[0]  # outranks whatever the fenced one left
        newer[0].prune()
        assert draft.id not in job.journal.events[-1].values()

    def test_what_a_fenced_job_commits_never_outranks_the_newer_one(self, job: Job) -> None:
        for _ in range(3):
            job.save()
        newer = Job(job.files, Memory())
        committed = newer.save()
        put(job.files, manifest_path(SaveId(900, 1)), b"whatever it wrote")
        assert open_catalog(job.files).saves()[0] == committed

    def test_a_save_is_committed_once(self, job: Job) -> None:
        job.save()
        with pytest.raises(ExistsError):
            commit(job.files, job.last)
