"""A process that imports the store once and forks a child for each run of the small job: 20 ms instead of 400.

Reads lines ``SCENARIO STORE JOURNAL K`` from standard input, answers with the child's process id. The child waits
until a tracer is attached (``K`` is ``trace``), goes to an object store (``objects:SECONDS:SECONDS``, for a request and
for all of its tries), or shuts the filesystem down before its K-th change (a number), runs the scenario, and writes
what happened as the journal's last event. Run as a script only.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import sys
import time
from pathlib import Path

from store.catalog import open_catalog
from store.errors import DriftpointError, StorageError
from store.location import files_at
from store.retention import Retention, execute, keep_named_weights, plan_prune
from store.storage.bucket import Bucket, ObjectOptions
from store.storage.local import Files, LocalFiles, NewFile
from store.storage.object_store import ObjectFiles
from tests.crash.memory_workload import MEMORY
from tests.crash.models import RANKS, VARIED
from tests.crash.workload import Job, Paper

WEIGHTS = Retention(keep_last=2, log_spaced=False, weights_every=10, weights_last=99)
PR_SET_PTRACER = 0x59616D61
EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2


def save(files: Files, journal: Paper) -> None:
    """Resume, save, and prune what the save made superfluous."""
    job = Job(files, journal)
    job.save()
    job.prune()


def several(files: Files, journal: Paper) -> None:
    """From an empty directory: four saves, a mark, a prune after each save."""
    job = Job(files, journal)
    for number in range(4):
        job.save()
        if number == 0:
            job.prove()
        job.prune()


def commit(files: Files, journal: Paper) -> None:
    """Resume and commit, and not a change more."""
    job = Job(files, journal)
    draft = job.plan()
    for rank in range(RANKS):
        job.write(draft, rank)
    job.commit(draft)


def varied(files: Files, journal: Paper) -> None:
    """From an empty directory: every unit in its encoding: whole twice, twice as a difference to the second, whole."""
    job = Job(files, journal, VARIED)
    for _ in range(5):
        job.save(everything=True)
    job.prune()


def aged(files: Files, journal: Paper) -> None:
    """Resume and save; copy the weights of all commits but two, and drop those."""
    Job(files, journal).save()
    catalog = open_catalog(files)
    for _ in range(2):
        plan = plan_prune(catalog, WEIGHTS)
        journal.note("dropping", saves=[save.name for save in plan.manifests])
        execute(files, plan)
        problems = keep_named_weights(catalog, plan)
        if problems:
            raise StorageError(problems[0])


SCENARIOS = {"save": save, "aged": aged, "several": several, "commit": commit, "varied": varied, **MEMORY}


class Doomed(LocalFiles):
    """A local filesystem that loses power before its k-th change."""

    def __init__(self, root: str, k: int) -> None:
        super().__init__(root)
        self.left = k

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.cut()

    def cut(self) -> None:
        descriptor = os.open(self.root.parent, os.O_RDONLY)
        fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH.to_bytes(4, "little"))
        os.close(descriptor)

    def create(self, path: str) -> NewFile:
        self.count()
        return _DoomedFile(super().create(path), self)

    def link(self, source: str, target: str) -> None:
        self.count()
        super().link(source, target)

    def rename(self, source: str, target: str) -> None:
        self.count()
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self.count()
        super().unlink(path)

    def make_dir(self, path: str) -> bool:
        self.count()
        return super().make_dir(path)

    def remove_dir(self, path: str) -> None:
        self.count()
        super().remove_dir(path)

    def sync_dir(self, path: str) -> None:
        self.count()
        super().sync_dir(path)


class _DoomedFile:
    def __init__(self, file: NewFile, files: Doomed) -> None:
        self._file = file
        self._files = files

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._files.count()
        self._file.write(data)

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        self._files.count()
        self._file.write_at(offset, data)

    def sync(self) -> None:
        self._files.count()
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def drop_fsync(of_directories: bool) -> None:
    """A mutant, to test the tests: fsync does nothing for directories, or for files."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) != of_directories:
            real(descriptor)

    os.fsync = fsync


def drop_from_bucket(what: str) -> None:
    """Mutants: objects are put over others; what is there already is never taken for our own."""
    if what == "condition":
        Bucket.create = Bucket.replace  # type: ignore[method-assign]
    else:
        Bucket._holds = lambda self, key, data: False  # type: ignore[method-assign]


def objects(url: str, request_seconds: float, retry_seconds: float) -> Files:
    """With parts so small that payloads have several."""
    options = ObjectOptions(
        request_seconds=request_seconds, retry_seconds=retry_seconds, part_mib=256 / 2**20, connections=2
    )
    files = files_at(url, options)
    assert isinstance(files, ObjectFiles)
    files.require_conditional_puts()
    return files


def child(scenario: str, store: str, journal_path: str, k: str) -> None:
    """One run. Never returns."""
    journal = Paper(journal_path)
    if k == "trace":
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1 & (1 << 64) - 1), 0, 0, 0)
        while "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
            time.sleep(0.001)
        time.sleep(0.01)  # attached is not yet stopped: let the tracer get hold of us first
    scenario, _, mutant = scenario.partition("-without-")
    if mutant in ("condition", "own-content"):
        drop_from_bucket(mutant)
    elif mutant:
        drop_fsync(of_directories=mutant == "directory-sync")
    try:
        if k.startswith("objects:"):
            files: Files = objects(store, *map(float, k.split(":")[1:]))
        else:
            files = LocalFiles(store) if k == "trace" else Doomed(store, int(k))
        SCENARIOS[scenario](files, journal)
    except DriftpointError as error:
        journal.note("error", kind=type(error).__name__, text=str(error))
        os._exit(3)
    except BaseException as error:  # noqa: BLE001 - the edge of the process: it is told, and the test fails
        journal.note("crash", kind=type(error).__name__, text=repr(error))
        os._exit(4)
    if isinstance(files, Doomed):
        journal.note("changes", count=int(k) - files.left)
        files.cut()
    os._exit(0)


def main() -> None:
    """Fork for each line."""
    if "AWS_ENDPOINT_URL" in os.environ:
        import obstore.store  # noqa: F401 - once, before the forks
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(*line.split())
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
