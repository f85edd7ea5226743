"""Who may go on after a store was taken over, and who must not be stopped by one that is away for a moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from store.catalog import open_catalog, open_or_create
from store.errors import FencedError, StorageError
from store.names import EPOCHS, MANIFESTS, epoch_path, manifest_path, segment_dir
from store.retention import Retention, execute, plan_prune
from store.schema import to_bytes
from store.session import claim_epoch, newest_epoch, own, read_epoch, renew_epoch, require_newest, require_present
from store.storage.local import LocalFiles
from tests.crash.checker import assert_true_to_write, read_commit, read_newest
from tests.crash.damage import flip, put
from tests.crash.simulated import Fault, Op, SimulatedFiles
from tests.crash.workload import Job, Memory

ONE = Retention(keep_last=1, log_spaced=False)


def once(files: SimulatedFiles, verb: str, path: str, act: Callable[[], object]) -> None:
    """Call ``act`` before the next operation ``verb`` below ``path``."""

    def before(op: Op) -> None:
        if op.verb == verb and op.path.startswith(path):
            files.before = lambda op: None
            act()

    files.before = before


def test_a_renewal_claims_the_next_epoch_only(files: SimulatedFiles) -> None:
    store_id = open_or_create(files).store_id
    mine = claim_epoch(files, store_id)
    renewed = renew_epoch(files, store_id, mine.epoch, mine.token)
    assert (mine.epoch, renewed.epoch) == (1, 2)
    assert read_epoch(files, 2) == renewed


def test_a_job_that_renews_does_not_go_above_its_successor(files: SimulatedFiles) -> None:
    store_id = open_or_create(files).store_id
    mine = claim_epoch(files, store_id)
    younger = []
    once(files, "link", EPOCHS, lambda: younger.append(claim_epoch(files, store_id)))
    with pytest.raises(FencedError):
        renew_epoch(files, store_id, mine.epoch, mine.token)
    require_newest(files, younger[0].epoch)


def test_a_renewal_that_finds_a_successor_is_fenced(files: SimulatedFiles) -> None:
    store_id = open_or_create(files).store_id
    mine = claim_epoch(files, store_id)
    claim_epoch(files, store_id)
    with pytest.raises(FencedError):
        renew_epoch(files, store_id, mine.epoch, mine.token)
    assert newest_epoch(files) == 2


def test_a_renewal_whose_fsync_failed_is_completed_by_the_next(files: SimulatedFiles) -> None:
    store_id = open_or_create(files).store_id
    mine = claim_epoch(files, store_id)
    files.faults.append(Fault("sync_dir", nth=1, path=EPOCHS))
    with pytest.raises(StorageError):
        renew_epoch(files, store_id, mine.epoch, mine.token)
    assert newest_epoch(files) == 2, "the record may have its name"
    assert renew_epoch(files, store_id, mine.epoch, mine.token).epoch == 2


def test_a_store_that_lists_no_epochs_is_away_and_not_taken_over(tmp_path: Path) -> None:
    root, away = tmp_path / "store", tmp_path / "away"
    root.mkdir()
    files = LocalFiles(root)
    store_id = open_or_create(files).store_id
    mine = claim_epoch(files, store_id)
    root.rename(away)
    root.mkdir()
    for refused in (
        lambda: require_newest(files, mine.epoch),
        lambda: require_present(files, mine.epoch),
        lambda: renew_epoch(files, store_id, mine.epoch, mine.token),
    ):
        with pytest.raises(StorageError, match="not mounted"):
            refused()
    assert not list(root.iterdir())
    root.rmdir()
    away.rename(root)
    require_newest(files, mine.epoch)
    require_present(files, mine.epoch)


def fallen_back(files: SimulatedFiles, old: Job) -> Job:
    """A younger job that resumes an older commit, because the newest one is damaged, and commits twice on top of it."""
    newest = open_catalog(files).saves()[0]
    flip(files, f"segments/{newest.name}/rank-00000.json", 200)
    younger = Job(files, Memory())
    assert younger.resumed is not None
    assert younger.resumed.manifest.save < newest
    younger.save()
    younger.save()
    return younger


@pytest.mark.parametrize("at", ["sync_dir", "unlink"])
def test_a_prune_that_slept_through_a_takeover_deletes_nothing_that_the_younger_job_needs(
    files: SimulatedFiles, at: str
) -> None:
    old = Job(files, Memory())
    for _ in range(4):
        old.save()
    plan = plan_prune(open_catalog(files), ONE, old.epoch)
    assert plan.groups
    younger: list[Job] = []
    once(files, at, MANIFESTS, lambda: younger.append(fallen_back(files, old)))
    with pytest.raises(FencedError):
        execute(files, plan)
    catalog = open_catalog(files)
    made = [save for save in catalog.saves() if save.epoch == younger[0].epoch]
    assert len(made) == 2
    for save in made:
        assert_true_to_write(read_commit(catalog, save))
    assert read_newest(catalog).save == max(made)


def test_a_prune_keeps_the_segments_of_a_commit_that_it_did_not_plan_for(files: SimulatedFiles) -> None:
    job = Job(files, Memory())
    for _ in range(4):
        job.save()
    plan = plan_prune(open_catalog(files), ONE, job.epoch)
    back = manifest_path(plan.manifests[0])
    data = files.read(back, 1 << 20)
    once(files, "unlink", manifest_path(plan.manifests[1]), lambda: put(files, back, data))
    execute(files, plan)
    assert_true_to_write(read_commit(open_catalog(files), plan.manifests[0]))


def test_a_prune_keeps_the_segments_of_a_commit_that_appears_under_a_new_name(files: SimulatedFiles) -> None:
    """None that the plan has read: of a job that was stopped in the middle of its commit, for example."""
    job = Job(files, Memory())
    for _ in range(4):
        job.save()
    catalog = open_catalog(files)
    plan = plan_prune(catalog, ONE, job.epoch)
    gone = catalog.manifest(plan.groups[0])
    late = gone.replace(step=gone.step + 1)
    once(files, "unlink", MANIFESTS, lambda: put(files, manifest_path(late.save), to_bytes(late)))
    execute(files, plan)
    assert files.list_dir(segment_dir(gone.save))


def test_a_fenced_owner_cannot_prune_by_a_new_plan_either(files: SimulatedFiles) -> None:
    old = Job(files, Memory())
    for _ in range(4):
        old.save()
    claim_epoch(files, old.catalog.store_id)
    before = set(files.disk.files())
    with pytest.raises(FencedError):
        execute(files, plan_prune(open_catalog(files), ONE, old.epoch))
    assert set(files.disk.files()) == before


def test_the_record_of_an_epoch_that_is_gone_is_told(files: SimulatedFiles) -> None:
    store_id = open_or_create(files).store_id
    mine = claim_epoch(files, store_id)
    files.unlink(epoch_path(mine.epoch))
    with pytest.raises(StorageError):
        require_present(files, mine.epoch)


class Unreadable(LocalFiles):
    """A disk with a bad sector, under the records of epochs."""

    def read(self, path: str, limit: int) -> bytes:
        if path.startswith(EPOCHS):
            raise StorageError(f"cannot read {path}: input/output error")
        return super().read(path, limit)


def test_a_record_that_cannot_be_read_stops_no_save(tmp_path: Path) -> None:
    files = Unreadable(tmp_path / "store")
    mine = claim_epoch(files, open_or_create(files).store_id)
    own(files, mine.epoch, mine.token)
    with pytest.raises(StorageError):
        read_epoch(files, mine.epoch)
    require_present(files, mine.epoch)
    require_newest(files, mine.epoch)


def test_a_record_of_another_job_stops_every_save(files: SimulatedFiles) -> None:
    store_id = open_or_create(files).store_id
    mine = claim_epoch(files, store_id)
    own(files, mine.epoch, "another token")
    for require in (require_present, require_newest):
        with pytest.raises(StorageError, match="another job's"):
            require(files, mine.epoch)


def test_a_store_of_many_later_starts_that_lacks_this_epoch_does_not_fence(files: SimulatedFiles) -> None:
    """Another one at the same path, where old records of epochs were pruned: the job's own may come back."""
    store_id = open_or_create(files).store_id
    mine = claim_epoch(files, store_id)
    own(files, mine.epoch, mine.token)
    claim_epoch(files, store_id)
    files.unlink(epoch_path(mine.epoch))
    for require in (require_present, require_newest):
        with pytest.raises(StorageError, match="does not list epoch 1"):
            require(files, mine.epoch)
