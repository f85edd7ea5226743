"""The ledger moves by commits only, and says what stays where a save does not replace it."""

from __future__ import annotations

import pytest

from monitor.ledger import CommitDraft, JobFacts, Ledger, PreparedCommit, build_manifest
from monitor.observe.units import UnitSize
from policies.base import Choice
from store.commit import Group
from store.names import SaveId, Unit
from store.resolve import Resolution, Version
from store.schema import (
    Entry,
    GroupRecord,
    LayerRecord,
    ManifestRecord,
    MeasureRecord,
    PartRecord,
    TensorRecord,
    UnitRecord,
    members_digest,
)

DIGEST = "0" * 32
A, B = Unit("a", "fp32"), Unit("b", "fp32")
SIZES = {A: UnitSize(4, 16, members_digest({"a": (4, "F32")})), B: UnitSize(2, 8, members_digest({"b": (2, "F32")}))}
FACTS = JobFacts(
    DIGEST, "torch", "parity", tuple(LayerRecord(name=name, block=True) for name in "ab"),
    {unit.layer: TensorRecord(layer=unit.layer, shape=(size.numel,), dtype="F32", kind="trainable")
     for unit, size in SIZES.items()},
)  # fmt: skip


def commit(ledger: Ledger, step: int, saved: tuple[Unit, ...], sick: tuple[Unit, ...] = ()) -> PreparedCommit:
    """Draw the commit of ``saved`` and advance the ledger by it."""
    save = SaveId(step, 1)
    draft = CommitDraft(
        facts=FACTS, save=save, world_size=1, commits=ledger.commits + 1, previous=ledger.newest,
        find_kept=lambda: ledger.kept(step, {A: 0.25}, SIZES), saved={unit: Choice("raw", "chosen") for unit in saved},
        sizes=SIZES, groups=dict(ledger.groups),
    )  # fmt: skip
    drawn = build_manifest(
        draft, Group((part(save, saved, sick),), GroupRecord(world_size=1, payload_bytes=99, parts=DIGEST))
    )
    ledger.advance(drawn.manifest)
    return drawn


def part(save: SaveId, saved: tuple[Unit, ...], sick: tuple[Unit, ...]) -> PartRecord:
    entries = tuple(
        Entry(
            layer=unit.layer, slot=unit.slot, fqn=unit.layer, start=0, numel=SIZES[unit].numel, dtype="F32",
            encoding="raw", offset=0, nbytes=SIZES[unit].nbytes, xxh3_128=DIGEST,
        )
        for unit in saved
    )  # fmt: skip
    measures = tuple(
        MeasureRecord(layer=unit.layer, slot=unit.slot, moved_sq=0.0, reference_sq=1.0, finite=unit not in sick)
        for unit in saved
    )
    return PartRecord(
        store_id=DIGEST, step=save.step, epoch=save.epoch, rank=0, world_size=1, plan=DIGEST, payload_bytes=99,
        header_bytes=8, header_xxh3_128=DIGEST, entries=entries, run_state=None, run_tensors=(), measures=measures,
    )  # fmt: skip


def versions(manifest: ManifestRecord) -> dict[str, tuple[int, int]]:
    """Step and staleness by layer."""
    return {record.layer: (record.version.step, record.staleness) for record in manifest.units}


def test_an_empty_ledger_knows_no_staleness() -> None:
    ledger = Ledger()
    assert ledger.staleness(A, 5) is None
    assert ledger.kept(5, {}, SIZES) == {}
    assert (ledger.commits, ledger.newest) == (0, None)


def test_what_is_not_saved_keeps_its_version_and_ages() -> None:
    ledger = Ledger()
    commit(ledger, 10, (A, B))
    manifest = commit(ledger, 14, (B,)).manifest
    assert versions(manifest) == {"a": (10, 4), "b": (14, 0)}
    assert [record.drift for record in manifest.units] == [0.25, 0.0]
    assert (manifest.commits, manifest.previous) == (2, "00000010-000001")
    assert set(manifest.groups) == {"00000010-000001", "00000014-000001"}
    assert manifest.bytes_avoided == 16
    assert (ledger.staleness(A, 20), ledger.staleness(B, 20)) == (10, 6)


def test_groups_that_nothing_needs_are_left_out() -> None:
    ledger = Ledger()
    commit(ledger, 10, (A, B))
    commit(ledger, 14, (B,))
    manifest = commit(ledger, 18, (A,)).manifest
    assert set(manifest.groups) == {"00000014-000001", "00000018-000001"}


def test_a_sick_layer_keeps_its_version_with_unknown_drift() -> None:
    ledger = Ledger()
    commit(ledger, 10, (A, B))
    drawn = commit(ledger, 14, (A, B), sick=(A,))
    assert drawn.dropped == (A,)
    assert versions(drawn.manifest) == {"a": (10, 4), "b": (14, 0)}
    assert [record.drift for record in drawn.manifest.units] == [None, 0.0]


def test_units_of_other_sizes_are_not_kept() -> None:
    ledger = Ledger()
    commit(ledger, 10, (A, B))
    assert set(ledger.kept(12, {}, {A: UnitSize(5, 20), B: SIZES[B]})) == {B}
    assert set(ledger.kept(12, {}, {B: SIZES[B]})) == {B}


def test_units_of_other_tensors_of_the_same_size_are_not_kept() -> None:
    ledger = Ledger()
    commit(ledger, 10, (A, B))
    swapped = UnitSize(4, 16, members_digest({"another": (4, "F32")}))
    assert set(ledger.kept(12, {}, {A: swapped, B: SIZES[B]})) == {B}


def test_versions_of_later_steps_are_none_after_the_job_went_back() -> None:
    ledger = Ledger()
    commit(ledger, 10, (A, B))
    commit(ledger, 20, (B,))
    assert (ledger.staleness(A, 15), ledger.staleness(B, 15)) == (5, None)
    assert set(ledger.kept(15, {}, SIZES)) == {A}


def test_going_on_before_the_commit_all_that_moves_is_to_be_saved_anew() -> None:
    still, ahead = Unit("a", "frozen"), Unit("b", "frozen")
    records = [
        UnitRecord(
            layer=unit.layer, slot=unit.slot, save=SaveId(step, 1).name, encoding="raw", numel=4, nbytes=16, drift=0.0,
            staleness=20 - step, moving=unit.slot == "fp32",
        )
        for unit, step in ((A, 10), (B, 20), (still, 10), (ahead, 20))
    ]  # fmt: skip
    group = GroupRecord(world_size=1, payload_bytes=99, parts=DIGEST)
    manifest = commit(Ledger(), 20, (A, B)).manifest
    versions = {one.unit: Version(one, group, (), fallback=False) for one in records}
    resolution = Resolution(manifest, versions, {}, ())
    ledger = Ledger()
    ledger.adopt(resolution, 20)
    assert (ledger.versions.keys(), ledger.groups.keys()) == (versions.keys(), {"00000010-000001", "00000020-000001"})
    ledger.adopt(resolution, 15)
    assert (ledger.versions.keys(), ledger.groups.keys()) == ({still}, {"00000010-000001"})
    ledger.full_after_rollback = False
    ledger.adopt(resolution, 15)
    assert (ledger.versions.keys(), ledger.groups.keys()) == ({A, still}, {"00000010-000001"})
    assert (ledger.newest, ledger.commits) == (manifest.save, 1)


def stored(
    ledger: Ledger, step: int, nbytes: int, whole: bool, epoch: int = 1, encoding: str = "int8-log2", bases: int = 1
) -> int:
    """Commit a version of one unit. Return the bytes expected of its next one. bases: saves that it needs, if any."""
    record = UnitRecord(
        layer="a", slot="fp32", save=SaveId(step, epoch).name, encoding=encoding, numel=4, nbytes=nbytes, drift=0.0,
        staleness=0, moving=True,
        bases=() if whole else tuple(SaveId(step - 1 - back, epoch).name for back in range(bases)),
    )  # fmt: skip
    ledger.advance(manifest_of_unit(record, step, epoch))
    return ledger.expected[A]


def manifest_of_unit(record: UnitRecord, step: int, epoch: int) -> ManifestRecord:
    return ManifestRecord(
        store_id=DIGEST, step=step, epoch=epoch, commits=step, world_size=1, framework="torch", policy="full",
        created="2026-01-01T00:00:00+00:00", previous=None, bytes_avoided=0, layers=(), tensors={}, groups={},
        units=(record,),
    )  # fmt: skip


def test_a_whole_version_says_little_about_the_next_difference() -> None:
    ledger = Ledger(life=12)
    assert stored(ledger, 1, 100, whole=True) == 50
    assert stored(ledger, 2, 30, whole=False) == 40
    assert stored(ledger, 3, 30, whole=False) == 35
    assert stored(ledger, 4, 100, whole=True) == 35
    assert stored(ledger, 5, 95, whole=True) == 95, "differences do not pay"
    assert stored(ledger, 6, 41, whole=False) == 68
    assert stored(ledger, 7, 110, whole=True, epoch=2) == 68, "a new process stores everything whole"
    assert stored(ledger, 8, 40, whole=True, encoding="bf16") == 20


def test_a_share_of_the_next_whole_version_is_kept_back_for_each_difference() -> None:
    ledger = Ledger(life=4)
    for step, nbytes, bases, kept in (
        (1, 300, 0, 0),
        (2, 100, 1, 44),
        (3, 100, 2, 94),
        (4, 100, 3, 146),
        (5, 100, 4, 198),
    ):
        stored(ledger, step, nbytes, whole=not bases, bases=bases)
        assert ledger.reserve() == pytest.approx(kept, abs=1.0)
    stored(ledger, 6, 280, whole=True)
    assert ledger.reserve() == 0.0
    stored(ledger, 7, 20, whole=False, epoch=2)
    assert ledger.reserve() > 0.0
    ledger.leave(7)
    assert ledger.reserve() == 0.0


def test_without_differences_the_newest_version_is_what_is_expected() -> None:
    ledger = Ledger()
    commit(ledger, 10, (A, B))
    assert ledger.expected == {}


def test_lossless_differences_are_expected_to_be_as_large() -> None:
    ledger = Ledger(life=12)
    assert stored(ledger, 1, 100, whole=True, encoding="raw") == 100
    assert stored(ledger, 2, 80, whole=False, encoding="raw") == 90
