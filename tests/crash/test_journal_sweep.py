"""The journal after a crash or a power loss, at every operation of a job that records its steps, on a simulated disk.

A resume gives a state that the job really had, bit for bit at the step that it names, and never an older one than the
last that was told to be durable. What the job does is real: :func:`monitor.attach`, its threads, and its optimizer.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.crash.simulated import Disk, Fault, Op, SimulatedFiles, disk_after, every_crash
from tests.support import journaled
from tests.support.journaled import same

pytestmark = pytest.mark.slow

NOWHERE = Path("/nowhere/store")


class Files(SimulatedFiles):
    """A disk that the threads of a job share."""

    def __init__(self, disk: Disk | None = None, faults: Sequence[Fault] = ()) -> None:
        super().__init__(disk, faults)
        self._lock = threading.RLock()

    def create(self, path: str) -> Any:
        with self._lock:
            return super().create(path)

    def list_dir(self, path: str) -> list[str]:
        with self._lock:
            return super().list_dir(path)

    def _do(self, op: Op) -> None:
        with self._lock:
            super()._do(op)


class Job(journaled.Job):
    """The job of the unit tests, on a disk of its own."""

    def __init__(self, files: Files, seed: int = 1, **settings: Any) -> None:
        super().__init__(seed)
        self.files, self.settings = files, {"every": 2, "trace": {"enabled": False}, **settings}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("monitor.save.store_session.files_at", lambda *_: files)
            self.ckpt = self.attach(NOWHERE, **self.settings)

    def whole(self) -> Mapping[str, Any]:
        """Copies of all that must come back."""
        found = {**self.state(), "schedule": self.schedule.state_dict(), "rng": torch.get_rng_state()}
        return copy.deepcopy(found)

    def die(self) -> None:
        self.ckpt.finish(clean=False)


@dataclass
class Run:
    """What happened on a disk: the states that the job had, in order, and how long the log was when each was told."""

    files: Files
    start: Disk = field(default_factory=Disk)
    had: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    told: list[tuple[int, int]] = field(default_factory=list)  # (length of the log, index into had)

    def train(self, job: Job, steps: int) -> None:
        for _ in range(steps):
            job.train_one_step()
            self.reach(job)

    def reach(self, job: Job) -> None:
        """Count a step, and wait until its record and its save are durable."""
        self.had.append((job.schedule.last_epoch, job.whole()))
        job.ckpt.step()
        job.ckpt.flush()
        self.tell()

    def tell(self) -> None:
        self.told.append((len(self.files.log), len(self.had) - 1))

    def least(self, done: int) -> int:
        """Return the index of the oldest state that a resume may give after so many operations, -1 for none."""
        return max((index for at, index in self.told if at <= done), default=-1)

    def points(self) -> list[int]:
        """Return all lengths of the log but those between two writes of a file."""
        log = self.files.log
        return [at for at in range(1, len(log) + 1) if at == len(log) or {log[at - 1].verb, log[at].verb} != {"write"}]

    def check(self, files: Files, done: int, **settings: Any) -> Job:
        """Resume from what a crash left, and hold the state to what the job had. Return the job, attached."""
        job = Job(files, seed=7, **settings)
        step, now, least = job.ckpt.resume(), job.whole(), self.least(done)
        matching = [index for index, (at, state) in enumerate(self.had) if at == step and same(state, now)]
        if step == 0:
            assert job.ckpt.certificate is None
            assert least < 0 or self.had[least][0] < 2, f"nothing is left of step {self.had[least][0]}"
        else:
            assert matching, f"no state of step {step} was ever like this"
            assert max(matching) >= least, f"step {step} again, after step {self.had[least][0]} was durable"
            assert job.ckpt.certificate is not None and job.ckpt.certificate.exact
            assert job.ckpt.certificate.step == step and job.ckpt.certificate.max_staleness == 0
        return job


def states(run: Run, points: Iterable[int]) -> Iterator[tuple[Disk, int]]:
    """Yield what a kill and a power loss leave after so many operations, each once.

    Where something was just told to be durable, also what a power loss leaves that keeps some changes only."""
    seen, told = set(), {at for at, _ in run.told}
    for done in points:
        disk = disk_after(run.start, run.files.log[:done])
        extremes = (disk.crashed(lambda _: False), disk.crashed(lambda _: True))
        for found in (*extremes, *(every_crash(disk, 4) if done in told else ())):
            key = hashlib.md5(repr((found.files(), run.least(done))).encode()).digest()
            if key not in seen:
                seen.add(key)
                yield found, done


def two_jobs(**settings: Any) -> Run:
    """One job dies after its fifth step. The next one goes on from there and saves twice; both saves prune."""
    run = Run(Files())
    for steps in (5, 4):
        job = Job(run.files, **settings)
        assert job.ckpt.resume() == len(run.had)
        run.train(job, steps)
        job.die()
    return run


def checked(run: Run, points: Iterable[int], **settings: Any) -> int:
    count = 0
    for disk, done in states(run, points):
        run.check(Files(disk), done, **settings).die()
        count += 1
    return count


POLICIES = {"full": "full", "parity": {"name": "parity", "k": 2}}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_crash(policy: str) -> None:
    run = two_jobs(policy=POLICIES[policy])
    assert checked(run, run.points(), policy=POLICIES[policy]) > 100


def test_a_power_loss_after_a_crash() -> None:
    """A job relies on names that a killed one made and did not sync, and its own steps are durable all the same."""
    run = two_jobs()
    made = [at for at, op in enumerate(run.files.log, 1) if op.verb in ("mkdir", "link") and at <= run.told[3][0]]
    assert len(made) > 10
    for done in made:
        disk = disk_after(run.start, run.files.log[:done])
        files = Files(disk.copied())
        job, later = run.check(files, done), Run(files, disk)
        later.train(job, 3 + job.schedule.last_epoch % 2)  # the last step is in the journal only
        job.die()
        for found, at in states(later, [later.told[-1][0]]):
            later.check(Files(found), at).die()


def test_a_crash_while_a_job_goes_back() -> None:
    """Before resume(step=...) returned either branch may be resumed; afterwards only the new one."""
    run = Run(Files())
    job = Job(run.files)
    job.ckpt.resume()
    run.train(job, 7)
    job.die()
    began, job = len(run.files.log), Job(run.files, seed=5)
    assert job.ckpt.resume(step=5) == 5
    run.had.append((5, job.whole()))
    run.tell()
    assert same(run.had[4][1], run.had[-1][1])
    torch.manual_seed(77)  # other data
    run.train(job, 2)
    job.die()
    assert not same(run.had[6][1], run.had[-1][1])
    assert checked(run, [at for at in run.points() if at >= began]) > 20


JOURNAL_FAULTS = [
    (verb, nth, after) for verb, count in {"mkdir": 4, "create": 6, "sync": 6, "link": 6, "sync_dir": 12}.items()
    for nth in range(1, count + 1, 2) for after in (False, True)
]  # fmt: skip


@pytest.mark.parametrize(("verb", "nth", "after"), JOURNAL_FAULTS)
def test_a_refused_operation(verb: str, nth: int, after: bool) -> None:
    """The record counts or does not, the job trains on, and what is resumed is a state that it had, no older than the
    last commit."""
    run = Run(Files(faults=[Fault(verb, nth, path="journal", after=after)]))
    job = Job(run.files)
    job.ckpt.resume()
    for _ in range(4):
        run.train(job, 1)
        run.told.pop()
        run.train(job, 1)  # a commit
    assert run.files.faults[0].seen >= nth
    job.train_one_step()
    run.reach(job)
    run.told.pop()
    job.die()
    assert checked(run, [len(run.files.log)]) > 0
