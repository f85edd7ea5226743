from __future__ import annotations

from pathlib import Path

import pytest

from store.catalog import open_catalog, open_or_create
from store.errors import StorageError
from store.names import SaveId, manifest_path, part_path, payload_path, segment_dir
from store.retention import PrunePlan, Retention, execute, plan_prune
from store.session import claim_epoch, mark_closed, newest_epoch
from store.storage.atomic import is_temporary
from store.verify import verify
from tests.crash.checker import assert_true_to_write, check_goes_on, check_undamaged, read_commit, read_newest
from tests.crash.damage import flip, put, remove
from tests.crash.simulated import Fault, SimulatedFiles
from tests.crash.workload import RETENTION, Job, Memory
from tests.support.stores import FakeLayer, How, StoreBuilder

TWO = Retention(keep_last=2, log_spaced=False)


@pytest.fixture
def saves(job: Job) -> list[SaveId]:
    """Six commits; each from the second on reaches the group before it, too."""
    return [job.save() for _ in range(6)]


def plan_of(job: Job, retention: Retention = TWO) -> PrunePlan:
    return plan_prune(open_catalog(job.files), retention)


def groups(job: Job) -> list[str]:
    return job.files.list_dir("segments")


def test_keeps_what_kept_commits_reach_and_nothing_else(job: Job, saves: list[SaveId]) -> None:
    plan = plan_of(job)
    assert plan.keep == tuple(saves[4:])
    assert plan.manifests == tuple(saves[:4])
    assert plan.groups == tuple(saves[:3])  # saves[4] still takes units from saves[3]
    before = sum(len(data) for path, data in job.files.disk.files().items() if path.startswith("segments"))
    execute(job.files, plan)
    after = sum(len(data) for path, data in job.files.disk.files().items() if path.startswith("segments"))
    assert before - after == plan.freed_bytes > 0
    assert groups(job) == [save.name for save in saves[3:]]
    for save in saves[4:]:
        assert_true_to_write(read_commit(open_catalog(job.files), save))


def test_a_dry_plan_is_what_is_done(job: Job, saves: list[SaveId]) -> None:
    job.prove()
    plan = plan_of(job)
    before = set(job.files.disk.files())
    assert plan_of(job) == plan
    assert set(job.files.disk.files()) == before, "planning writes nothing"
    execute(job.files, plan)
    gone = before - set(job.files.disk.files())
    listed = {manifest_path(save) for save in plan.manifests} | set(plan.temporaries)
    listed |= {path for path in before for group in plan.groups if path.startswith(segment_dir(group) + "/")}
    assert gone == listed
    again = plan_of(job)
    assert (again.manifests, again.groups, again.temporaries) == ((), (), ())
    assert again.keep == plan.keep


def test_the_last_proven_commit_stays(job: Job) -> None:
    first = job.save()
    job.prove()
    later = [job.save() for _ in range(4)]
    execute(job.files, plan_of(job))
    assert open_catalog(job.files).saves() == [later[3], later[2], first]
    assert_true_to_write(read_commit(open_catalog(job.files), first))


def test_a_mark_goes_with_its_commit(job: Job) -> None:
    job.save()
    job.prove()
    for _ in range(4):
        newest = job.save()
        job.prove()
    execute(job.files, plan_of(job))
    assert max(open_catalog(job.files).proven()) == newest
    assert open_catalog(job.files).proven() <= set(open_catalog(job.files).saves())


def test_a_save_in_progress_stays(job: Job, saves: list[SaveId]) -> None:
    draft = job.plan()
    job.write(draft, 0)
    put(job.files, f"{segment_dir(draft.id)}/.tmp-0123456789ab-rank-00001.json", b"half")
    put(job.files, f"manifests/.tmp-0123456789ab-{draft.id}.json", b"half")
    before = {path for path in job.files.disk.files() if str(draft.id) in path}
    execute(job.files, plan_of(job))
    assert {path for path in job.files.disk.files() if str(draft.id) in path} == before
    job.write(draft, 1)
    job.commit(draft)
    assert_true_to_write(read_newest(open_catalog(job.files)))


def test_a_save_that_was_given_up_goes_with_the_next_commit(job: Job, saves: list[SaveId]) -> None:
    abandoned = job.plan()
    job.write(abandoned, 0)
    newer = Job(job.files, Memory())
    assert newer.save() > abandoned.id
    newer.prune()
    assert abandoned.id.name not in groups(job)


def test_what_interrupted_writes_left_goes(job: Job, saves: list[SaveId]) -> None:
    old, new = saves[3], saves[5]
    left = [
        f"{segment_dir(old)}/.tmp-0123456789ab-rank-00000.json",
        f"manifests/.tmp-0123456789ab-{saves[0]}.json",
        f"{segment_dir(saves[0])}/.tmp-0123456789ab-rank-00000.safetensors",
    ]
    for path in left:
        put(job.files, path, b"half")
    execute(job.files, plan_of(job))
    found = job.files.disk.files()
    assert not [path for path in left if path in found]
    assert manifest_path(new) in found


def test_what_is_not_recognised_stays_and_is_reported(job: Job, saves: list[SaveId]) -> None:
    strange = [
        "notes.txt", "manifests/notes.txt", "manifests/.tmp-0123456789ab-notes.txt",
        "manifests/00000010-000001.json.bak", "segments/notes.txt",
        f"{segment_dir(saves[0])}/notes.txt", f"{segment_dir(saves[0])}/rank-1.json",
    ]  # fmt: skip
    for path in strange:
        put(job.files, path, b"mine")
    job.files.make_dir("segments/backup")
    job.files.make_dir("lost+found")
    plan = plan_of(job)
    assert sorted(plan.unrecognised) == sorted([*strange, "segments/backup"])
    execute(job.files, plan)
    for path in strange:
        assert job.files.read(path, 99) == b"mine"
    assert job.files.list_dir("segments/backup") == []
    assert job.files.list_dir(segment_dir(saves[0])) == ["notes.txt", "rank-1.json"]


def test_a_damaged_manifest_blocks(job: Job, saves: list[SaveId]) -> None:
    """What it reaches is not known, so nothing may be called garbage."""
    flip(job.files, manifest_path(saves[1]), 30)
    plan = plan_of(job)
    assert plan.blocked is not None
    assert str(saves[1]) in plan.blocked
    before = job.files.disk.files()
    execute(job.files, plan)
    assert job.files.disk.files() == before
    remove(job.files, manifest_path(saves[1]))  # what the message says to do
    assert plan_of(job).blocked is None


def test_an_empty_store_is_left_alone(files: SimulatedFiles) -> None:
    open_or_create(files)
    plan = plan_prune(open_catalog(files), TWO)
    assert plan.blocked is not None
    execute(files, plan)


def test_a_damaged_commit_does_not_push_out_a_good_one(job: Job, saves: list[SaveId]) -> None:
    for save in saves[4:]:
        remove(job.files, payload_path(save, 0))
    plan = plan_of(job)
    assert set(saves[2:4]) <= set(plan.keep)
    execute(job.files, plan)
    reading = read_newest(open_catalog(job.files))
    assert reading.save == saves[3]
    assert_true_to_write(reading)


def test_nothing_is_deleted_where_no_commit_is_whole(job: Job, saves: list[SaveId]) -> None:
    for save in saves:
        remove(job.files, payload_path(save, 0))
    assert plan_of(job).blocked is not None


@pytest.mark.parametrize("target", ["part", "manifest", "list"])
def test_a_refused_read_blocks_because_it_is_no_damage(job: Job, saves: list[SaveId], target: str) -> None:
    """An I/O error or too many open files must not get a good commit deleted."""
    path = {"part": part_path(saves[4], 0), "manifest": manifest_path(saves[4]), "list": segment_dir(saves[4])}[target]
    plan = plan_prune(open_catalog(Refusing(job.files, path)), TWO)
    assert plan.blocked is not None
    assert "I/O error" in plan.blocked
    assert (plan.manifests, plan.groups, plan.temporaries) == ((), (), ())


class Refusing(SimulatedFiles):
    """Reads of one path fail as with an I/O error."""

    def __init__(self, files: SimulatedFiles, path: str) -> None:
        super().__init__(files.disk)
        self.path = path

    def read(self, path: str, limit: int) -> bytes:
        self._refuse(path)
        return super().read(path, limit)

    def list_dir(self, path: str) -> list[str]:
        self._refuse(path)
        return super().list_dir(path)

    def _refuse(self, path: str) -> None:
        if path == self.path:
            raise StorageError(f"cannot read {path}: the device reported an I/O error")


@pytest.mark.parametrize("verb", ["unlink", "rmdir", "sync_dir"])
@pytest.mark.parametrize("nth", range(1, 12))
def test_an_error_in_the_middle_leaves_a_good_store(job: Job, saves: list[SaveId], verb: str, nth: int) -> None:
    plan = plan_of(job)
    fault = Fault(verb, nth=nth)
    job.files.faults = [fault]
    if fault_strikes(job, plan, fault):
        check_undamaged(job.files)
        for save in saves[4:]:
            assert_true_to_write(read_commit(open_catalog(job.files), save))
    job.files.faults = []
    execute(job.files, plan)
    assert open_catalog(job.files).saves() == saves[:3:-1]
    check_undamaged(job.files)
    check_goes_on(job.files)


def fault_strikes(job: Job, plan: PrunePlan, fault: Fault) -> bool:
    try:
        execute(job.files, plan)
    except StorageError:
        return True
    assert fault.seen < fault.nth, "an error was swallowed"
    return False


def test_older_epochs_and_rollbacks_are_ordered_by_epoch(job: Job, saves: list[SaveId]) -> None:
    """Scenario 25: equal or backward steps and clocks mean nothing."""
    for save in saves[1:]:
        remove(job.files, manifest_path(save))
    newer = Job(job.files, Memory())
    second = newer.save()
    assert second.step < saves[5].step
    execute(job.files, plan_of(newer, Retention(keep_last=1, log_spaced=False)))
    assert open_catalog(job.files).saves() == [second]
    assert not any(is_temporary(name) for name in groups(job))
    assert_true_to_write(read_newest(open_catalog(job.files)))


def test_the_default_retention_keeps_the_promise(job: Job) -> None:
    for _ in range(20):
        job.save()
        job.prune()
    assert RETENTION.keep_last == 2
    assert len(open_catalog(job.files).saves()) == 2
    check_goes_on(job.files)


def test_records_of_old_epochs_go_except_those_that_commits_need(files: SimulatedFiles) -> None:
    """A job that saves one step again and again claims an epoch each time."""
    Job(files, Memory()).save()
    for _ in range(99):
        claim_epoch(files, open_catalog(files).store_id)
    mark_closed(files, open_catalog(files).store_id, 2, 1.0)
    job = Job(files, Memory())
    job.save()
    assert newest_epoch(files) == 101
    execute(files, plan_prune(open_catalog(files), Retention(), job.epoch))
    left = files.list_dir("epochs")
    assert left == ["000001.json", *(f"{epoch:06d}.json" for epoch in range(38, 102))]
    check_goes_on(files)
    assert plan_prune(open_catalog(files), Retention()).temporaries == ()


def test_no_damaged_base_takes_all_commits_where_units_have_different_bases(tmp_path: Path) -> None:
    builder = StoreBuilder(tmp_path, layers=[FakeLayer("a", 640)], slots=("fp32", "exp_avg"), world_size=1)
    bases = {10: (None, None), 20: (10, None), 30: (10, 20), 40: (None, 20), 50: (40, 20)}
    for step, of in bases.items():
        packed = [How("bf16", level=1, base=None if base is None else SaveId(base, 1)) for base in of]
        builder.save(step, how=dict(zip(builder.slots, packed, strict=True)))
        execute(builder.files, plan_prune(open_catalog(builder.files), TWO))
    for base in (40, 20):
        path = builder.root / payload_path(SaveId(base, 1), 0)
        whole = path.read_bytes()
        path.write_bytes(bytes(byte ^ 0xFF for byte in whole))
        report = verify(open_catalog(builder.files))
        assert not report.ok and report.resumable is not None
        path.write_bytes(whole)
