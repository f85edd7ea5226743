"""Testing the tests of encodings and bases: each safeguard taken out in turn must be caught, by the layer named.

BASES prunes a store of differences. BASED flips bytes of a difference and of its bases. WRONG BASE names another base
than the one used. CHAIN reads a store whose manifests list only the nearest bases. ALL BASES checks that manifests list
all of them. CONTAINER opens payloads with another reader. LATE HEADER loses power. Each passes without the mutant.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from safetensors import SafetensorError, deserialize

import store.segment
from store.catalog import Catalog, open_catalog
from store.fragments import Source, StoredBytes
from store.names import SaveId, Unit, manifest_path, payload_path
from store.resolve import base_key, newest_resumable
from store.retention import execute, plan_prune
from store.schema import Entry, PartRecord, digest
from store.segment import Item, Payload, PayloadPiece, read_part
from store.storage.atomic import write_new
from store.storage.local import Files, NewFile
from store.verify import verify
from tests.crash.checker import assert_true_to_write, check_reading, check_undamaged, promised, read_newest
from tests.crash.damage import flip, remove
from tests.crash.models import RANKS, VARIED
from tests.crash.simulated import SimulatedFiles, every_crash
from tests.crash.test_mutants import Make, caught, patched_everywhere
from tests.crash.workload import RETENTION, Job, Memory

pytestmark = pytest.mark.slow


class Varied(Job):
    """Stores in every encoding; ``saves`` of them, each of all units."""

    def __init__(self, files: Files, journal: Memory, saves: int = 0) -> None:
        super().__init__(files, journal, VARIED)
        self.saves = [self.save(everything=True) for _ in range(saves)]


def bases(make: Make = SimulatedFiles) -> None:
    """BASES: what kept commits rest on is older than the oldest of them."""
    files, journal = make(), Memory()
    job = Varied(files, journal, saves=4)
    journal.note("dropping", saves=[job.saves[1].name])
    remove(files, manifest_path(job.saves[1]))  # else this commit would keep what the last one rests on
    plan = plan_prune(open_catalog(files), RETENTION)
    # The first commit stays, as it rests on no base of the last.
    assert [plan.groups, plan.manifests] == [(), ()]
    journal.note("dropping", saves=[save.name for save in plan.manifests])
    execute(files, plan)
    check_reading(files, promised(journal.events))
    check_undamaged(files)
    for _ in range(3):
        job.save(everything=True)
    job.prune()
    assert job.saves[1].name not in files.list_dir("segments"), "nothing rests on it any more"
    check_reading(files, promised(journal.events))


def based(make: Make = SimulatedFiles) -> None:
    """BASED: a byte of a fragment, and one of its base; each is found and costs that unit alone."""
    job = Varied(make(), Memory(), saves=4)
    for save, wanted in pairwise(reversed(job.saves)):
        part = read_part(job.files, job.catalog.store_id, save, 1)
        for entry in part.entries:
            hurt = SimulatedFiles(job.files.disk.copied())
            flip(hurt, payload_path(save, 1), part.header_bytes + entry.offset + entry.nbytes - 1)
            reading = read_newest(open_catalog(hurt))
            assert_true_to_write(reading)
            assert reading.versions == {
                unit: wanted if unit == entry.unit else job.saves[3] for unit in VARIED.units
            }, entry
            report = verify(open_catalog(hurt))
            assert not report.ok
            assert report.resumable == job.saves[3]


def wrong_base(make: Make = SimulatedFiles) -> None:
    """WRONG BASE: every stored byte is as it was written, and yet nonsense."""

    class Confused(Varied):
        def base_named(self, unit: Unit) -> SaveId | None:
            return None if self.base_of(unit) is None else self.saves[0]

    job = Confused(make(), Memory())
    for _ in range(3):
        job.saves.append(job.save(everything=True))
    reading = read_newest(open_catalog(job.files))
    assert_true_to_write(reading)
    assert set(reading.versions.values()) == {job.saves[1]}
    report = verify(open_catalog(job.files))
    assert [commit.state for commit in report.commits] == ["fallback", "ok", "ok"]
    assert len(report.problems) == sum(
        len(read_part(job.files, job.catalog.store_id, job.saves[2], rank).entries) for rank in range(RANKS)
    )
    assert any("does not unpack" in problem for problem in report.problems)


class Forgetful(Varied):
    """Lists the nearest bases alone, and not those that they need in turn."""

    def bases_of(self, unit: Unit) -> tuple[str, ...]:
        return super().bases_of(unit)[:1]


def chain(make: Make = SimulatedFiles) -> None:
    """CHAIN: a difference to a difference, whose base is not listed, is refused before a byte is read."""
    job = Forgetful(make(), Memory(), saves=4)
    resolution, _ = newest_resumable(open_catalog(job.files))
    assert {version.save for version in resolution.versions.values()} == {job.saves[2]}
    assert "does not hold them" in resolution.problems[0]
    report = verify(open_catalog(job.files))
    assert [commit.state for commit in report.commits] == ["fallback", "ok", "ok", "ok"]
    assert_true_to_write(read_newest(open_catalog(job.files)))


def all_bases(make: Make = SimulatedFiles, kind: type[Varied] = Varied) -> None:
    """ALL BASES: what a job acknowledged is whole, all the way down."""
    files, journal = make(), Memory()
    kind(files, journal, saves=4)
    check_undamaged(files)
    check_reading(files, promised(journal.events))


def container(make: Make = SimulatedFiles) -> None:
    """CONTAINER: any reader of safetensors finds every entry's bytes, packed ones too."""
    job = Varied(make(), Memory(), saves=3)
    for save in job.saves:
        for rank in range(RANKS):
            part = read_part(job.files, job.catalog.store_id, save, rank)
            whole = job.files.read(payload_path(save, rank), 1 << 20)
            try:
                found = dict(deserialize(whole))
            except SafetensorError as error:
                raise AssertionError(f"{error}: {payload_path(save, rank)}") from error
            for entry in part.entries:
                start = part.header_bytes + entry.offset
                data = found[f"{entry.fqn}/{entry.slot}/{entry.start}"]["data"]
                assert data == whole[start : start + entry.nbytes]


def late_header(make: Make = SimulatedFiles) -> None:
    """LATE HEADER: the power goes right after a save whose headers were written last."""
    files, journal = make(), Memory()
    Varied(files, journal, saves=1)
    check_undamaged(files)
    for disk in every_crash(files.disk, 4):
        check_undamaged(SimulatedFiles(disk))
        check_reading(SimulatedFiles(disk), promised(journal.events))


LAYERS = {
    "BASES": bases,
    "BASED": based,
    "WRONG BASE": wrong_base,
    "CHAIN": chain,
    "ALL BASES": all_bases,
    "CONTAINER": container,
    "LATE HEADER": late_header,
}


@pytest.mark.parametrize("layer", LAYERS)
def test_without_a_mutant_each_layer_is_content(layer: str) -> None:
    LAYERS[layer]()


class HeaderAfterSync(SimulatedFiles):
    """The header over the room that was left for it is written when the file was synced already."""

    def create(self, path: str) -> NewFile:
        file = super().create(path)
        write_at, sync, late = file.write_at, file.sync, []  # type: ignore[var-annotated]

        def sync_then_write() -> None:
            sync()
            for offset, data in late:
                write_at(offset, data)

        file.write_at = lambda offset, data: late.append((offset, bytes(data)))  # type: ignore[method-assign]
        file.sync = sync_then_write  # type: ignore[method-assign]
        return file


def test_a_header_written_after_the_fsync_is_caught() -> None:
    assert caught(late_header, HeaderAfterSync)


def header_first(
    files: Files, path: str, items: Sequence[Item], meanwhile: Callable[[], None] = lambda: None
) -> Payload:
    """The header written before the data is known: with the sizes that were only reserved."""
    header = store.segment._header(items, [item.nbytes for item in items], 0)
    found: list[tuple[int, str]] = []

    def fill(file: NewFile) -> None:
        file.write(header)
        found.extend(store.segment._stream(file, item) for item in items)
        meanwhile()

    write_new(files, path, fill)
    ends = list(itertools.accumulate(nbytes for nbytes, _ in found))
    placed = tuple(
        PayloadPiece(end - nbytes, nbytes, hashed) for end, (nbytes, hashed) in zip(ends, found, strict=True)
    )
    return Payload(len(header) + ends[-1], len(header), digest(header), placed)


def reached_without_bases(catalog: Catalog, save: SaveId) -> dict[SaveId, int]:
    """A prune that forgets bases."""
    manifest = catalog.manifest(save)
    reached = {manifest.save, *(unit.version for unit in manifest.units)}
    return {one: manifest.groups[one.name].payload_bytes for one in reached}


def nearest_base(part: PartRecord, entry: Entry, find: Callable[[Any], Any]) -> Source:
    """A base is taken for whole."""
    key = base_key(entry)
    return Source(part, entry, None if key is None else Source(*find(key)))


CODE_MUTANTS: dict[str, tuple[str, str, object]] = {
    "bases forgotten by a prune": ("BASES", "_groups_of", reached_without_bases),
    "hash of encoded bytes not checked": ("WRONG BASE", "check_encoded", lambda source, found: None),
    "a base taken for whole": ("CHAIN", "with_base", nearest_base),
    "header written before the data is known": ("CONTAINER", "write_payload", header_first),
}


@pytest.mark.parametrize("mutant", CODE_MUTANTS)
def test_a_dropped_safeguard_is_caught(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    layer, name, replacement = CODE_MUTANTS[mutant]
    patched_everywhere(monkeypatch, name, replacement)
    assert caught(LAYERS[layer]), f"{mutant} survives {layer}"


def test_a_job_that_forgets_what_bases_need_is_caught() -> None:
    assert caught(partial(all_bases, kind=Forgetful))


def test_stored_bytes_that_nobody_checks_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash of stored bytes dropped where fragments are decoded: an unpacked one has no other."""
    monkeypatch.setattr(StoredBytes, "check", lambda self: None)
    assert caught(based)
