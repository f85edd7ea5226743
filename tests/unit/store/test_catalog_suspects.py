"""Suspect marks: the order in which commits are resumed from, and what prune, verify and damage make of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.catalog import mark_suspect, open_catalog, resume_order, withdraw_suspect
from store.names import SaveId, suspect_path
from store.resolve import newest_resumable
from store.retention import Retention, execute, plan_prune, select_retained
from store.schema import SuspectRecord, to_bytes
from store.storage.atomic import write_new
from store.verify import verify
from tests.crash.damage import put
from tests.crash.simulated import SimulatedFiles, every_crash
from tests.crash.workload import Job, Memory

SAVES = st.lists(st.builds(SaveId, st.integers(0, 5000), st.integers(1, 3)), max_size=30, unique=True)


def taken(job: Job) -> SaveId:
    return newest_resumable(open_catalog(job.files))[0].manifest.save


def mark(job: Job, save: SaveId, why: str = "exit code 1") -> None:
    mark_suspect(job.files, job.catalog.store_id, save, why)


@given(SAVES, st.data())
def test_suspects_come_last_and_nothing_is_lost(saves: list[SaveId], data: st.DataObject) -> None:
    saves.sort(reverse=True)
    some = st.sets(st.sampled_from(saves)) if saves else st.just(set())
    suspects, proven = data.draw(some), data.draw(some)
    order = resume_order(saves, suspects, proven)
    assert sorted(order, reverse=True) == saves
    sound = len(saves) - len(suspects)
    assert order[sound:] == [save for save in saves if save in suspects]
    assert not suspects & set(order[:sound])
    assert resume_order(saves, set(), proven) == saves


def test_one_suspect_costs_no_more_than_the_commit_before_it_two_lead_to_the_proven_one() -> None:
    e, d, c, b, a = (SaveId(step, 1) for step in (50, 40, 30, 20, 10))
    saves = [e, d, c, b, a]
    assert resume_order(saves, {e}, {b}) == [d, c, b, a, e]
    assert resume_order(saves, {e, d}, {b}) == [b, c, a, e, d]
    assert resume_order(saves, {d, c}, {b}) == [e, b, a, d, c], "what is newer than all suspects goes first"


def test_the_newest_commit_that_is_not_suspect_is_taken(job: Job) -> None:
    first, second, third = (job.save() for _ in range(3))
    assert taken(job) == third
    mark(job, third)
    resolution, notes = newest_resumable(open_catalog(job.files))
    assert resolution.manifest.save == second
    assert [note for note in notes if str(third) in note and "exit code 1" in note]
    mark(job, second)
    mark(job, first)
    resolution, notes = newest_resumable(open_catalog(job.files))
    assert resolution.manifest.save == third, "a suspect is better than nothing"
    assert "no other commit" in notes[0]


def test_a_newer_commit_is_taken_and_nothing_is_said(job: Job) -> None:
    job.save()
    mark(job, job.save())
    newest = job.save()
    resolution, notes = newest_resumable(open_catalog(job.files))
    assert (resolution.manifest.save, notes) == (newest, ())


def test_a_mark_is_withdrawn_and_set_twice_without_harm(job: Job) -> None:
    job.save()
    newest = job.save()
    withdraw_suspect(job.files, newest)
    mark(job, newest, "SIGKILL")
    mark(job, newest, "exit code 3")
    assert open_catalog(job.files).suspects().why == {newest: "SIGKILL"}
    withdraw_suspect(job.files, newest)
    assert open_catalog(job.files).suspects().why == {}
    assert taken(job) == newest


def test_power_is_lost_at_every_operation_of_marking_and_withdrawing(job: Job, files: SimulatedFiles) -> None:
    """No commit is lost, nothing is damaged, a mark is whole or absent, and what was done is durable."""
    older, newest = job.save(), job.save()
    disk, begun = files.disk.copied(), len(files.log)
    mark(job, newest)
    marked = len(files.log)
    withdraw_suspect(files, newest)
    states = 0
    for done in range(begun, len(files.log) + 1):
        if done > begun:
            disk.apply(files.log[done - 1])
        for state in every_crash(disk, 64):
            states += 1
            catalog = open_catalog(SimulatedFiles(state))
            suspects = catalog.suspects()
            assert catalog.saves() == [newest, older] and suspects.problems == () and verify(catalog).ok
            assert newest_resumable(catalog)[0].manifest.save == (older if suspects.saves else newest)
            assert done != marked or suspects.saves == {newest}
            assert done != len(files.log) or not suspects.saves
    assert marked > begun + 4 and states > 10


DAMAGE = {
    "garbage": b"garbage",
    "empty": b"",
    "another store's": to_bytes(SuspectRecord(store_id="0" * 32, save="00000020-000001", why="x")),
    "another record": b'{"body":{},"xxh3_128":"00000000000000000000000000000000"}\n',
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_mark_that_cannot_be_read_counts_for_nothing_and_is_told(job: Job, damage: str) -> None:
    job.save()
    newest = job.save()
    mark(job, newest)
    put(job.files, suspect_path(newest), DAMAGE[damage])
    resolution, notes = newest_resumable(open_catalog(job.files))
    assert resolution.manifest.save == newest
    assert len(notes) == 1 and "is ignored" in notes[0]
    report = verify(open_catalog(job.files))
    assert not report.ok and report.resumable == newest and list(report.problems) == list(notes)


def test_every_flipped_byte_of_a_mark_is_found(job: Job) -> None:
    job.save()
    newest = job.save()
    mark(job, newest)
    data = job.files.read(suspect_path(newest), 1 << 16)
    for at in range(len(data)):
        put(job.files, suspect_path(newest), data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        found = open_catalog(job.files).suspects()
        assert not found.why and len(found.problems) == 1, at
        assert taken(job) == newest


def test_names_that_are_no_marks_are_told_and_left_alone(job: Job) -> None:
    newest = job.save()
    mark(job, newest)
    write_new(job.files, "suspect/notes.txt", lambda file: file.write(b"mine"))
    assert "notes.txt" in open_catalog(job.files).suspects().problems[0]


def test_a_sound_store_with_suspects_is_verified_as_sound(job: Job) -> None:
    first, newest = job.save(), job.save()
    mark(job, newest)
    report = verify(open_catalog(job.files))
    assert report.ok and report.resumable == first


def test_prune_keeps_the_newest_that_is_not_suspect(job: Job) -> None:
    saves = [job.save() for _ in range(5)]
    for save in saves[2:]:
        mark(job, save)
    plan = plan_prune(open_catalog(job.files), Retention(keep_last=1, log_spaced=False))
    assert plan.keep == (saves[1], saves[4]) and plan.unrecognised == ()
    execute(job.files, plan)
    assert set(open_catalog(job.files).suspects().why) == {saves[4]}
    assert taken(job) == saves[1]
    assert verify(open_catalog(job.files)).ok


def test_prune_removes_marks_of_what_is_gone(job: Job) -> None:
    job.save()
    mark(job, SaveId(5, 1))  # of a version in memory, say
    mark(job, SaveId(500, 1))  # newer than any commit: it may still be there
    job.save()
    plan = plan_prune(open_catalog(job.files), Retention())
    execute(job.files, plan)
    assert set(open_catalog(job.files).suspects().why) == {SaveId(500, 1)}


@given(SAVES, st.integers(1, 4), st.data())
def test_retention_never_leaves_suspects_alone(saves: list[SaveId], last: int, data: st.DataObject) -> None:
    some = st.sets(st.sampled_from(saves)) if saves else st.just(set())
    suspects, proven = data.draw(some), data.draw(some)
    keep = select_retained(saves, proven, Retention(last), suspects)
    sound = sorted(set(saves) - suspects, reverse=True)
    assert set(sound[:last]) <= keep
    assert set(sorted(saves)[-1:]) <= keep
    assert set(sorted(proven - suspects)[-1:]) <= keep
    assert select_retained(keep, proven & keep, Retention(last), suspects & keep) == keep


def test_a_job_goes_on_from_the_fall_back_and_saves(files: SimulatedFiles) -> None:
    job = Job(files, Memory())
    first, newest = job.save(), job.save()
    mark(job, newest)
    again = Job(files, Memory())
    assert again.last is not None and again.last.save == first
    saved = again.save()
    assert saved > newest and taken(again) == saved
    again.prune()
    assert verify(open_catalog(files)).ok
