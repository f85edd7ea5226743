"""Check an existing store: whether it can be resumed, suspects, leftovers and permissions.

Reads records only, takes no lock and writes nothing, so a store in use is safe."""

import os
from collections.abc import Iterator
from pathlib import Path

from deploy.doctor.base import Finding
from deploy.format import plural, size_text
from deploy.store_status import StoreStatus, lock_owner_text, open_store, parameters, resume_kind, store_status
from store.catalog import Catalog
from store.errors import DamagedError, NewerFormatError, NoStoreError, NothingToResumeError, StoreError
from store.location import files_at, is_url
from store.names import EPOCHS, MANIFESTS, PROVEN, SEGMENTS, STORE
from store.retention import Retention, plan_prune
from store.storage.atomic import is_temporary
from store.storage.bucket import ObjectOptions
from store.text import listed


def check_store(root: Path, retention: Retention, options: ObjectOptions | None = None) -> Iterator[Finding]:
    """Run all checks of the store at ``root``; ``options`` are those of a bucket."""
    try:
        obstacle = None if is_url(root) else _obstacle(root)
        if obstacle is not None:
            yield Finding("store", "fail", obstacle, "set `store:` to a directory, or to a path to create")
            return
        if all(is_temporary(name) for name in _names(root, options)):
            yield Finding("store", "ok", f"{root} is empty or missing: the job creates the store")
            return
        catalog = open_store(root, options)
        found = store_status(catalog, root)
    except NoStoreError as error:
        yield Finding("store", "fail", str(error), "set `store:` to an empty or new directory")
        return
    except (NewerFormatError, DamagedError, NothingToResumeError) as error:
        todo = "until then set `store:` to another directory; this one is not changed"
        if not isinstance(error, NewerFormatError):
            todo = f"run `driftpoint doctor --repair {root}`, restore {STORE} from a copy, or set `store:` anew"
        yield Finding("store", "fail", str(error), todo)
        return
    except (StoreError, OSError) as error:
        yield Finding("store", "fail", str(error), f"this user must be able to read it; see `driftpoint status {root}`")
        return
    yield _usable(found, root)
    yield _resume(found)
    yield _leftovers(catalog, root, retention)
    if not is_url(root):
        yield _allowed(root)


def _obstacle(root: Path) -> str | None:
    """Return what prevents a directory there, None if it exists or can be created."""
    for place in (root.absolute(), *root.absolute().parents):
        try:
            place.lstat()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        except OSError as error:
            return f"{place}: {error.strerror}"
        return None if os.path.isdir(place) else f"{place} exists and is not a directory"  # noqa: PTH112
    return None


def known_parameters(root: Path, options: ObjectOptions) -> int | None:
    """Return the parameters of the model in the store, None if there is none that can be read."""
    try:
        newest = store_status(open_store(root, options), root, counted=False).newest
    except (StoreError, OSError):
        return None
    return None if newest is None else parameters(newest)


def _names(root: Path, options: ObjectOptions | None) -> list[str]:
    if is_url(root):
        return files_at(root, options).list_dir("")
    return os.listdir(root) if os.path.isdir(root) else []  # noqa: PTH112, PTH208


def _usable(found: StoreStatus, root: Path) -> Finding:
    user = lock_owner_text(root, found.in_use_by)
    seen = f"{plural(len(found.saves), 'commit')}, {size_text(found.size_bytes)}; in use {user}"
    if not {*found.suspects} & {*found.saves}:
        return Finding("store", "ok", seen)
    seen += f"; suspect: {', '.join(save.name for save in found.suspects)}"
    return Finding("store", "warn", seen, "jobs that resumed from them died: see docs/recovery.md")


def _resume(found: StoreStatus) -> Finding:
    if (resume := found.resume) is None:
        if not found.saves:
            return Finding("resume", "ok", "there is no commit yet: a job starts at step 0")
        todo = f"check all commits: driftpoint verify {found.root}"
        return Finding("resume", "fail", listed(found.problems, 3, "; "), todo)
    seen = f"from step {resume.step}, {resume_kind(resume)}"
    if found.problems:
        seen += f"; {listed(found.problems, 3, '; ')}"
        return Finding("resume", "warn", seen, f"see all: driftpoint verify {found.root}")
    return Finding("resume", "ok", f"{seen} (records only: `driftpoint verify` reads every byte)")


def _leftovers(catalog: Catalog, root: Path, retention: Retention) -> Finding:
    try:
        plan = plan_prune(catalog, retention)
    except (StoreError, OSError) as error:
        return Finding("leftovers", "warn", f"cannot list them: {error}", f"see `driftpoint verify {root}`")
    if plan.unrecognised:
        seen = f"unrecognised files: {listed(plan.unrecognised, 5)}"
        return Finding("leftovers", "warn", seen, "they are never deleted: move them out of the store")
    gone = len(plan.groups) + len(plan.temporaries)
    if gone and plan.freed_bytes:
        return Finding("leftovers", "ok", f"{size_text(plan.freed_bytes)} to be pruned by the next save")
    seen = f"{plural(gone, 'file')} of interrupted saves, to be pruned" if gone else "none"
    return Finding("leftovers", "ok", seen)


def _allowed(root: Path) -> Finding:
    folders = [root, *(root / name for name in (EPOCHS, SEGMENTS, MANIFESTS, PROVEN) if (root / name).is_dir())]
    closed = [str(one) for one in folders if not os.access(one, os.R_OK | os.W_OK | os.X_OK)]
    if closed:
        todo = "run as the store's owner, or change it: chown -R, chmod -R u+rwX"
        return Finding("permissions", "fail", f"this user cannot read and write {', '.join(closed)}", todo)
    return Finding("permissions", "ok", "this user can read and write it")
