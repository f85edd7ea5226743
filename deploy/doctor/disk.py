"""Test a directory for the operations that a store relies on, with real files and a second process.

The files have names of interrupted writes: a store ignores them, and pruning removes those of a killed doctor. No store
file is opened, so a store in use is safe. Does not need root."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from deploy.doctor.base import Finding, Plan, Probe, clock, semantics
from deploy.format import size_text
from deploy.store_status import bytes_below
from store.errors import StorageError
from store.location import mount_of
from store.session import FileLock
from store.storage.local import LocalFiles

_NTP = "synchronise both by NTP (chronyd, systemd-timesyncd); commits are ordered by step, only shown ages are wrong"
_LOCKER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("locked", flush=True)
sys.stdin.read()
"""


def check_disk(root: Path, plan: Plan) -> Iterator[Finding]:
    """Run all checks of the disk that holds ``root``, or will hold it."""
    above = (root.absolute(), *root.absolute().parents)
    place = next(one for one in above if os.path.isdir(one))  # noqa: PTH112 - also False without permission
    yield _filesystem(place)
    try:
        with Probe(LocalFiles(place)) as probe:
            yield from _writes(probe, place)
    except (OSError, StorageError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else error
        todo = "check the owner and mode of the directory, free space, quota, and that it is not mounted read-only"
        yield Finding("writing", "fail", f"cannot write a file in {place}: {reason}", todo)
    yield _space(place, plan, bytes_below(root, OSError))  # what the store has already is part of the plan


def _writes(probe: Probe[LocalFiles], place: Path) -> Iterator[Finding]:
    first, began = probe.name(), time.time()
    _written(probe, first)
    yield clock("the filesystem's", began, (place / first).stat().st_mtime, _NTP)
    broken = [text for text in (check(probe, first) for check in _PROMISES) if text is not None]
    works = "fsync, exclusive creation, atomic renames and hard links work"
    yield semantics(broken, works, "put the store on a filesystem that supports this")
    yield _locking(place / first)


def _written(probe: Probe[LocalFiles], name: str) -> None:
    with closing(probe.files.create(name)) as file:
        file.write(b"driftpoint doctor")
        file.sync()
    probe.files.sync_dir("")


def _excludes(probe: Probe[LocalFiles], first: str) -> str | None:
    return _refused(lambda: _written(probe, first), "exclusive creation replaces an existing file")


def _links(probe: Probe[LocalFiles], first: str) -> str | None:
    second = probe.name()
    try:
        probe.files.link(first, second)
    except StorageError as error:
        return f"hard links are not supported ({error})"
    if (probe.files.root / second).stat().st_ino != (probe.files.root / first).stat().st_ino:
        return "a hard link creates a copy"
    return _refused(lambda: probe.files.link(first, second), "a hard link replaces an existing file")


def _renames(probe: Probe[LocalFiles]) -> str | None:
    source, target = probe.name(), probe.name()
    _written(probe, source)
    _written(probe, target)
    inode = (probe.files.root / source).stat().st_ino
    try:
        probe.files.rename(source, target)
    except StorageError as error:
        return f"a rename cannot replace a file ({error})"
    whole = (probe.files.root / target).stat().st_ino == inode and not (probe.files.root / source).exists()
    return None if whole else "a rename copies the file"


def _reads_back(probe: Probe[LocalFiles], first: str) -> str | None:
    same = probe.files.read(first, 1 << 10) == b"driftpoint doctor"
    return None if same and first in probe.files.list_dir("") else "a read does not return what was written"


_PROMISES = (_excludes, _links, lambda probe, _: _renames(probe), _reads_back)


def _refused(action: Callable[[], None], otherwise: str) -> str | None:
    try:
        action()
    except StorageError as error:
        cause = error.__cause__
        return None if isinstance(cause, OSError) and cause.errno == errno.EEXIST else str(error)
    return otherwise


def _locking(path: Path) -> Finding:
    with _locked(path) as refused:
        unseen = refused is None and _lockable(path)
    if refused is None and not unseen:
        return Finding("locking", "ok", "two processes see each other's locks")
    todo = (
        "epochs still fence two jobs on one store, but only once the second has claimed one: mount with "
        "locks (Lustre: -o flock; NFS: not nolock), or make sure that only one job runs at a time"
    )
    return Finding("locking", "warn", refused or "a lock of one process is not seen by another", todo)


@contextmanager
def _locked(path: Path) -> Iterator[str | None]:
    """Lock the file in another process during the block; yields the reason if that failed."""
    try:
        command, pipe = [sys.executable, "-c", _LOCKER, str(path)], subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    except OSError as error:
        yield f"cannot start a second process: {error.strerror}"
        return
    assert child.stdout is not None
    try:
        yield None if child.stdout.readline() == "locked\n" else "a second process cannot lock a file"
    finally:
        child.communicate()


def _lockable(path: Path) -> bool:
    with suppress(OSError):
        FileLock(path, 0o600).release()
        return True
    return False


def _filesystem(place: Path) -> Finding:
    if (mount := mount_of(place)) is None:
        return Finding("filesystem", "warn", f"the filesystem of {place} is unknown", "")
    seen = f"{place} is on {mount.name}, mounted at {mount.point}"
    if mount.loss is not None:
        todo = "set `store:` to a directory on a disk (in a container: a volume)"
        return Finding("filesystem", "warn", f"{seen}: {mount.loss}", todo)
    what = {"shared": "shared between machines", "local": "local to this machine: for a single node only"}
    return Finding("filesystem", "ok", f"{seen} ({what.get(mount.kind, 'unknown whether shared')})")


def _space(place: Path, plan: Plan, held: int) -> Finding:
    status = os.statvfs(place)
    free, need, commits = status.f_bavail * status.f_frsize, plan.store_bytes, plan.config.most_commits()
    if need is None or plan.commit_bytes is None:
        each = Plan(plan.config, 10**9).store_bytes or 1
        fit = f"{commits} full commits of a model of {free / each:.2g} G parameters fit"
        return Finding("space", "ok", f"{size_text(free)} free: {fit}; set --parameters for your model")
    seen = f"{size_text(free)} free; up to {commits} commits of {size_text(plan.commit_bytes)} at a time: "
    if need <= free + held:
        return Finding("space", "ok", f"{seen}{size_text(need)}")
    todo = "free space, keep fewer commits (`retention: {keep_last: 2, log_spaced: false}`), or a smaller `encoding:`"
    enough = 2 * plan.commit_bytes <= free + held
    return Finding("space", "warn" if enough else "fail", f"{seen}{size_text(need)}", todo)
