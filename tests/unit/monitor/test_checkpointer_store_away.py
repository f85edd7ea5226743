"""A store that goes away under a job, and comes back: saves fail meanwhile, and go on afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from store.catalog import open_catalog
from store.errors import StorageError
from store.storage.local import LocalFiles
from tests.support.hooked import nothing
from tests.support.jobs import Job, job


def steps_of(store: Path) -> list[int]:
    return sorted(save.step for save in open_catalog(LocalFiles(store)).saves())


@pytest.mark.parametrize("again", [False, True])
def test_a_store_that_comes_back_is_saved_to_again(tmp_path: Path, again: bool) -> None:
    """again: the save that meets the empty mount point is of a step that is saved, so it claims an epoch first."""
    store, away = tmp_path / "store", tmp_path / "away"
    with job(store) as one:
        one.step()
        store.rename(away)
        store.mkdir()  # what is seen of a disk that is not mounted
        if again:
            assert one.ckpt.save(wait=True, strict=False).skipped == "storage"
        else:
            one.step()
        assert not (store / "segments").exists(), "nothing may be written below a mount point"
        for left in store.iterdir():
            left.unlink()
        store.rmdir()
        away.rename(store)
        for _ in range(2):
            one.step()
        assert one.metric("driftpoint_save_failures_total", reason="fenced") == 0
    assert steps_of(store)[-1] == (3 if again else 4)


def test_a_claim_that_could_not_be_made_durable_does_not_fence_its_own_job(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with job(store) as one:
        one.step()
        files = one.hook()

        def refuse(operation: str, path: str) -> None:
            if (operation, path) == ("sync_dir", "epochs") and (store / "epochs/000002.json").exists():
                raise StorageError("fsync of epochs failed")

        files.before = refuse
        assert one.ckpt.save(wait=True, strict=False).skipped == "storage"
        files.before = nothing
        assert len(list((store / "epochs").glob("*.json"))) == 2, "the claim has its name already"
        for _ in range(2):
            report = one.step()
            assert report is not None and report.skipped is None
    assert steps_of(store)[-1] == 3


def test_the_mark_of_a_proven_commit_is_not_written_below_a_mount_point(tmp_path: Path) -> None:
    store, away = tmp_path / "store", tmp_path / "away"
    with job(store) as one:
        one.step()
    with job(store) as one:
        one.ckpt.resume()
        store.rename(away)
        store.mkdir()
        one.step()
        one.ckpt.flush()
        assert list(store.iterdir()) == []
        store.rmdir()
        away.rename(store)
        one.step()
    assert steps_of(store)[-1] == 3


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("again", [False, True])
def test_another_store_at_the_same_path_is_not_written_to(tmp_path: Path, again: bool, jobs: int) -> None:
    """A link or a mount that leads elsewhere now. jobs: how many began in the other store, whose epochs are numbered
    alike. again: the save is of a step that is saved, so it claims an epoch first."""
    link, own, other = tmp_path / "link", tmp_path / "own", tmp_path / "other"
    for _ in range(jobs):
        with job(other) as one:
            one.ckpt.resume()
            for _ in range(3):
                one.step()
    before = files_of(other)
    link.symlink_to(own)
    own.mkdir()
    with job(link) as one:
        one.step()
        link.unlink()
        link.symlink_to(other)
        if again:
            assert one.ckpt.save(wait=True, strict=False).skipped == "storage"
        for _ in range(2):  # the second decision removes the files of the first one's save
            one.step()
        assert files_of(other) == before
        link.unlink()
        link.symlink_to(own)
        for _ in range(2):
            one.step()
        assert one.metric("driftpoint_save_failures_total", reason="fenced") == 0
    assert steps_of(own)[-1] == 5


def test_the_end_of_a_job_marks_nothing_in_another_store(tmp_path: Path) -> None:
    link, own, other = tmp_path / "link", tmp_path / "own", tmp_path / "other"
    its = Job(other, every="auto")
    its.step()
    left = files_of(other)
    link.symlink_to(own)
    own.mkdir()
    one = Job(link, every="auto")
    one.ckpt.resume()
    one.step()
    one.ckpt.save(wait=True)
    link.unlink()
    link.symlink_to(other)
    one.ckpt.close()
    assert files_of(other) == left
    its.ckpt.close()
    assert len(files_of(other)) > len(left)


def test_a_copy_that_another_job_has_taken_is_not_written_to(tmp_path: Path) -> None:
    link, own, other = tmp_path / "link", tmp_path / "own", tmp_path / "other"
    link.symlink_to(own)
    own.mkdir()
    with job(link) as one:
        one.step()
    shutil.copytree(own, other)
    with job(other) as its:
        its.ckpt.resume()
        before = files_of(other)
        with job(link) as one:
            one.ckpt.resume()
            link.unlink()
            link.symlink_to(other)
            assert one.ckpt.save(wait=True, strict=False).skipped == "failed"
            assert files_of(other) == before
        assert steps_of(other) == steps_of(own) == [1]


def files_of(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}
