"""Open a store and summarise it: commits, owner, and the commit that a resume would take.

Reads records only, no payload: fast on any store, but it does not detect changed payload bytes (``verify`` does)."""

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.exit_codes import health
from deploy.format import count_text, kind_text, plural, printable
from store.catalog import Catalog, open_catalog
from store.certificate import AS_FOUND, FOUND, Certificate, certify, certify_stored, run_saves
from store.errors import DamagedError, NoStoreError, NothingToResumeError, StorageError, UsageError
from store.journal import chain_from, journal_catalog
from store.location import files_at, is_url
from store.names import LOCK, STORE, SaveId
from store.resolve import Resolution, newest_resumable
from store.schema import EpochRecord, ManifestRecord
from store.session import lock_holder, newest_epoch, read_epoch
from store.storage.bucket import ObjectOptions
from store.text import listed
from store.verify import total_bytes
from store.weights import all_saves, weights_only_saves

_PATIENCE = ObjectOptions(retry_seconds=15.0)  # shorter retries than a job's, because a user waits
_TRIES = 4  # attempts to read a store that changes meanwhile


def open_store(root: Path, options: ObjectOptions | None = _PATIENCE) -> Catalog:
    """Open the catalog of the store at ``root``; ``options`` are those of a bucket.

    Raises NoStoreError if there is no store, NothingToResumeError if its head record is damaged."""
    if not root.is_dir() and not is_url(root):
        found = "is a file" if root.exists() else "does not exist"
        raise NoStoreError(f"{root.absolute()} {found}: give the directory of a store (`store:` in the job's YAML)")
    try:
        return open_catalog(files_at(root, options))
    except NoStoreError as error:
        places = () if is_url(root) else (*sorted(root.glob(f"*/{STORE}"))[:1], root.absolute().parent / STORE)
        nearby = next((f"; there is one in {place.parent}" for place in places if place.is_file()), "")
        raise NoStoreError(f"{error}{nearby}") from error
    except DamagedError as error:
        text = f"{error}; the store cannot be read without it: run `driftpoint doctor --repair {root}`"
        raise NothingToResumeError(text) from error


def find_save(catalog: Catalog, wanted: str) -> SaveId:
    """Find a commit by step number (in the newest epoch that has it) or by save name.

    Raises UsageError if there is no such commit, NothingToResumeError if the store has no commit yet."""
    saves = all_saves(catalog)
    if not saves:
        raise NothingToResumeError("the store holds no commit yet")
    step = int(wanted) if wanted.isascii() and wanted.isdigit() else None
    found = next((save for save in saves if (save.name == wanted if step is None else save.step == step)), None)
    if found is None:
        existing = listed((save.name for save in saves), 5, rest="older ones")
        raise UsageError(f"there is no commit {wanted!r}; there is {existing}")
    return found


def lock_owner(root: Path) -> int | None:
    """Return the process id that uses the store on this machine, 0 if unknown, None if unused or in a bucket."""
    return None if is_url(root) else lock_holder(root)


def lock_owner_text(root: Path, pid: int | None) -> str:
    """Describe the process that uses the store."""
    if is_url(root):
        return "unknown: an object store has no locks; see the newest epoch"
    if pid is not None:
        return f"by process {pid} on this machine" if pid > 0 else "by another process"
    lock = root / LOCK
    if lock.exists() and not os.access(lock, os.R_OK | os.W_OK):
        return f"unknown: this user cannot open {LOCK}"
    return "by no process on this machine"


def resume_step(catalog: Catalog, resolution: Resolution) -> int:
    """Return the step at which a job resumes by default (``resume: {at: effective}``).

    Only the resume itself checks that the run state of that step is valid and fits the job."""
    for save, record in run_saves(resolution, certify(resolution).effective_step).items():
        if not catalog.group(save, record).problems:
            return save.step
    return resolution.manifest.step


def parameters(manifest: ManifestRecord) -> int:
    """Return the model's number of parameters. Tied ones count once, buffers not at all."""
    return sum(math.prod(tensor.shape) for tensor in manifest.tensors.values() if tensor.kind != "buffer")


def model_text(manifest: ManifestRecord) -> str:
    """Describe the model and the job that saved it."""
    return (
        f"{plural(len(manifest.layers), 'layer')}, {count_text(parameters(manifest))} parameters; "
        f"{manifest.framework} on {plural(manifest.world_size, 'rank')}, policy {manifest.policy}"
    )


@dataclass(frozen=True)
class Resume(Certificate):
    """The certificate of the commit that a resume would take now."""

    goes_on_at: int = 0
    journal: int | None = None  # step that the journal leads to from there
    fallbacks: tuple[str, ...] = ()
    proven: bool = False


def resume_kind(found: Certificate) -> str:
    """Describe what a resume gives: exact, as found, or why it is neither."""
    if found.as_found:
        return AS_FOUND
    how = kind_text(exact=found.exact, max_staleness=found.max_staleness, max_drift=found.max_drift, lossy=found.lossy)
    fresh = not (found.exact or found.max_staleness > 0 or found.lossy)
    if problem := next((text for text in found.problems if fresh or text.startswith(FOUND)), None):
        return f"not exact: {printable(problem)}" if fresh else f"{how}; {printable(problem)}"
    return how


def is_resumable(catalog: Catalog, *, without: SaveId | None = None) -> bool:
    """Return whether a job can resume from any commit, or from any but ``without``."""
    with suppress(NothingToResumeError):
        newest_resumable(catalog, skip=set() if without is None else {without})
        return True
    return False


@dataclass(frozen=True)
class StoreStatus:
    """Summary of a store."""

    root: Path
    store_id: str
    saves: tuple[SaveId, ...]
    suspects: tuple[SaveId, ...]  # among ``saves`` and ``weights_only``
    newest: ManifestRecord | None
    epoch: int
    owner: EpochRecord | None
    in_use_by: int | None
    size_bytes: int
    resume: Resume | None
    problems: tuple[str, ...]
    resumed: ManifestRecord | None = None
    weights_only: tuple[SaveId, ...] = ()  # of deleted commits

    @property
    def exit_code(self) -> int:
        return health(resumable=self.resume is not None, damaged=bool(self.problems))


def store_status(catalog: Catalog, root: Path, *, counted: bool = True) -> StoreStatus:
    """Summarise the store at ``root``; with ``counted``, add up the bytes of its files.

    Reads again if a running job pruned commits meanwhile, so that these are not reported as damage."""
    for _ in range(_TRIES):
        before, found = catalog.saves(), _read_status(catalog, root, counted=counted)
        if not found.problems or catalog.saves() == before:
            break
        catalog.forget()
    return found


def _read_status(catalog: Catalog, root: Path, *, counted: bool) -> StoreStatus:
    problems: list[str] = []
    resume, resumed = _resume(catalog, problems)
    newest, epoch = _newest_readable(catalog, problems), newest_epoch(catalog.files)
    suspects, saves = catalog.suspects().saves, tuple(catalog.saves())
    weights_only = tuple(save for save in weights_only_saves(catalog.files) if save not in saves)
    return StoreStatus(
        root=root.absolute(),
        store_id=catalog.store_id,
        saves=saves,
        suspects=tuple(save for save in (*saves, *weights_only) if save in suspects),
        newest=newest,
        epoch=epoch,
        owner=epoch_owner(catalog, epoch, problems),
        in_use_by=lock_owner(root),
        # Listing a bucket's objects would take one request per thousand.
        size_bytes=(total_bytes(catalog) if is_url(root) else bytes_below(root)) if counted else 0,
        resume=resume,
        problems=tuple(dict.fromkeys(problems)),
        resumed=resumed,
        weights_only=weights_only,
    )


def written(manifest: ManifestRecord) -> int:
    """Return the payload bytes of a save's own segments."""
    group = manifest.groups.get(manifest.save.name)
    return 0 if group is None else group.payload_bytes


def commit_json(manifest: ManifestRecord) -> dict[str, Any]:
    """Return the fields of a commit that commands print with ``--json``."""
    names = ("step", "epoch", "created", "framework", "policy", "world_size", "bytes_avoided")
    return {
        **{name: getattr(manifest, name) for name in names},
        **{"save": manifest.save.name, "layers": len(manifest.layers), "parameters": parameters(manifest)},
        **{"commits_ever": manifest.commits, "bytes_written": written(manifest)},
    }


def _resume(catalog: Catalog, problems: list[str]) -> tuple[Resume, ManifestRecord] | tuple[None, None]:
    try:
        resolution, passed_over = newest_resumable(catalog)
    except NothingToResumeError as error:
        problems += [*catalog.lost(), *([str(error)] if catalog.saves() else [])]
        return None, None
    problems.extend(passed_over)
    problems.extend(resolution.problems)
    chain = chain_from(journal_catalog(catalog), resolution)
    resume = Resume(
        **vars(certify_stored(resolution)),
        goes_on_at=resume_step(catalog, resolution),
        journal=None if chain is None else chain.steps[-1].save.step,
        fallbacks=tuple(str(version.record.unit) for version in resolution.fallbacks),
        proven=resolution.manifest.save in catalog.proven(),
    )
    return resume, resolution.manifest


def _newest_readable(catalog: Catalog, problems: list[str]) -> ManifestRecord | None:
    newest = None
    for save in catalog.saves():
        try:
            newest = newest or catalog.manifest(save)
            catalog.manifest(save)
        except (DamagedError, StorageError) as error:
            if not any(str(error) in known for known in problems):
                problems.append(str(error))
    return newest


def epoch_owner(catalog: Catalog, epoch: int, problems: list[str]) -> EpochRecord | None:
    """Return who claimed an epoch; None for epoch 0, and for a record that cannot be read, which is in ``problems``."""
    if epoch == 0:
        return None
    try:
        return read_epoch(catalog.files, epoch)
    except (DamagedError, StorageError) as error:
        problems.append(str(error))
        return None


def bytes_below(root: Path, passed_over: type[OSError] = FileNotFoundError) -> int:
    """Return the bytes of all files, except those whose size raises ``passed_over``: a running job deletes some."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(passed_over):
                total += (Path(folder) / name).lstat().st_size
    return total
