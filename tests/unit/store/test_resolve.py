from __future__ import annotations

import pytest

from store.catalog import open_catalog
from store.certificate import certify
from store.errors import DamagedError, NothingToResumeError, StorageError
from store.names import SaveId, Unit, manifest_path, part_path, payload_path
from store.resolve import RejectedVersion, newest_resumable, resolve
from store.segment import read_part
from tests.crash.checker import assert_true_to_write, read_commit, read_newest
from tests.crash.damage import edit, flip, forge, put, remove
from tests.crash.models import PLAIN, RANKS, content
from tests.crash.simulated import Fault, SimulatedFiles
from tests.crash.workload import Job, Memory


@pytest.fixture
def saves(job: Job) -> list[SaveId]:
    """Four commits: one full, three composites."""
    return [job.save() for _ in range(4)]


def place(job: Job, save: SaveId, unit: Unit, rank: int) -> tuple[str, int]:
    """(payload path, offset in the file) of the first stored byte of a unit."""
    part = read_part(job.files, job.catalog.store_id, save, rank)
    entry = next(entry for entry in part.entries if entry.unit == unit)
    return payload_path(save, rank), part.header_bytes + entry.offset


def test_a_composite_takes_each_unit_from_its_own_save(job: Job, saves: list[SaveId]) -> None:
    resolution, passed_over = newest_resumable(open_catalog(job.files))
    assert passed_over == ()
    assert resolution.problems == ()
    assert resolution.fallbacks == ()
    assert {version.save for version in resolution.versions.values()} == set(saves[2:])
    assert sorted(resolution.run_parts) == list(range(RANKS))
    assert_true_to_write(read_newest(open_catalog(job.files)))


def test_one_bad_unit_falls_back_to_its_own_previous_version(job: Job, saves: list[SaveId]) -> None:
    """Self-healing: one corrupt layer falls back, not the whole checkpoint."""
    catalog = open_catalog(job.files)
    healthy = read_newest(catalog)
    hurt = next(unit for unit, save in healthy.versions.items() if save == saves[3])
    flip(job.files, *place(job, saves[3], hurt, 1))
    reading = read_newest(open_catalog(job.files))
    assert reading.save == saves[3]
    assert reading.versions == {**healthy.versions, hurt: saves[1]}
    assert any(str(hurt) in problem for problem in reading.reported)
    assert_true_to_write(reading)
    with pytest.raises(DamagedError):
        read_commit(open_catalog(job.files), saves[3])


def test_a_fallback_is_certified_as_what_it_is(job: Job, saves: list[SaveId]) -> None:
    catalog = open_catalog(job.files)
    unit = next(u for u, v in resolve(catalog, saves[3]).versions.items() if v.save == saves[3])
    certificate = certify(resolve(catalog, saves[3], {RejectedVersion(saves[3], unit)}))
    found = next(u for u in certificate.units if (u.layer, u.slot) == (unit.layer, unit.slot))
    assert (found.fallback, found.step, found.staleness, found.drift) == (True, 20, 20, None)
    assert certificate.exact is False
    assert certificate.max_drift is None
    assert certificate.max_staleness == 20


def test_only_a_full_commit_is_exact(job: Job, saves: list[SaveId]) -> None:
    catalog = open_catalog(job.files)
    assert certify(resolve(catalog, saves[0])).exact is True
    assert certify(resolve(catalog, saves[1])).exact is False
    assert certify(resolve(catalog, saves[1])).max_staleness == 10


def test_a_unit_falls_back_version_by_version_until_there_is_none(job: Job, saves: list[SaveId]) -> None:
    unit = next(u for u, v in resolve(open_catalog(job.files), saves[3]).versions.items() if v.save == saves[3])
    flip(job.files, *place(job, saves[3], unit, 1))
    flip(job.files, *place(job, saves[1], unit, 1))
    reading = read_newest(open_catalog(job.files))
    assert (reading.save, reading.versions[unit]) == (saves[3], saves[0])
    assert_true_to_write(reading)
    flip(job.files, *place(job, saves[0], unit, 1))
    with pytest.raises(NothingToResumeError, match=str(unit)):
        read_newest(open_catalog(job.files))


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("kind", ["part", "payload"])
@pytest.mark.parametrize("harm", ["missing", "empty", "truncated", "zeroed", "longer"])
def test_a_hurt_file_of_the_newest_save(job: Job, saves: list[SaveId], rank: int, kind: str, harm: str) -> None:
    """The run state of every rank is in the newest group: without it the older manifest is taken."""
    path = (part_path if kind == "part" else payload_path)(saves[3], rank)
    hurt(job.files, path, harm)
    resolution, passed_over = newest_resumable(open_catalog(job.files))
    if (kind, harm) != ("payload", "zeroed"):  # that one is only seen when its bytes are read
        assert resolution.manifest.save == saves[2]
        assert str(saves[3]) in passed_over[0]
    reading = read_newest(open_catalog(job.files))
    assert reading.save == saves[2]
    assert reading.reported != ()
    assert_true_to_write(reading)


@pytest.mark.parametrize("harm", ["missing", "empty", "truncated", "zeroed", "longer"])
def test_a_hurt_manifest(job: Job, saves: list[SaveId], harm: str) -> None:
    hurt(job.files, manifest_path(saves[3]), harm)
    reading = read_newest(open_catalog(job.files))
    assert reading.save == saves[2]
    assert_true_to_write(reading)


def hurt(files: SimulatedFiles, path: str, harm: str) -> None:
    if harm == "missing":
        remove(files, path)
        return
    changes = {
        "empty": lambda data: b"",
        "truncated": lambda data: data[: len(data) // 2],
        "zeroed": lambda data: bytes(len(data)),
        "longer": lambda data: data + b"\0",
    }
    edit(files, path, changes[harm])


def test_a_damaged_run_state_takes_the_older_manifest(job: Job, saves: list[SaveId]) -> None:
    resolution, _ = newest_resumable(open_catalog(job.files), {RejectedVersion(saves[3])})
    assert resolution.manifest.save == saves[2]
    part = read_part(job.files, job.catalog.store_id, saves[3], 0)
    flip(job.files, payload_path(saves[3], 0), part.header_bytes + part.run_tensors[0].offset)
    reading = read_newest(open_catalog(job.files))
    assert reading.save == saves[2]
    assert_true_to_write(reading)


def test_an_old_part_that_is_gone_hurts_only_the_units_it_held(job: Job, saves: list[SaveId]) -> None:
    remove(job.files, part_path(saves[2], 0))
    reading = read_newest(open_catalog(job.files))
    assert reading.save == saves[3]
    assert set(reading.versions.values()) == {saves[3], saves[0]}
    assert_true_to_write(reading)


def test_a_rejected_commit_can_be_skipped(job: Job, saves: list[SaveId]) -> None:
    """Scenario 22: the newest commit loads but crashes the trainer."""
    catalog = open_catalog(job.files)
    assert newest_resumable(catalog, skip={saves[3], saves[2]})[0].manifest.save == saves[1]
    with pytest.raises(NothingToResumeError):
        newest_resumable(catalog, skip=set(saves))


def test_a_fallback_never_takes_what_lies_ahead(job: Job, saves: list[SaveId]) -> None:
    """The job went back to step 10 and on from there: what an abandoned branch saved later is not its past."""
    files = job.files
    for save in saves[1:]:
        put(files, f"aside-{save}", files.read(manifest_path(save), 1 << 20))
        remove(files, manifest_path(save))
    again = Job(files, Memory())
    committed = again.save()
    assert (committed.step, committed.epoch) == (20, 2)
    for save in saves[1:]:
        put(files, manifest_path(save), files.read(f"aside-{save}", 1 << 20))
    catalog = open_catalog(files)
    for unit in PLAIN.units:
        found = resolve(catalog, committed, {RejectedVersion(committed, unit)}).versions[unit]
        assert found.save in (committed, saves[0]), unit


def test_parts_of_another_decision_are_not_mixed_in(job: Job, saves: list[SaveId]) -> None:
    """A part that is valid in itself, but is not the one that was committed."""
    forge(job.files, part_path(saves[3], 0), lambda body: body.update(plan="1" * 32))
    reading = read_newest(open_catalog(job.files))
    assert reading.save == saves[2]
    assert_true_to_write(reading)


def test_files_of_another_rank_save_or_store_are_told_apart(job: Job, saves: list[SaveId]) -> None:
    files = job.files
    moves = {
        part_path(saves[3], 0): part_path(saves[3], 1),
        part_path(saves[3], 1): part_path(saves[1], 1),
        manifest_path(saves[3]): manifest_path(saves[2]),
    }
    for target, source in moves.items():
        fresh = SimulatedFiles(files.disk.copied())
        put(fresh, target, fresh.read(source, 1 << 20))
        reading = read_newest(open_catalog(fresh))
        assert reading.save == saves[2], target
        assert_true_to_write(reading)
    other = Job(SimulatedFiles(), Memory())
    foreign = other.save()
    put(files, manifest_path(SaveId(99, 1)), other.files.read(manifest_path(foreign), 1 << 20))
    assert read_newest(open_catalog(files)).save == saves[3]


def test_two_payloads_swapped_give_no_wrong_value(job: Job, saves: list[SaveId]) -> None:
    """Same sizes, same names: only the hashes tell them apart."""
    assert job.files.size(payload_path(saves[3], 0)) == job.files.size(payload_path(saves[1], 0))
    put(job.files, payload_path(saves[3], 0), job.files.read(payload_path(saves[1], 0), 1 << 20))
    reading = read_newest(open_catalog(job.files))
    assert reading.save == saves[2]
    assert_true_to_write(reading)


def test_refused_reads_are_not_remembered_as_damage(job: Job, saves: list[SaveId]) -> None:
    """An I/O error or too many open files now says nothing about the next time."""
    failing = Refusing(job.files, part_path(saves[3], 0))
    catalog = open_catalog(failing)
    assert newest_resumable(catalog)[0].manifest.save == saves[2]
    failing.path = ""
    assert newest_resumable(catalog)[0].manifest.save == saves[3]


class Refusing(SimulatedFiles):
    """Reads of one file fail as with an I/O error."""

    def __init__(self, files: SimulatedFiles, path: str) -> None:
        super().__init__(files.disk)
        self.path = path

    def read(self, path: str, limit: int) -> bytes:
        if path == self.path:
            raise StorageError(f"cannot read {path}: the device reported an I/O error")
        return super().read(path, limit)


def test_a_phantom_write_is_found_when_it_is_read(job: Job) -> None:
    """Scenario 6: the device said yes and wrote zeros."""
    first = job.save()
    job.files.faults = [Fault("write", nth=4, phantom=True, path="rank-00000.safetensors")]
    second = job.save()
    reading = read_newest(open_catalog(job.files))
    assert reading.save in (first, second)
    assert reading.reported != ()
    assert_true_to_write(reading)


def test_content_differs_between_versions() -> None:
    """Or else all of this would prove nothing."""
    values = [content("embed.weight", slot, SaveId(step, 1)) for slot in ("fp32", "exp_avg") for step in (10, 20)]
    assert len(set(values)) == 4
