from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from store.catalog import open_catalog, open_or_create
from store.commit import Expected, commit, hint_latest, mark_proven, wait_for_group
from store.errors import DamagedError, ExistsError, MissingSegmentsError, SaveError, StorageError
from store.names import SaveId, manifest_path, part_path, payload_path
from store.segment import present_parts
from store.storage.atomic import final_name, is_temporary
from tests.crash.checker import check, check_goes_on, promised, read_newest
from tests.crash.damage import flip, forge, remove
from tests.crash.simulated import Disk, Fault, SimulatedFiles, disk_after
from tests.crash.workload import PLAN, RANKS, Job, Memory, Save


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def expected(job: Job, save: Save, world_size: int = RANKS, plan: str = PLAN) -> Expected:
    return Expected(job.catalog.store_id, save.id, world_size, plan)


def test_waits_until_every_rank_wrote(job: Job) -> None:
    draft = job.plan()
    job.write(draft, 0)
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if len(clock.slept) == 3:
            job.write(draft, 1)

    group = wait_for_group(job.files, expected(job, draft), 60, clock=clock, sleep=sleep)
    assert [part.rank for part in group.parts] == [0, 1]
    assert group.record.world_size == RANKS
    assert group.record.payload_bytes == sum(job.files.size(payload_path(draft.id, rank)) for rank in range(RANKS))
    assert len(clock.slept) == 3


def test_a_rank_that_never_writes(job: Job) -> None:
    """Scenario 12."""
    draft = job.plan()
    job.write(draft, 1)
    clock = Clock()
    with pytest.raises(SaveError, match=r"ranks \[0\] wrote no segment within 5 s"):
        wait_for_group(job.files, expected(job, draft), 5, clock=clock, sleep=clock.sleep)
    assert 105 <= clock.now < 106
    assert open_catalog(job.files).saves() == []


def test_a_save_can_be_given_up_early(job: Job) -> None:
    draft = job.plan()
    clock = Clock()
    with pytest.raises(SaveError, match="given up"):
        wait_for_group(
            job.files, expected(job, draft), 60, aborted=lambda: clock.now > 101, clock=clock, sleep=clock.sleep
        )
    assert clock.now < 102


def test_a_payload_without_its_part_is_not_there(job: Job) -> None:
    draft = job.plan()
    job.write(draft, 0)
    job.write(draft, 1)
    remove(job.files, part_path(draft.id, 1))
    assert present_parts(job.files, draft.id) == [0]
    with pytest.raises(SaveError):
        wait_for_group(job.files, expected(job, draft), 0)


@pytest.mark.parametrize("wrong", ["world size", "too few", "plan", "store", "payload", "part"])
def test_parts_that_do_not_fit_stop_the_save(job: Job, wrong: str) -> None:
    draft = job.plan()
    job.write(draft, 0)
    job.write(draft, 1)
    want = expected(job, draft)
    if wrong == "world size":
        want = expected(job, draft, world_size=3)
    elif wrong == "too few":
        want = expected(job, draft, world_size=1)
    elif wrong == "plan":
        want = expected(job, draft, plan="1" * 32)
    elif wrong == "store":
        forge(job.files, part_path(draft.id, 0), lambda body: body.update(store_id="1" * 32))
    elif wrong == "payload":
        remove(job.files, payload_path(draft.id, 0))
    else:
        flip(job.files, part_path(draft.id, 0), 33)
    with pytest.raises(DamagedError):
        wait_for_group(job.files, want, 0)


def test_a_rank_writes_a_save_once(job: Job) -> None:
    """Scenario 14: the same rank twice."""
    draft = job.plan()
    job.write(draft, 0)
    before = job.files.disk.files()
    with pytest.raises(ExistsError):
        job.write(draft, 0)
    assert job.files.disk.files() == before


def test_the_hint_follows_and_nobody_trusts_it(job: Job) -> None:
    first, second = job.save(), job.save()
    assert job.files.read("LATEST", 99) == f"{second}\n".encode()
    hint_latest(job.files, first)
    assert job.files.read("LATEST", 99) == f"{first}\n".encode()
    assert read_newest(open_catalog(job.files)).save == second
    remove(job.files, "LATEST")
    assert read_newest(open_catalog(job.files)).save == second


def test_a_mark_is_set_once(job: Job) -> None:
    save = job.save()
    mark_proven(job.files, job.catalog.store_id, save, 1)
    before = job.files.disk.files()
    mark_proven(job.files, job.catalog.store_id, save, 2)
    assert job.files.disk.files() == before
    assert open_catalog(job.files).proven() == {save}


@pytest.mark.parametrize("verb", ["create", "write", "sync", "link", "unlink", "sync_dir", "mkdir", "rename"])
@pytest.mark.parametrize("kind", ["EIO", "EIO after", "ENOSPC", "EIO for ever"])
def test_any_error_in_a_save_is_typed_and_harms_nothing(verb: str, kind: str) -> None:
    """EIO once, after success, or for good; ENOSPC at the first, second, ... operation of a kind."""
    for nth in range(1, 40):
        job = Job(SimulatedFiles(), Memory())
        job.save()
        fault = Fault(
            verb,
            nth=nth,
            error=errno.ENOSPC if kind == "ENOSPC" else errno.EIO,
            times=None if kind == "EIO for ever" else 1,
            after=kind == "EIO after",
        )
        job.files.faults = [fault]
        draft = job.plan()
        try:
            job.save()
        except (StorageError, SaveError):
            pass
        else:
            assert verb == "unlink" or fault.seen < nth, "an error was swallowed"
        job.files.faults = []
        if fault.seen < nth:
            break
        visible = {name for name in job.files.disk.files() if not is_temporary(name.rpartition("/")[2])}
        assert visible >= {f"manifests/{save}.json" for save in promised(job.journal.events).kept}
        assert read_newest(open_catalog(job.files)).save >= promised(job.journal.events).newest
        assert check_goes_on(job.files) > draft.id
    assert nth > 1 or verb == "mkdir"


def test_an_error_at_the_commit_point_is_no_acknowledgement(job: Job) -> None:
    job.save()
    draft = job.plan()
    for rank in range(RANKS):
        job.write(draft, rank)
    job.files.faults = [Fault("sync_dir", path="manifests")]
    with pytest.raises(StorageError):
        job.commit(draft)
    assert job.journal.events[-1]["save"] != draft.id.name
    check_goes_on(job.files)


def test_a_commit_that_was_refused_can_be_given_up(job: Job) -> None:
    job.save()
    draft = job.plan()
    job.write(draft, 0)
    with pytest.raises(SaveError):
        job.commit(draft)
    newer = job.plan()
    assert newer.id == draft.id  # its name is used up by rank 0: the job goes on at another step
    assert job.last is not None
    with pytest.raises(ExistsError):
        commit(job.files, job.last)


def test_a_manifest_that_nobody_could_follow_is_refused(job: Job) -> None:
    job.save()
    job.save()
    assert job.last is not None
    before = job.files.disk.files()
    for name in job.last.groups:
        groups = {key: record for key, record in job.last.groups.items() if key != name}
        with pytest.raises(SaveError, match=name):
            commit(job.files, job.last.replace(groups=groups))
    assert job.files.disk.files() == before


def syncs(files: SimulatedFiles, start: int = 0) -> list[str]:
    """What was synced: directories by path, files by the name that they got."""
    names = {op.node: op.path for op in files.log if op.verb == "write"}
    made = [op for op in files.log[start:] if op.verb in ("sync", "sync_dir")]
    return [
        op.path or "." if op.verb == "sync_dir" else (final_name(names[op.node].rpartition("/")[2]) or "")
        for op in made
    ]


def test_a_save_syncs_each_file_and_each_directory_once(job: Job) -> None:
    job.save()
    start = len(job.files.log)
    draft = job.plan()
    for rank in range(RANKS):
        job.write(draft, rank)
    job.commit(draft)
    ranks = [f"rank-{rank:05d}.{kind}" for rank in range(RANKS) for kind in ("safetensors", "json")]
    assert syncs(job.files, start) == [*ranks, "segments", f"segments/{draft.id}", f"{draft.id}.json", "manifests"]


def test_a_commit_outlives_a_power_loss_whoever_made_the_store() -> None:
    """Another process made it, and was killed before it synced: at any point of that, and nothing unsynced is kept."""
    first = SimulatedFiles()
    open_or_create(first)
    for made in range(len(first.log) + 1):
        files = SimulatedFiles(disk_after(Disk(), first.log[:made]))
        memory = Memory()
        job = Job(files, memory)
        for rank in range(RANKS):
            job.write(draft := job.plan(), rank)
        job.commit(draft)
        after = SimulatedFiles(files.disk.crashed(lambda _: False))
        assert read_newest(open_catalog(after)).save == draft.id
        check(after, promised(memory.events))


@pytest.mark.parametrize("folder", ["segments", "manifests"])
def test_a_directory_that_was_deleted_is_made_again_durably(job: Job, folder: str) -> None:
    for name in job.files.list_dir(folder):
        remove(job.files, f"{folder}/{name}")
    job.files.remove_dir(folder)
    job.files.sync_dir("")
    save = job.save(everything=True)
    assert read_newest(open_catalog(SimulatedFiles(job.files.disk.crashed(lambda _: False)))).save == save


class Slow(SimulatedFiles):
    """A look takes so many seconds."""

    def __init__(self, files: SimulatedFiles, clock: Clock, seconds: float) -> None:
        super().__init__(files.disk)
        self.clock, self.seconds = clock, seconds
        self.looks = 0

    def list_dir(self, path: str) -> list[str]:
        self.looks += 1
        self.clock.now += self.seconds
        return super().list_dir(path)


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.1], ids=lambda seconds: f"look-{seconds}")
@pytest.mark.parametrize("waits", [0.02, 1.0, 30.0])
def test_waiting_for_ranks_adds_little_and_looks_seldom(job: Job, waits: float, seconds: float) -> None:
    """Adds a twentieth of the wait, ten looks, or 0.25 s. A tenth of the time goes to looks, or four looks a second."""
    draft, clock = job.plan(), Clock()
    slow, end = Slow(job.files, clock, seconds), clock.now + waits
    with pytest.raises(SaveError, match="given up"):
        wait_for_group(slow, expected(job, draft), 60, aborted=lambda: clock.now >= end, clock=clock, sleep=clock.sleep)
    assert clock.now - end <= min(0.25, max(0.002, 0.05 * waits, 10 * seconds)) + seconds
    assert slow.looks <= 2 + min(waits / max(0.002, min(0.25, 10 * seconds)), 120 + 4 * waits)


@pytest.mark.parametrize("path", [part_path, payload_path])
def test_a_commit_that_needs_files_that_are_gone_is_refused(job: Job, path: Callable[[SaveId, int], str]) -> None:
    """Unless all that it needs was found without them, as in a rescue."""
    first = job.save()
    job.save()
    assert job.last is not None and first.name in job.last.groups
    remove(job.files, manifest_path(job.last.save))
    remove(job.files, path(first, 1))
    with pytest.raises(MissingSegmentsError, match="segments are gone") as raised:
        commit(job.files, job.last)
    assert raised.value.saves == (first.name,)
    commit(job.files, job.last, resolved=True)
    assert job.last.save in open_catalog(job.files).saves()
