"""Retention gives way where the disk has no room for another full save: the oldest commits first, only as many as are
needed, and never the newest whole commit nor the newest proven one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import store.retention
from store.catalog import mark_suspect, open_catalog
from store.errors import FencedError
from store.names import SaveId, payload_path
from store.retention import (
    EVERYTHING,
    PrunePlan,
    Retention,
    bytes_to_free,
    execute,
    most_commits,
    plan_prune,
    remove_failed,
)
from store.storage.local import LocalFiles
from tests.crash.checker import assert_true_to_write, read_newest
from tests.crash.damage import flip
from tests.crash.workload import Job, Memory
from tests.support.stores import StoreBuilder

ALL = Retention(keep_last=100)


@pytest.fixture
def full(job: Job) -> list[SaveId]:
    """Six commits, each of everything, so that dropping one frees what it holds."""
    return [job.save(everything=True) for _ in range(6)]


def plan_of(job: Job, make_room: int, retention: Retention = ALL, continued: SaveId | None = None) -> PrunePlan:
    return plan_prune(open_catalog(job.files), retention, None, make_room, continued)


def test_the_rule_holds_while_there_is_room(job: Job, full: list[SaveId]) -> None:
    plan = plan_of(job, 0)
    assert (plan.keep, plan.given_up, plan.freed_bytes) == (tuple(full), (), 0)


def test_the_oldest_go_first_and_only_as_many_as_needed(job: Job, full: list[SaveId]) -> None:
    one = plan_of(job, 1)
    assert (one.given_up, one.manifests, one.groups) == ((full[0],), (full[0],), (full[0],))
    assert one.freed_bytes > 1
    assert plan_of(job, one.freed_bytes) == one
    assert plan_of(job, one.freed_bytes + 1).given_up == tuple(full[:2])


def test_what_the_rule_drops_makes_room_too(job: Job, full: list[SaveId]) -> None:
    plan = plan_of(job, 1, Retention(keep_last=3, log_spaced=False))
    assert plan.manifests == tuple(full[:3])
    assert plan.given_up == ()


def test_the_newest_and_the_proven_commit_stay_whatever_is_asked(job: Job) -> None:
    first = job.save()
    second = job.save(everything=True)
    job.prove()
    rest = [job.save(everything=True) for _ in range(3)]
    plan = plan_of(job, EVERYTHING)
    assert plan.keep == (second, rest[-1])
    assert plan.given_up == (first, *rest[:-1])
    execute(job.files, plan)
    assert_true_to_write(read_newest(open_catalog(job.files)))


def test_a_suspect_newest_commit_does_not_cost_the_one_before_it(job: Job, full: list[SaveId]) -> None:
    mark_suspect(job.files, job.catalog.store_id, full[-1], "jobs died of it")
    assert plan_of(job, EVERYTHING).keep == tuple(full[-2:])


def test_a_damaged_newest_commit_does_not_cost_the_newest_whole_one(job: Job, full: list[SaveId]) -> None:
    job.files.unlink(payload_path(full[-1], 0))
    assert plan_of(job, EVERYTHING).keep == tuple(full[-2:])


def test_the_commit_that_a_job_continues_stays(job: Job, full: list[SaveId]) -> None:
    """It fell back, since the bytes of newer ones are wrong; that is not seen in their records."""
    flip(job.files, payload_path(full[-1], 0), 200)
    assert plan_of(job, EVERYTHING, continued=full[2]).keep == (full[2], full[-1])


def test_a_commit_whose_segments_others_need_stays(job: Job) -> None:
    """Each commit takes half of its units from the one before it."""
    saves = [job.save() for _ in range(2)]
    job.prove()
    saves += [job.save() for _ in range(4)]
    plan = plan_of(job, 1)
    assert plan.groups == (saves[2],)
    assert plan.given_up == (saves[2], saves[3])  # dropping saves[0] frees nothing: the proven one needs its segments


def test_segments_of_what_was_given_up_go_last(job: Job, full: list[SaveId]) -> None:
    execute(job.files, plan_of(job, EVERYTHING))
    assert job.files.list_dir("segments") == [full[-1].name]
    assert job.files.list_dir("manifests") == [f"{full[-1]}.json"]


@pytest.fixture
def builder(tmp_path: Path) -> StoreBuilder:
    """Four commits of 10 800 bytes and records each."""
    made = StoreBuilder(tmp_path / "store", layers=3, slots=("fp32",))
    for step in (10, 20, 30, 40):
        made.save(step)
    return made


def test_payloads_that_another_store_has_too_make_no_room(builder: StoreBuilder, tmp_path: Path) -> None:
    first, second = sorted(open_catalog(builder.files).saves())[:2]
    rule = Retention(keep_last=4, log_spaced=False)
    asked = plan_prune(open_catalog(builder.files), rule, make_room=1).freed_bytes
    assert plan_prune(open_catalog(builder.files), rule, make_room=asked).given_up == (first,)
    for payload in builder.payload(first).parent.glob("*.safetensors"):
        os.link(payload, tmp_path / payload.name)
    plan = plan_prune(open_catalog(builder.files), rule, make_room=asked)
    assert plan.given_up == (second,) and plan.freed_bytes >= asked


def has_free(monkeypatch: pytest.MonkeyPatch, nbytes: int | None) -> None:
    monkeypatch.setattr(store.retention, "free_bytes", lambda files: nbytes)


def sizes(builder: StoreBuilder) -> tuple[int, int]:
    """Bytes of a full save, and payload bytes of the store."""
    catalog = open_catalog(builder.files)
    manifests = [catalog.manifest(save) for save in catalog.saves()]
    held = {name: group.payload_bytes for found in manifests for name, group in found.groups.items()}
    return sum(unit.nbytes for unit in manifests[0].units), sum(held.values())


def test_it_wants_what_the_next_full_save_lacks(builder: StoreBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = open_catalog(LocalFiles(builder.root))
    save, held = sizes(builder)
    has_free(monkeypatch, 0)
    needed = bytes_to_free(catalog, Retention())
    assert needed >= save
    for free, wanted in ((sys.maxsize, 0), (needed, 0), (needed - 1, 1), (None, 0)):
        has_free(monkeypatch, free)
        assert bytes_to_free(catalog, Retention()) == wanted
    has_free(monkeypatch, needed)
    assert bytes_to_free(catalog, Retention(max_share=1.0)) == 0
    wanted = bytes_to_free(catalog, Retention(max_share=0.8))
    assert held + needed - wanted <= 0.8 * (held + needed) + 1


def test_a_save_that_failed_for_want_of_space_frees_something(
    builder: StoreBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota, a bucket: the room that there seems to be is not there."""
    catalog = open_catalog(LocalFiles(builder.root))
    for free in (None, sys.maxsize):
        has_free(monkeypatch, free)
        assert bytes_to_free(catalog, Retention(), failed=True) == 1


def test_segments_of_a_failed_save_go_unless_it_is_a_commit(job: Job) -> None:
    committed = job.save()
    remove_failed(job.files, committed, job.epoch)
    draft = job.plan()
    job.write(draft, 0)
    remove_failed(job.files, draft.id, job.epoch)
    assert job.files.list_dir("segments") == [committed.name]
    job.write(draft, 0)
    newer = Job(job.files, Memory())
    with pytest.raises(FencedError):
        remove_failed(job.files, draft.id, job.epoch)
    assert draft.id.name in job.files.list_dir("segments")
    del newer


def test_segments_of_a_fenced_save_go_at_once(job: Job) -> None:
    """Of a job that was killed while it saved: on a full disk they would keep every later save from succeeding."""
    committed = job.save()
    draft = job.plan()
    job.write(draft, 0)
    catalog = open_catalog(job.files)
    assert plan_prune(catalog, ALL, job.epoch).groups == ()
    assert plan_prune(catalog, ALL, job.epoch, ended=True).groups == (draft.id,)
    newer = Job(job.files, Memory())
    plan = plan_prune(catalog, ALL, newer.epoch)
    assert (plan.groups, plan.keep) == ((draft.id,), (committed,))
    execute(job.files, plan)
    assert newer.save() > committed


def test_an_empty_store_needs_nothing(tmp_path: Path) -> None:
    empty = StoreBuilder(tmp_path / "store")
    assert bytes_to_free(open_catalog(empty.files), Retention(max_share=0.1)) == 0


def test_how_many_commits_there_can_be() -> None:
    assert most_commits(Retention(keep_last=3, log_spaced=False), 100) == 4
    assert 10 <= most_commits(Retention(), 100) <= 14
