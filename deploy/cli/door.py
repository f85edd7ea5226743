"""From what the user typed to a store and a commit in it."""

from __future__ import annotations

import math
import os
from pathlib import Path

from store.catalog import Catalog, open_catalog
from store.certificate import certify
from store.effective import run_saves
from store.errors import DamagedError, NoStoreError, NothingToResumeError, UsageError
from store.layout import LOCK, STORE
from store.lock import lock_holder
from store.names import SaveId
from store.objects.options import ObjectOptions
from store.place import files_at, is_url
from store.schema import ManifestRecord
from store.text import listed
from store.versions import Resolution

_PATIENCE = ObjectOptions(retry_seconds=15.0)
"""Of a command, at which somebody looks; a job has more."""


def open_store(root: Path) -> Catalog:
    """The catalog of the store at ``root``. NoStoreError where there is none, NothingToResumeError without its head."""
    if not root.is_dir() and not is_url(root):
        found = "is a file" if root.exists() else "does not exist"
        raise NoStoreError(f"{root.absolute()} {found}: give the directory of a store, the `store:` of its job")
    try:
        return open_catalog(files_at(root, _PATIENCE))
    except NoStoreError as error:
        raise NoStoreError(f"{error}{'' if is_url(root) else _nearby(root)}") from error
    except DamagedError as error:
        raise NothingToResumeError(
            f"{error}; nothing can be read without it: put {STORE} back from a copy of the store"
        ) from error


def find_save(catalog: Catalog, wanted: str) -> SaveId:
    """The commit of a step number (of the newest epoch that has it) or of a save name. UsageError without one."""
    saves = catalog.saves()
    if not saves:
        raise NothingToResumeError("the store holds no commit yet")
    if wanted.isascii() and wanted.isdigit():
        found = next((save for save in saves if save.step == int(wanted)), None)
    else:
        found = next((save for save in saves if save.name == wanted), None)
    if found is None:
        raise UsageError(f"there is no commit {wanted!r}; {_what_there_is(saves)}")
    return found


def holder(root: Path) -> int | None:
    """Process id of the job of this machine that is using the store, 0 where its id is not known; of a store in a
    bucket nobody can tell."""
    return None if is_url(root) else lock_holder(root)


def holder_text(root: Path, pid: int | None) -> str:
    """Who is using the store, in words."""
    if is_url(root):
        return "not known: an object store has no locks, see the newest epoch"
    if pid is not None:
        return f"by process {pid} on this machine" if pid > 0 else "by another process"
    lock = root / LOCK
    if lock.exists() and not os.access(lock, os.R_OK | os.W_OK):
        return f"not known: {LOCK} cannot be opened by this user"
    return "by no process on this machine"


def goes_on_at(catalog: Catalog, resolution: Resolution) -> int:
    """The step that a job goes on from which resumes this, by default (``resume: {at: effective}``). Whether the run
    state there is sound, and fits the job, only the resume itself finds out."""
    for save, record in run_saves(resolution, certify(resolution).effective_step).items():
        if not catalog.group(save, record).problems:
            return save.step
    return resolution.manifest.step


def parameters(manifest: ManifestRecord) -> int:
    """Parameters of the model, tied ones once, buffers not at all."""
    return sum(math.prod(tensor.shape) for tensor in manifest.tensors.values() if tensor.kind != "buffer")


def _nearby(root: Path) -> str:
    for place in (*sorted(root.glob(f"*/{STORE}"))[:1], root.absolute().parent / STORE):
        if place.is_file():
            return f"; there is one in {place.parent}"
    return ""


def _what_there_is(saves: list[SaveId]) -> str:
    return f"there is {listed((save.name for save in saves), 5, rest='older ones')}"
