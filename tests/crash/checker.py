"""What must hold after any fault, checked by reading the store as a resume would.

(a) every acknowledged commit that retention kept is there, with the bytes that were written for it;
(b) a resume gets a commit at least as new as the last acknowledged one;
(c) recovering twice changes nothing; (d) the next save succeeds, and so does the next prune.
After a crash of the job or the power also: nothing is damaged (:func:`check_undamaged`), because a final name
never shows what is not complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from store.catalog import Catalog, open_catalog
from store.errors import DamagedError, NothingToResumeError
from store.fragments import FragmentIndex, FragmentReader, Source
from store.names import RAW, Fragment, SaveId, Unit
from store.resolve import RejectedVersion, Resolution, Version, newest_resumable, resolve
from store.segment import read_leaves
from store.state_tree import decode
from store.storage.local import Files
from store.verify import verify
from tests.crash.models import PLAIN, RANKS, TENSORS, VARIED, Model, content
from tests.crash.workload import Job, Memory, run_state
from tests.support.entries import read_entry


@dataclass(frozen=True)
class Promise:
    """What the job was told: its acknowledged commits and marks, but those that it asked a prune to drop."""

    kept: Mapping[SaveId, Mapping[str, str]] = field(default_factory=dict)
    newest: SaveId | None = None
    proven: Set[SaveId] = frozenset()


def promised(events: Iterable[Mapping[str, Any]]) -> Promise:
    """From a journal. Asserts that retention keeps the two newest commits and the newest proven one."""
    kept: dict[SaveId, Mapping[str, str]] = {}
    proven: set[SaveId] = set()
    for event in events:
        if event["event"] == "acknowledged":
            kept[SaveId.parse(event["save"])] = event["units"]
        elif event["event"] == "proven":
            proven.add(SaveId.parse(event["save"]))
        elif event["event"] == "dropping":
            dropped = {SaveId.parse(name) for name in event["saves"]}
            sacred = set(sorted(kept)[-2:]) | set(sorted(proven & set(kept))[-1:])
            assert not dropped & sacred, f"prune drops {dropped & sacred}"
            kept = {save: units for save, units in kept.items() if save not in dropped}
    return Promise(kept, max(kept, default=None), proven & set(kept))


@dataclass(frozen=True)
class Reading:
    """All that a resume takes from the store. ``reported``: what it was told is wrong."""

    save: SaveId
    versions: Mapping[Unit, SaveId]
    tensors: Mapping[tuple[str, str], bytes]
    run_states: tuple[Any, ...]
    reported: tuple[str, ...]


class _Hit(Exception):
    def __init__(self, bad: RejectedVersion, why: str) -> None:
        self.bad = bad
        self.why = why


def read_newest(catalog: Catalog) -> Reading:
    """What a resume does: pick, read, and where bytes are bad pick again. NothingToResumeError where it cannot."""
    bad: dict[RejectedVersion, str] = {}
    while True:
        resolution, passed_over = newest_resumable(catalog, bad.keys())
        try:
            return _read(catalog, resolution, (*passed_over, *resolution.problems, *bad.values()))
        except _Hit as hit:
            assert hit.bad not in bad, hit.why
            bad[hit.bad] = hit.why


def read_commit(catalog: Catalog, save: SaveId) -> Reading:
    """One commit as it is. DamagedError where anything is wrong with it."""
    resolution = resolve(catalog, save)
    if resolution.problems:
        raise DamagedError(resolution.problems[0])
    try:
        return _read(catalog, resolution, ())
    except _Hit as hit:
        raise DamagedError(hit.why) from hit


def assert_true_to_write(reading: Reading) -> None:
    """Every value is the one that was written for the version it claims to be."""
    assert set(reading.tensors) == {(fqn, unit.slot) for unit in reading.versions for fqn in _names(unit)}
    for unit, version in reading.versions.items():
        for fqn in _names(unit):
            assert reading.tensors[fqn, unit.slot] == content(fqn, unit.slot, version), (unit, version)
    for rank in range(RANKS):
        assert_same_state(reading.run_states[rank], run_state(reading.save, rank))


def assert_same_state(found: Any, wanted: Any) -> None:
    """Equal, arrays and their dtypes included."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_same_state(found[key], wanted[key])
    elif isinstance(wanted, tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same_state(one, other)
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
    else:
        assert found == wanted


def check_reading(files: Files, promise: Promise) -> Reading | None:
    """(a) and (b). None where nothing was promised and there is nothing."""
    catalog = open_catalog(files) if promise.kept else _open_if_any(files)
    if catalog is None:
        return None
    for save, units in promise.kept.items():
        reading = read_commit(catalog, save)
        assert {str(unit): version.name for unit, version in reading.versions.items()} == units
        assert_true_to_write(reading)
    assert promise.proven <= catalog.proven()
    try:
        newest = read_newest(catalog)
    except NothingToResumeError:
        assert promise.newest is None
        return None
    assert promise.newest is None or newest.save >= promise.newest, (newest.save, promise.newest)
    assert_true_to_write(newest)
    return newest


def check_undamaged(files: Files) -> None:
    """Not one byte is wrong, and nothing hinders a prune."""
    catalog = _open_if_any(files)
    if catalog is not None:
        report = verify(catalog)
        assert report.ok, report


def check_goes_on(files: Files, journal: Memory | None = None) -> SaveId:
    """(d): a new incarnation resumes, saves and prunes, and the store is as good as ever."""
    journal = journal or Memory()
    job = Job(files, journal, _model_in(files))
    saved = job.save()
    job.prune()
    promise = promised(journal.events)
    newest = check_reading(files, promise)
    assert newest is not None
    assert newest.save == saved
    assert newest.reported == ()
    check_undamaged(files)
    return saved


def check(files: Files, promise: Promise) -> None:
    """(a) to (d) after a crash."""
    first = check_reading(files, promise)
    check_undamaged(files)
    second = check_reading(files, promise)
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert (first.save, first.versions, first.tensors) == (second.save, second.versions, second.tensors)
        assert first.reported == ()
    check_goes_on(files)


def _open_if_any(files: Files) -> Catalog | None:
    return open_catalog(files) if "STORE.json" in files.list_dir("") else None


def _model_in(files: Files) -> Model:
    """That of the job that made the store: the one whose tensors it has."""
    catalog = _open_if_any(files)
    saves = catalog.saves() if catalog is not None else []
    if catalog is None or not saves:
        return PLAIN
    return VARIED if set(catalog.manifest(saves[0]).tensors) == set(VARIED.tensors) else PLAIN


def _names(unit: Unit) -> list[str]:
    return [fqn for fqn, (layer, _) in TENSORS.items() if layer == unit.layer]


def _read(catalog: Catalog, resolution: Resolution, reported: tuple[str, ...]) -> Reading:
    tensors: dict[tuple[str, str], bytes] = {}
    for unit, version in resolution.versions.items():
        tensors.update(_read_unit(catalog, resolution, unit, version))
    try:
        states = tuple(
            decode(part.run_state, read_leaves(catalog.files, part), lambda leaf: leaf)
            for _, part in sorted(resolution.run_parts.items())
        )
    except DamagedError as error:
        raise _Hit(RejectedVersion(resolution.manifest.save), str(error)) from error
    versions = {unit: version.save for unit, version in resolution.versions.items()}
    return Reading(resolution.manifest.save, versions, tensors, states, reported)


def _read_unit(catalog: Catalog, resolution: Resolution, unit: Unit, version: Version) -> dict[tuple[str, str], bytes]:
    index = FragmentIndex(version.sources)
    found = {}
    for fqn, tensor in resolution.manifest.tensors.items():
        if tensor.layer != unit.layer:
            continue
        data = bytearray(4 * tensor.shape[0])
        for copy in index.cover(Fragment(fqn, unit.slot, 0, tensor.shape[0])):
            entry = _read_fragment(catalog, copy.source)
            start = 4 * copy.source_start
            data[4 * copy.target_start : 4 * (copy.target_start + copy.numel)] = entry[start : start + 4 * copy.numel]
        found[fqn, unit.slot] = bytes(data)
    return found


def _read_fragment(catalog: Catalog, source: Source) -> bytes:
    """As the readers of the project do: whole where it is stored as it is, else chunk by chunk."""
    part, entry = source.part, source.entry
    data, reader = bytearray(4 * entry.numel), FragmentReader(catalog.files, source)
    try:
        if (entry.encoding, entry.packing) == (RAW, None):
            read_entry(catalog.files, part, entry, memoryview(data))
            return data
        return b"".join(chunk.tobytes() for chunk in reader.chunks())
    except DamagedError as error:
        raise _Hit(RejectedVersion(reader.at_fault, entry.unit), str(error)) from error
