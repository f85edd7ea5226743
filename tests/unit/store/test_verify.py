from __future__ import annotations

import pytest

from store.catalog import open_catalog, open_or_create
from store.errors import StorageError
from store.names import LATEST, SaveId, epoch_path, manifest_path, part_path, payload_path
from store.resolve import newest_resumable
from store.segment import read_part
from store.verify import VerifyReport, total_bytes, verify
from tests.crash.damage import edit, flip, put, remove
from tests.crash.workload import Job


@pytest.fixture
def saves(job: Job) -> list[SaveId]:
    return [job.save() for _ in range(4)]


def report(job: Job) -> VerifyReport:
    return verify(open_catalog(job.files))


def states(found: VerifyReport) -> list[str]:
    """Oldest first."""
    return [commit.state for commit in reversed(found.commits)]


def test_a_healthy_store(job: Job, saves: list[SaveId]) -> None:
    told: list[int] = []
    catalog = open_catalog(job.files)
    before = job.files.disk.files()
    found = verify(catalog, told.append)
    assert found.ok
    assert states(found) == ["ok"] * 4
    assert [commit.save for commit in found.commits] == saves[::-1]
    assert found.resumable == saves[3]
    assert sum(told) == found.bytes_read
    headers = sum(read_part(job.files, catalog.store_id, save, rank).header_bytes for save in saves for rank in (0, 1))
    assert total_bytes(catalog) == found.bytes_read + headers
    assert job.files.disk.files() == before


def test_an_empty_store(job: Job) -> None:
    found = report(job)
    assert found.ok
    assert found.resumable is None
    assert found.commits == ()
    assert total_bytes(open_or_create(job.files)) == 0


def test_a_newest_manifest_that_is_gone_is_told_until_the_next_commit(job: Job, saves: list[SaveId]) -> None:
    catalog = open_catalog(job.files)
    assert catalog.lost() == ()
    remove(job.files, manifest_path(saves[3]))
    found = report(job)
    assert not found.ok
    assert found.resumable == saves[2]
    assert found.problems[0].startswith(f"{saves[3]}: it was committed")
    resolution, notes = newest_resumable(open_catalog(job.files))
    assert (resolution.manifest.save, notes) == (saves[2], found.problems)
    for save in saves[:3]:
        remove(job.files, manifest_path(save))
    assert report(job).problems == found.problems
    put(job.files, LATEST, b"a line that is no name\n")
    assert report(job).ok
    remove(job.files, LATEST)
    assert report(job).ok


def test_an_outdated_latest_is_no_damage(job: Job, saves: list[SaveId]) -> None:
    put(job.files, LATEST, f"{saves[0]}\n".encode())
    assert report(job).ok
    remove(job.files, manifest_path(saves[0]))
    assert report(job).ok


def test_the_damaged_record_of_an_epoch_is_told(job: Job, saves: list[SaveId]) -> None:
    path = epoch_path(saves[0].epoch)
    flip(job.files, path, 40)
    found = report(job)
    assert states(found) == ["ok"] * 4
    assert not found.ok
    assert path in found.problems[0]
    remove(job.files, path)
    assert report(job).ok


def test_one_bad_fragment_hurts_every_commit_that_reaches_it(job: Job, saves: list[SaveId]) -> None:
    part = read_part(job.files, job.catalog.store_id, saves[2], 0)
    flip(job.files, payload_path(saves[2], 0), part.header_bytes + part.entries[0].offset)
    found = report(job)
    assert not found.ok
    assert states(found) == ["ok", "ok", "fallback", "fallback"]
    assert found.resumable == saves[3]
    assert part.entries[0].fqn in found.problems[0]


def test_a_bad_run_state_makes_one_commit_unresumable(job: Job, saves: list[SaveId]) -> None:
    part = read_part(job.files, job.catalog.store_id, saves[3], 1)
    flip(job.files, payload_path(saves[3], 1), part.header_bytes + part.run_tensors[0].offset)
    found = report(job)
    assert states(found) == ["ok", "ok", "ok", "damaged"]
    assert found.resumable == saves[2]


@pytest.mark.parametrize("kind", ["part", "payload"])
def test_a_missing_file(job: Job, saves: list[SaveId], kind: str) -> None:
    remove(job.files, (part_path if kind == "part" else payload_path)(saves[3], 1))
    found = report(job)
    assert states(found) == ["ok", "ok", "ok", "damaged"]
    assert found.resumable == saves[2]


def test_a_bad_header_hurts_only_other_readers(job: Job, saves: list[SaveId]) -> None:
    """Ours do not need it; safetensors' own would refuse the file. So it is told, and still resumable."""
    flip(job.files, payload_path(saves[3], 0), 9)
    found = report(job)
    assert not found.ok
    assert states(found) == ["ok", "ok", "ok", "fallback"]
    assert found.resumable == saves[3]


def test_a_bad_manifest(job: Job, saves: list[SaveId]) -> None:
    edit(job.files, manifest_path(saves[3]), lambda data: data[:-1])
    found = report(job)
    assert states(found) == ["ok", "ok", "ok", "damaged"]
    assert found.resumable == saves[2]
    assert any(str(saves[3]) in problem for problem in found.problems)


def test_nothing_left(job: Job, saves: list[SaveId]) -> None:
    for save in saves:
        put(job.files, manifest_path(save), b"")
    found = report(job)
    assert states(found) == ["damaged"] * 4
    assert found.resumable is None


def test_damage_since_the_last_look_is_seen(job: Job, saves: list[SaveId]) -> None:
    catalog = open_catalog(job.files)
    assert verify(catalog).ok
    flip(job.files, manifest_path(saves[3]), 40)
    assert not verify(catalog).ok


@pytest.mark.parametrize("damaged", [False, True])
def test_what_is_pruned_while_it_is_read_is_no_damage(job: Job, damaged: bool) -> None:
    saves = [job.save() for _ in range(8)]
    files = set(job.files.disk.files())
    if damaged:
        flip(job.files, payload_path(saves[-1], 1), -1)
    pruned: list[bool] = []

    def prune(_: int) -> None:
        if not pruned:
            pruned.append(True)
            job.prune()

    found = verify(open_catalog(job.files), prune)
    assert payload_path(saves[0], 0) in files - set(job.files.disk.files())
    assert [commit.save for commit in found.commits] == saves[:-3:-1]
    assert found.ok is not damaged and all(str(saves[0]) not in problem for problem in found.problems)


def test_where_all_are_pruned_meanwhile_none_is_called_whole(job: Job, saves: list[SaveId]) -> None:
    def prune(_: int) -> None:
        for save in saves if job.files.disk.find(manifest_path(saves[0])) is not None else ():
            remove(job.files, manifest_path(save))

    with pytest.raises(StorageError, match="all 4 commits were pruned"):
        verify(open_catalog(job.files), prune)
