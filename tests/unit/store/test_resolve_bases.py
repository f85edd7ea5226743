"""Differences and what they rest on: found by their records, kept by a prune, and what their damage costs."""

from __future__ import annotations

from typing import Any

import pytest

from store.catalog import open_catalog
from store.commit import commit
from store.encoding.stream import EncodedEntry
from store.errors import DamagedError, NothingToResumeError, SaveError
from store.names import SaveId, Unit, part_path, payload_path, segment_dir
from store.resolve import RejectedVersion, resolve
from store.retention import Retention, execute, plan_prune
from store.schema import Entry
from store.segment import parts_digest, read_part
from store.verify import verify
from tests.crash.checker import assert_true_to_write, check_undamaged, read_commit, read_newest
from tests.crash.damage import flip, forge, remove
from tests.crash.models import RANKS, VARIED
from tests.crash.simulated import SimulatedFiles
from tests.crash.workload import Job, Memory, Save

ONE = Retention(keep_last=1, log_spaced=False)
BF16, SQRT = Unit("few.0", "fp32"), Unit("few.0", "exp_avg_sq")


@pytest.fixture
def job(files: SimulatedFiles) -> Job:
    """A small job that stores units whole, whole, as the difference to that, and as the difference to this one."""
    return Job(files, Memory(), VARIED)


@pytest.fixture
def saves(job: Job) -> list[SaveId]:
    """Four full commits: two whole, two of differences, each to the one before."""
    return [job.save(everything=True) for _ in range(4)]


def entry_of(job: Job, save: SaveId, unit: Unit, rank: int = 0, fqn: str | None = None) -> tuple[str, int, Entry]:
    """(payload path, offset of its last byte in the file, entry)."""
    part = read_part(job.files, job.catalog.store_id, save, rank)
    found = next(entry for entry in part.entries if entry.unit == unit and fqn in (None, entry.fqn))
    return payload_path(save, rank), part.header_bytes + found.offset + found.nbytes - 1, found


def hurt(job: Job, save: SaveId, unit: Unit, rank: int = 0, fqn: str | None = None) -> None:
    path, at, _ = entry_of(job, save, unit, rank, fqn)
    flip(job.files, path, at)


def versions(job: Job) -> dict[Unit, SaveId]:
    """What a resume takes; checked to be what was written, to be told, and to be what verify says."""
    reading = read_newest(open_catalog(job.files))
    assert_true_to_write(reading)
    report = verify(open_catalog(job.files))
    assert report.resumable == reading.save
    assert (reading.reported == ()) == (report.commits[0].state == "ok")
    return dict(reading.versions)


def prune(job: Job, retention: Retention = ONE) -> list[str]:
    """The groups that are left."""
    execute(job.files, plan_prune(open_catalog(job.files), retention))
    check_undamaged(job.files)
    return job.files.list_dir("segments")


def test_records_say_what_rests_on_what(job: Job, saves: list[SaveId]) -> None:
    resolution = resolve(open_catalog(job.files), saves[3])
    assert resolution.problems == ()
    assert {unit.bases for unit in resolution.manifest.units} == {(saves[2].name, saves[1].name)}
    assert set(resolution.manifest.groups) == {save.name for save in saves[1:]}
    for source in resolution.sources():
        assert [one.part.save for one in source.chain()] == [saves[3], saves[2], saves[1]]
        assert {one.entry.fragment for one in source.chain()} == {source.entry.fragment}


def test_a_prune_keeps_a_base_as_long_as_a_kept_commit_rests_on_it(job: Job, saves: list[SaveId]) -> None:
    assert prune(job) == [save.name for save in saves]  # the first: it rests on no base of the last
    whole = job.save(everything=True)
    assert_true_to_write(read_commit(open_catalog(job.files), whole))
    two = Retention(keep_last=2, log_spaced=False)
    assert prune(job, two) == [*(save.name for save in saves[1:]), whole.name]
    assert prune(job) == [whole.name]


def test_a_base_stays_while_one_unit_of_many_rests_on_it(job: Job, saves: list[SaveId]) -> None:
    """Units in turn: half of them are stored whole again, the others are still differences."""
    fifth = job.save()
    assert prune(job) == [*(save.name for save in saves), fifth.name]
    sixth = job.save()
    assert prune(job) == [fifth.name, sixth.name]


def test_a_base_of_the_proven_commit_stays(job: Job, saves: list[SaveId]) -> None:
    job.prove()
    later = [job.save(everything=True) for _ in range(3)]
    assert prune(job) == [save.name for save in (*saves[1:], *later)]
    assert_true_to_write(read_commit(open_catalog(job.files), saves[3]))


def test_a_difference_that_no_commit_needs_may_lose_its_base(job: Job) -> None:
    """A group stays for one unit's sake; its other units are superseded, and what they rested on is gone."""
    alone, others = (SQRT,), tuple(unit for unit in VARIED.units if unit != SQRT)
    units = [VARIED.units, VARIED.units, alone, alone, VARIED.units, others, others]
    saves = [save_some(job, chosen) for chosen in units]
    assert prune(job) == [saves[4].name, saves[6].name]
    part = read_part(job.files, job.catalog.store_id, saves[4], 0)
    assert {entry.base for entry in part.entries if entry.unit != SQRT} == {saves[1].name}
    hurt(job, saves[4], BF16)
    report = verify(open_catalog(job.files))
    assert len(report.problems) == 1, "its stored bytes are looked at all the same"
    assert [commit.state for commit in report.commits] == ["ok"]


def save_some(job: Job, units: tuple[Unit, ...]) -> SaveId:
    step = job.last.step + 10 if job.last is not None else 10
    save = Save(SaveId(step, job.epoch), units)
    for rank in range(RANKS):
        job.write(save, rank)
    job.commit(save)
    return save.id


def test_a_damaged_base_costs_exactly_the_units_that_rest_on_it(job: Job, saves: list[SaveId]) -> None:
    """The third commit rests on it, too: the version before it is the first."""
    hurt(job, saves[1], SQRT, rank=1)
    assert versions(job) == {unit: saves[0] if unit == SQRT else saves[3] for unit in VARIED.units}
    states = {commit.save: commit.state for commit in verify(open_catalog(job.files)).commits}
    assert states == {saves[0]: "ok", saves[1]: "fallback", saves[2]: "fallback", saves[3]: "fallback"}


def test_a_damaged_difference_costs_itself(job: Job, saves: list[SaveId]) -> None:
    hurt(job, saves[3], SQRT)
    assert versions(job) == {unit: saves[2] if unit == SQRT else saves[3] for unit in VARIED.units}


def test_a_unit_that_was_stored_whole_since_does_not_mind(job: Job, saves: list[SaveId]) -> None:
    fifth = job.save()  # half of the units, whole
    anew = {unit for unit, save in versions(job).items() if save == fifth}
    for unit in VARIED.units:
        hurt(job, saves[1], unit)
    assert versions(job) == {unit: fifth if unit in anew else saves[0] for unit in VARIED.units}


def test_a_version_in_an_older_manifest_falls_back_from_there(job: Job) -> None:
    """Units in turn, so the newest commit takes half of them from the one before, and their bases are older still."""
    saves = [job.save() for _ in range(6)]  # 1: all; 2, 4, 6: one half; 3, 5: the other; 4 and 5 are differences
    healthy = versions(job)
    older = [unit for unit, save in healthy.items() if save == saves[4]]
    assert len(older) == 3
    assert {base for unit in resolve(open_catalog(job.files), saves[5]).manifest.units for base in unit.bases} == {
        saves[1].name,
        saves[2].name,
        saves[3].name,
    }
    hurt(job, saves[2], older[0])
    assert versions(job) == {**healthy, older[0]: saves[0]}


def test_without_an_older_version_there_is_nothing_to_resume(job: Job, saves: list[SaveId]) -> None:
    hurt(job, saves[1], SQRT)
    hurt(job, saves[0], SQRT)
    with pytest.raises(NothingToResumeError, match=str(SQRT)):
        read_newest(open_catalog(job.files))
    assert verify(open_catalog(job.files)).resumable is None


@pytest.mark.parametrize("what", ["group", "part", "payload"])
def test_a_base_that_is_gone(job: Job, saves: list[SaveId], what: str) -> None:
    """Seen from the records alone, before a byte is read. What one rank's part held is no use without the other."""
    paths = {"part": part_path(saves[1], 1), "payload": payload_path(saves[1], 1)}
    if what == "group":
        for name in job.files.list_dir(segment_dir(saves[1])):
            remove(job.files, f"{segment_dir(saves[1])}/{name}")
        job.files.remove_dir(segment_dir(saves[1]))
    else:
        remove(job.files, paths[what])
    resolution = resolve(open_catalog(job.files), saves[3])
    assert {version.save for version in resolution.versions.values()} == {saves[0]}
    assert any(str(saves[1]) in problem for problem in resolution.problems)
    assert set(versions(job).values()) == {saves[0]}


PACKED = {"packing": "planes", "encoded_xxh3_128": "0" * 32}
UNFIT: dict[str, dict[str, Any]] = {
    "another start": {"start": 1},
    "another length": {"numel": 99, **PACKED},
    "another dtype": {"dtype": "I32", "encoding": "raw", **PACKED},
    "another encoding": {"encoding": "raw", **PACKED},
    "a base of its own": {"base": "00000010-000001", **PACKED},
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_cannot_be_a_base_is_refused(job: Job, saves: list[SaveId], what: str) -> None:
    """Other bounds, another dtype or encoding, or a difference itself. The commit names the part as it is."""

    def change(body: dict[str, Any]) -> None:
        for entry in body["entries"]:
            if (entry["fqn"], entry["slot"]) == ("few.0.weight", "fp32"):
                entry.update(UNFIT[what])

    forge(job.files, part_path(saves[1], 0), change)
    _recommit(job, saves[1], saves[1:])
    resolution = resolve(open_catalog(job.files), saves[3])
    assert resolution.versions[BF16].save in saves[:2]
    assert {version.save for unit, version in resolution.versions.items() if unit != BF16} == {saves[3]}
    assert any("does not hold them" in problem for problem in resolution.problems)
    assert versions(job) == {unit: saves[0] if unit == BF16 else saves[3] for unit in VARIED.units}


def _recommit(job: Job, changed: SaveId, saves: list[SaveId]) -> None:
    """Manifests that name the changed group as it is now."""
    digest = parts_digest(job.files.read(part_path(changed, rank), 1 << 20) for rank in range(RANKS))
    for save in saves:
        manifest = open_catalog(job.files).manifest(save)
        if changed.name in manifest.groups:
            forge(job.files, f"manifests/{save}.json", lambda body: body["groups"][changed.name].update(parts=digest))


def test_a_prune_does_not_count_on_a_commit_whose_bases_are_not_to_be_found(job: Job, saves: list[SaveId]) -> None:
    """It would delete what such a commit falls back to."""
    for name in (saves[2], saves[3]):
        forge(
            job.files, f"manifests/{name}.json", lambda body: [unit.update(bases=[]) for unit in body["units"]] and None
        )
    before = read_newest(open_catalog(job.files))
    assert set(before.versions.values()) == {saves[1]}
    execute(job.files, plan_prune(open_catalog(job.files), ONE))
    after = read_newest(open_catalog(job.files))
    assert (after.save, after.versions) == (before.save, before.versions)


def test_a_manifest_without_its_bases_is_not_committed(job: Job, saves: list[SaveId]) -> None:
    manifest = open_catalog(job.files).manifest(saves[3])
    groups = {name: group for name, group in manifest.groups.items() if name != saves[1].name}
    with pytest.raises(SaveError, match=saves[1].name):
        commit(job.files, manifest.replace(groups=groups, step=50))


class Mixed(Job):
    """One tensor of a unit is stored whole each time, the other as a difference."""

    def _data(self, save: Save, rank: int, unit: Unit, fqn: str) -> bytes | EncodedEntry:
        data = super()._data(save, rank, unit, fqn)
        if fqn == "few.1.bias" and isinstance(data, EncodedEntry) and data.base is not None:
            return EncodedEntry(data.encoding, data.numel, data.dtype, data.chunks)
        return data


def test_a_fragment_of_a_base_that_nothing_rests_on_costs_no_later_version(files: SimulatedFiles) -> None:
    job = Mixed(files, Memory(), VARIED)
    saves = [job.save(everything=True) for _ in range(3)]
    unit = Unit("few.1", "fp32")
    hurt(job, saves[1], unit, rank=1, fqn="few.1.bias")
    assert set(versions(job).values()) == {saves[2]}
    found = verify(open_catalog(files))
    assert [state.state for state in found.commits] == ["ok", "fallback", "ok"]
    fragment = entry_of(job, saves[1], unit, 1, "few.1.bias")[2].fragment
    catalog = open_catalog(files)
    assert resolve(catalog, saves[2], {RejectedVersion(saves[1], unit, fragment)}).fallbacks == ()
    other = entry_of(job, saves[1], unit, 1, "few.1.weight")[2].fragment
    for bad in (
        RejectedVersion(saves[1], unit, other),
        RejectedVersion(saves[1], unit),
    ):  # not knowing which, all are taken for lost
        assert [version.save for version in resolve(catalog, saves[2], {bad}).fallbacks] == [saves[0]]
    with pytest.raises(DamagedError, match="no version"):
        resolve(catalog, saves[2], {RejectedVersion(saves[1], unit), RejectedVersion(saves[0], unit, fragment)})
