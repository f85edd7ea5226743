"""From a store to its report: everything read, judged and laid out, whatever state the store is in."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deploy.cli.door import open_store
from deploy.cli.progress import byte_progress, watched
from deploy.report.history import History, read_history
from deploy.report.incidents import Incident
from deploy.report.page import Content, render
from deploy.safety.check import typed
from deploy.safety.disk import disk_of
from deploy.safety.facts import Checked, Facts, by_daemon, by_verify, gather, moment
from deploy.safety.memory import in_memory
from deploy.safety.verdict import judge
from store.catalog import Catalog
from store.errors import DamagedError, NothingToResumeError, StorageError, UsageError
from store.memory.rescue import REASON
from store.place import beside, store_place
from store.verify import total_bytes
from store.verify import verify as verify_store

_LISTED = 8
"""Texts of damage on a page."""


@dataclass(frozen=True)
class Made:
    """A report that is not written yet."""

    content: Content

    @property
    def exit_code(self) -> int:
        """As ``status`` has it; damage that reading found counts, too."""
        facts = self.content.facts
        if facts.status is None:
            return NothingToResumeError.exit_code
        found = facts.status.exit_code
        hurt = facts.checked is not None and bool(facts.checked.damaged or facts.checked.problems)
        return DamagedError.exit_code if found == 0 and hurt else found

    def write(self, path: Path) -> None:
        """Under its name at once. StorageError where it cannot be."""
        data = render(self.content).encode("utf-8", "backslashreplace")
        try:
            with tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=path.name, delete=False) as file:
                file.write(data)
            try:
                Path(file.name).chmod(0o644)
                Path(file.name).replace(path)
            except OSError:
                with suppress(OSError):
                    Path(file.name).unlink()
                raise
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}; name another file with --out") from error


def trace_path(root: Path, given: Path | None) -> Path:
    """Where the trace of a store's job is, unless it was set elsewhere."""
    return given or beside(store_place(root), ".trace.jsonl")


def make(root: Path, trace: Path | None, memory: Path, *, verify: bool, clock: Callable[[], float] = time.time) -> Made:
    """The report of the store at ``root``. NoStoreError where there is none; UsageError for a trace that was named and
    cannot be read."""
    path = trace_path(root, trace)
    try:
        return _made(open_store(root), root, path, memory, named=trace is not None, verify=verify, clock=clock)
    except (NothingToResumeError, DamagedError) as error:
        history, missing = _history(path, named=trace is not None)
        pulse = None if history is None else history.pulse
        facts = Facts(clock(), root.absolute(), None, str(error), disk=disk_of(root), trace=path, pulse=pulse)
        return Made(_content(facts, history, missing, list(_of_history(history))))


def _made(
    catalog: Catalog, root: Path, path: Path, memory: Path, *, named: bool, verify: bool, clock: Callable[[], float]
) -> Made:
    # What takes long comes first, so that what is told as now is of one moment.
    checked = _verified(catalog) if verify else by_daemon(memory, catalog.store_id)
    history, missing = _history(path, named=named)
    pulse = None if history is None else history.pulse
    catalog.forget()
    facts = gather(catalog, root, in_memory(memory, catalog), pulse, clock(), trace=path, checked=checked)
    if facts.strange:
        history, missing = None, _strange(path)
    return Made(_content(facts, history, missing, [*_of_store(catalog, facts), *_of_history(history)]))


def _content(facts: Facts, history: History | None, missing: str, incidents: list[Incident]) -> Content:
    return Content(facts, judge(facts), history, incidents, missing, _version())


def _history(path: Path, *, named: bool) -> tuple[History | None, str]:
    try:
        with byte_progress("Reading the trace", path.stat().st_size) as progress:
            history = read_history(path, progress=progress)
    except OSError as error:
        if named:
            raise UsageError(f"cannot read the trace {path}: {error.strerror}") from error
        return None, (
            f"There is no drift trace at {path} ({error.strerror}), so how far the job is, drift over time, what was "
            "saved when and what it cost are not known. Jobs write one unless `trace: {enabled: false}` is set; where "
            "`trace: {path: ...}` is set, name that file with --trace."
        )
    if not history.totals.decisions:
        return None, f"The drift trace {path} holds no decision yet: let the job run on."
    return history, ""


def _strange(path: Path) -> str:
    return (
        f"The drift trace {path} tells of an epoch that this store does not have: it is of another store, so nothing "
        "of it is shown. Name the right one with --trace."
    )


def _verified(catalog: Catalog) -> Checked:
    with byte_progress("Verifying", total_bytes(catalog) if watched() else 0) as progress:
        return by_verify(verify_store(catalog, progress))


def _of_history(history: History | None) -> Iterator[Incident]:
    if history is not None:
        yield from history.incidents


def _of_store(catalog: Catalog, facts: Facts) -> Iterator[Incident]:
    """What only the store knows: damage, suspects, and commits that were written out of memory."""
    assert facts.status is not None
    damage = dict.fromkeys((*facts.status.problems, *(() if facts.checked is None else facts.checked.problems)))
    for text in list(damage)[:_LISTED]:
        yield Incident("damage", "bad", text)
    if len(damage) > _LISTED:
        listing = typed("verify --json" if facts.checked is not None else "status --json", facts.root)
        yield Incident("damage", "bad", f"and {len(damage) - _LISTED} more: {listing} lists all")
    for save, why in catalog.suspects().why.items():
        yield Incident("suspect", "look", f"jobs that resumed from it died: {why}", save.step)
    for save in facts.status.saves:
        try:
            manifest = catalog.manifest(save)
        except (DamagedError, StorageError):
            continue  # told above
        if any(unit.save == save.name and unit.reason == REASON for unit in manifest.units):
            yield Incident("rescued", "look", REASON, save.step, moment(manifest.created))


def _version() -> str:
    try:
        return version("driftpoint")
    except PackageNotFoundError:
        return "(from source)"
