"""``driftpoint status``: what is in a store, whether a job is using it, and what a resume would take.

Reads records only, no payload: quick on any store, and blind to bytes that rotted (that is ``verify``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from deploy.cli import output
from deploy.cli.door import goes_on_at, holder, holder_text, open_store, parameters
from deploy.cli.exit_codes import health
from deploy.cli.options import DebugOption, JsonOption, StoreArgument
from deploy.cli.text import count_text, going_on_text, kind_text, plural, size_text
from store.catalog import Catalog
from store.certificate import certify
from store.epochs import newest_epoch, read_epoch
from store.errors import DamagedError, NothingToResumeError, StorageError
from store.names import SaveId
from store.place import is_url
from store.schema import EpochRecord, ManifestRecord
from store.versions import newest_resumable


@dataclass(frozen=True)
class Resume:
    """What a resume would take now. effective_step: where its weights stand. goes_on_at: the step that a job goes on
    from, unless it is set to another. lossy: encodings that rounded values. fallbacks: units of an older version than
    committed."""

    save: str
    step: int
    effective_step: float
    goes_on_at: int
    exact: bool
    max_staleness: int
    max_drift: float | None
    lossy: tuple[str, ...]
    fallbacks: tuple[str, ...]
    proven: bool


@dataclass(frozen=True)
class StoreStatus:
    """All that the command tells. in_use_by: process id, 0 where it is not known, None where nobody is."""

    root: Path
    store_id: str
    saves: tuple[SaveId, ...]
    suspects: tuple[SaveId, ...]
    newest: ManifestRecord | None
    epoch: int
    owner: EpochRecord | None
    in_use_by: int | None
    size_bytes: int
    resume: Resume | None
    problems: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """See :func:`health`."""
        return health(resumable=self.resume is not None, damaged=bool(self.problems))


def status(store: StoreArgument, *, json: JsonOption = False, debug: DebugOption = False) -> None:
    """Show what is in a store, who is using it, and what a resume would take."""
    del debug
    found = look(store)
    output.answer(as_json(found), lambda console: draw(console, found), as_json=json)
    raise typer.Exit(found.exit_code)


def look(root: Path) -> StoreStatus:
    """The status of the store at ``root``. NoStoreError where there is none."""
    catalog = open_store(root)
    problems: list[str] = []
    resume = _resume(catalog, problems)
    newest = _newest_readable(catalog, problems)
    epoch = newest_epoch(catalog.files)
    return StoreStatus(
        root=root.absolute(),
        store_id=catalog.store_id,
        saves=tuple(catalog.saves()),
        suspects=tuple(save for save in catalog.saves() if save in catalog.suspects().saves),
        newest=newest,
        epoch=epoch,
        owner=_owner(catalog, epoch, problems),
        in_use_by=holder(root),
        size_bytes=_reached(catalog) if is_url(root) else _size(root),
        resume=resume,
        problems=tuple(dict.fromkeys(problems)),
    )


def as_json(found: StoreStatus) -> dict[str, Any]:
    """The JSON object of the command."""
    owner = found.owner
    return {
        "store": str(found.root),
        "store_id": found.store_id,
        "commits": [save.name for save in found.saves],
        "suspects": [save.name for save in found.suspects],
        "newest": None if found.newest is None else _newest_json(found.newest),
        "epoch": found.epoch,
        "owner": None if owner is None else {"host": owner.host, "pid": owner.pid, "started": owner.started},
        "in_use": found.in_use_by is not None,
        "in_use_by": found.in_use_by or None,
        "size_bytes": found.size_bytes,
        "resume": None if found.resume is None else asdict(found.resume),
        "problems": list(found.problems),
    }


def draw(console: Console, found: StoreStatus) -> None:
    """The text of the command."""
    rows: dict[str, Text | str] = {"Store": str(found.root), "Identity": found.store_id, "Commits": _commits(found)}
    if found.newest is not None:
        rows["Newest"] = _newest(found.newest)
        rows["Model"] = _model(found.newest)
    rows["Epochs"] = _epochs(found)
    rows["In use"] = holder_text(found.root, found.in_use_by)
    rows["Size"] = size_text(found.size_bytes)
    rows["Resume"] = _resume_text(found)
    console.print(output.facts(rows))
    output.problems(console, found.problems)


def _resume(catalog: Catalog, problems: list[str]) -> Resume | None:
    try:
        resolution, passed_over = newest_resumable(catalog)
    except NothingToResumeError as error:
        if catalog.saves():
            problems.append(str(error))
        return None
    problems.extend(passed_over)
    problems.extend(resolution.problems)
    certificate = certify(resolution)
    return Resume(
        save=certificate.save,
        step=certificate.step,
        effective_step=certificate.effective_step,
        goes_on_at=goes_on_at(catalog, resolution),
        exact=certificate.exact,
        max_staleness=certificate.max_staleness,
        max_drift=certificate.max_drift,
        lossy=certificate.lossy,
        fallbacks=tuple(str(version.record.unit) for version in resolution.fallbacks),
        proven=resolution.manifest.save in catalog.proven(),
    )


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


def _owner(catalog: Catalog, epoch: int, problems: list[str]) -> EpochRecord | None:
    if epoch == 0:
        return None
    try:
        return read_epoch(catalog.files, epoch)
    except (DamagedError, StorageError) as error:
        problems.append(str(error))
        return None


def _size(root: Path) -> int:
    """Bytes of all files. What a running job deletes meanwhile is not counted."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += (Path(folder) / name).lstat().st_size
            except FileNotFoundError:
                continue
    return total


def _reached(catalog: Catalog) -> int:
    """Payload bytes of all commits: in a bucket, looking at every object would take a request for a thousand."""
    groups = {}
    for save in catalog.saves():
        with suppress(DamagedError, StorageError):
            groups.update(catalog.manifest(save).groups)
    return sum(record.payload_bytes for record in groups.values())


def _newest_json(manifest: ManifestRecord) -> Mapping[str, Any]:
    return {
        "save": manifest.save.name,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "created": manifest.created,
        "framework": manifest.framework,
        "policy": manifest.policy,
        "world_size": manifest.world_size,
        "layers": len(manifest.layers),
        "parameters": parameters(manifest),
        "commits_ever": manifest.commits,
        "bytes_written": _written(manifest),
        "bytes_avoided": manifest.bytes_avoided,
    }


def _written(manifest: ManifestRecord) -> int:
    own = manifest.groups.get(manifest.save.name)
    return 0 if own is None else own.payload_bytes


def _commits(found: StoreStatus) -> str:
    if not found.saves:
        return "none yet"
    steps = [save.step for save in found.saves]
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {min(steps)} to {max(steps)}"
    ever = f"; {found.newest.commits} made so far" if found.newest and found.newest.commits > len(steps) else ""
    suspect = f"; suspect: {', '.join(save.name for save in found.suspects)}" if found.suspects else ""
    return f"{len(steps)}, {span}{ever}{suspect}"


def _newest(manifest: ManifestRecord) -> str:
    avoided = f", {size_text(manifest.bytes_avoided)} avoided" if manifest.bytes_avoided else ""
    return (
        f"{manifest.save}: step {manifest.step}, epoch {manifest.epoch}, {manifest.created}; "
        f"wrote {size_text(_written(manifest))}{avoided}"
    )


def _model(manifest: ManifestRecord) -> str:
    return (
        f"{plural(len(manifest.layers), 'layer')}, {count_text(parameters(manifest))} parameters; "
        f"{manifest.framework} on {plural(manifest.world_size, 'rank')}, policy {manifest.policy}"
    )


def _epochs(found: StoreStatus) -> str:
    if found.epoch == 0:
        return "none yet"
    if found.owner is None:
        return f"{found.epoch}; the record of the newest cannot be read"
    owner = found.owner
    return f"{found.epoch}; the newest is of process {owner.pid} on {owner.host}, {owner.started}"


def _resume_text(found: StoreStatus) -> Text:
    resume = found.resume
    if resume is None:
        return Text("impossible" if found.saves else "nothing to resume yet", style="bold red")
    kind = kind_text(
        exact=resume.exact, max_staleness=resume.max_staleness, max_drift=resume.max_drift, lossy=resume.lossy
    )
    text = f"from step {resume.step}, {kind}"
    if going_on := going_on_text(resume.step, resume.goes_on_at, resume.effective_step):
        text += f"; {going_on}"
    if resume.fallbacks:
        text += f"; {plural(len(resume.fallbacks), 'unit')} in an older version, because of damage"
    if resume.proven:
        text += "; a job resumed from it before"
    return Text(text, style="yellow" if found.problems else "green")
