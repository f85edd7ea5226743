"""L0: power losses on a simulated disk, at every operation, in every state the disk may be left in.

Finds errors of order: a name that is durable before its bytes, a directory never synced, a commit deleted
before its successor is durable. What it takes for granted is in ``simulated``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store.catalog import open_catalog
from store.errors import NoStoreError
from store.retention import Retention, execute, plan_prune
from store.storage.local import Files
from tests.crash.checker import Promise, check, check_reading, check_undamaged, promised
from tests.crash.models import VARIED
from tests.crash.simulated import Disk, Op, SimulatedFiles, disk_after, every_crash
from tests.crash.workload import Job, Memory, run

pytestmark = pytest.mark.slow

EXHAUSTIVE = 64
"""Up to so many states at one point of the run all of them are checked."""


@dataclass(frozen=True)
class Run:
    """A recorded run: the disk before it, its changes, and what the job was told when."""

    start: Disk
    log: Sequence[Op]
    events: Sequence[Mapping[str, Any]]

    def promise(self, done: int) -> Promise:
        """What holds after the first ``done`` changes: what was told by then, and no drop that has begun."""
        return promised(e for e in self.events if e["at"] < done or (e["at"] == done and e["event"] != "dropping"))


def recorded(files: SimulatedFiles, work: Any) -> Run:
    start = files.disk.copied()
    journal = Memory(lambda: len(files.log))
    work(files, journal)
    return Run(start, tuple(files.log), tuple(journal.events))


@pytest.fixture(scope="module")
def whole_run() -> Run:
    return recorded(SimulatedFiles(), run)


@dataclass(frozen=True)
class VariedRun:
    """A run with every encoding, packed, and with differences. first: where it begins to write those, and prunes."""

    recording: Run
    first: int

    def points(self, stride: int) -> list[int]:
        """Every change of names or of a header, and each ``stride``-th of the others."""
        log = self.recording.log
        counted = [at for at in range(self.first, len(log)) if not _telling(log[at])]
        told = [at for at in range(self.first, len(log)) if _telling(log[at])]
        return sorted(at + 1 for at in told + counted[::stride])


def _telling(op: Op) -> bool:
    return op.verb in ("link", "unlink", "rename", "rmdir") or op.offset is not None


@pytest.fixture(scope="module")
def varied_run() -> VariedRun:
    """Two jobs; the first has stored everything whole twice when what counts begins."""
    files = SimulatedFiles()
    journal = Memory(lambda: len(files.log))
    job = Job(files, journal, VARIED)
    for _ in range(2):
        job.save(everything=True)
    first = len(files.log)
    job.save()
    job.prune()
    job.save()
    job.prune()
    again = Job(files, journal, VARIED)
    again.save()
    again.prune()
    return VariedRun(Run(Disk(), tuple(files.log), tuple(journal.events)), first)


def check_each(states: Iterable[tuple[Disk, Promise]]) -> int:
    seen = set()
    for disk, promise in states:
        key = hashlib.md5(repr((disk.files(), sorted(promise.kept))).encode()).digest()
        if key not in seen:
            seen.add(key)
            check(SimulatedFiles(disk), promise)
    return len(seen)


def crashes_of(recording: Run, limit: int = EXHAUSTIVE) -> Iterable[tuple[Disk, Promise]]:
    disk = recording.start.copied()
    for done in range(len(recording.log) + 1):
        if done:
            disk.apply(recording.log[done - 1])
        promise = recording.promise(done)
        for state in every_crash(disk, limit):
            yield state, promise


@pytest.mark.core
def test_every_crash_state_at_every_operation(whole_run: Run) -> None:
    assert check_each(crashes_of(whole_run)) > 1000


@pytest.mark.core
def test_crash_states_with_every_encoding_and_bases(varied_run: VariedRun) -> None:
    recording = varied_run.recording
    states = (
        (state, recording.promise(done))
        for done in varied_run.points(stride=4)
        for state in every_crash(disk_after(recording.start, recording.log[:done]), 4)
    )
    assert check_each(states) > 150


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(point=st.floats(0, 1), rng=st.randoms(use_true_random=False), share=st.sampled_from([0.1, 0.5, 0.9]))
def test_random_crash_states_with_every_encoding_and_bases(
    varied_run: VariedRun, point: float, rng: Any, share: float
) -> None:
    recording, first = varied_run.recording, varied_run.first
    done = first + round(point * (len(recording.log) - first))
    crashed = disk_after(recording.start, recording.log[:done]).crashed(lambda kind: rng.random() < share)
    check(SimulatedFiles(crashed), recording.promise(done))


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(point=st.floats(0, 1), rng=st.randoms(use_true_random=False), share=st.sampled_from([0.1, 0.5, 0.9]))
def test_random_crash_states(whole_run: Run, point: float, rng: Any, share: float) -> None:
    done = round(point * len(whole_run.log))
    crashed = disk_after(whole_run.start, whole_run.log[:done]).crashed(lambda kind: rng.random() < share)
    check(SimulatedFiles(crashed), whole_run.promise(done))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    points=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    rng=st.randoms(use_true_random=False),
    share=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_a_crash_during_the_recovery_from_a_crash(
    whole_run: Run, points: tuple[float, float], rng: Any, share: float
) -> None:
    """``share`` 1.0: the first job was only killed, so what it had not synced is still visible to the second."""
    done = round(points[0] * len(whole_run.log))
    first = disk_after(whole_run.start, whole_run.log[:done]).crashed(lambda kind: rng.random() < share)
    promise = whole_run.promise(done)
    recovery = recorded(SimulatedFiles(first), recover)
    done = round(points[1] * len(recovery.log))
    second = disk_after(recovery.start, recovery.log[:done]).crashed(lambda kind: rng.random() < 0.5)
    check(SimulatedFiles(second), _joined(promise, recovery.promise(done), recovery, done))


def recover(files: Files, journal: Memory) -> None:
    job = Job(files, journal)
    job.save()
    job.prune()
    job.save()
    job.prune()


def _joined(before: Promise, after: Promise, recovery: Run, done: int) -> Promise:
    dropped = {name for e in recovery.events if e["event"] == "dropping" and e["at"] < done for name in e["saves"]}
    kept = {save: units for save, units in before.kept.items() if save.name not in dropped} | dict(after.kept)
    return Promise(kept, max(kept, default=None))


def killed_at(recording: Run, done: int) -> Disk:
    """The disk as the next process finds it after SIGKILL: all is visible, what was not synced is not durable."""
    return disk_after(recording.start, recording.log[:done])


def test_power_lost_after_a_kill(whole_run: Run) -> None:
    """A job is killed; somebody prunes what is visible, keeping one commit; then the power goes.

    Whatever a prune relies on must be durable before it deletes what that replaces.
    """
    log = whole_run.log
    points = [done for done in range(1, len(log) + 1) if log[done - 1].verb in ("link", "unlink", "rmdir")]
    assert prune_after_a_kill(whole_run, points) > 500


def test_power_lost_after_a_kill_with_every_encoding_and_bases(varied_run: VariedRun) -> None:
    """What differences rest on is among that."""
    log = varied_run.recording.log
    points = [done for done in range(varied_run.first, len(log) + 1) if log[done - 1].verb in ("link", "rmdir")]
    assert prune_after_a_kill(varied_run.recording, points[::2]) > 50


def prune_after_a_kill(recording: Run, points: Iterable[int]) -> int:
    """How many states were looked at."""
    seen: set[bytes] = set()
    for done in points:
        promise = recording.promise(done)
        pruned = recorded(SimulatedFiles(killed_at(recording, done)), prune_to_one)
        for at in range(len(pruned.log) + 1):
            dropped = {n for e in pruned.events if e["at"] < at for n in e["saves"]}
            kept = {save: units for save, units in promise.kept.items() if save.name not in dropped}
            for state in every_crash(disk_after(pruned.start, pruned.log[:at]), 4):
                key = hashlib.md5(repr((state.files(), sorted(kept))).encode()).digest()
                if key not in seen:
                    seen.add(key)
                    newest = check_reading(SimulatedFiles(state), Promise(kept, max(kept, default=None)))
                    if promise.newest is not None:
                        assert newest is not None, "every commit is gone"
                        assert newest.save >= promise.newest, "deleted for a commit that was not durable"
                    check_undamaged(SimulatedFiles(state))
    return len(seen)


def prune_to_one(files: Files, journal: Memory) -> None:
    try:
        plan = plan_prune(open_catalog(files), Retention(keep_last=1, log_spaced=False))
    except NoStoreError:
        return
    journal.note("dropping", saves=[save.name for save in plan.manifests])
    execute(files, plan)


def overtaken(files: SimulatedFiles, journal: Memory) -> None:
    """The committer sees the last rank's part, and commits, before that rank has synced the directory."""
    job = Job(files, journal)
    draft = job.plan()
    job.write(draft, 0)

    def commit_now(op: Op) -> None:
        if op.verb == "unlink" and "rank-00001.json" in op.path:
            files.before = lambda op: None
            job.commit(draft)

    files.before = commit_now
    job.write(draft, 1)


@pytest.mark.core
def test_commit_overtakes_the_last_rank() -> None:
    recording = recorded(SimulatedFiles(), overtaken)
    assert [e["event"] for e in recording.events] == ["claimed", "acknowledged"]
    assert recording.events[1]["at"] < len(recording.log)
    check_each(crashes_of(recording, limit=8))


@pytest.mark.parametrize("turn", range(1, 40, 3))
def test_ranks_write_at_the_same_time(turn: int) -> None:
    """Rank 1 writes its whole segment in between two operations of rank 0."""

    def work(files: SimulatedFiles, journal: Memory) -> None:
        job = Job(files, journal)
        draft = job.plan()
        left = [turn]

        def other_rank(op: Op) -> None:
            left[0] -= 1
            if left[0] == 0:
                files.before = lambda op: None
                job.write(draft, 1)

        files.before = other_rank
        job.write(draft, 0)
        files.before = lambda op: None
        if left[0] > 0:
            job.write(draft, 1)
        job.commit(draft)

    recording = recorded(SimulatedFiles(), work)
    check_each((state, recording.promise(len(recording.log))) for state in every_crash(_last(recording), 64))


def _last(recording: Run) -> Disk:
    return disk_after(recording.start, recording.log)
