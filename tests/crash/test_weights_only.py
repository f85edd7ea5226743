"""Weights-only commits: what is in them, and that a crash leaves a commit or its weights, at every operation.

The job is :mod:`workload`'s, under a rule that retains the weights of one commit in 20 steps.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from store import schema
from store import weights as weights_module
from store.catalog import open_catalog
from store.certificate import certify
from store.errors import DamagedError, NewerFormatError, NothingToResumeError, StorageError
from store.names import SaveId, payload_path, weights_dir
from store.resolve import newest_resumable, resolve
from store.retention import EVERYTHING, Retention, execute, keep_named_weights, plan_prune
from store.storage.local import Files, list_or_empty
from store.verify import verify
from store.weights import open_weights, verify_all, weights_only_saves
from tests.crash.checker import _read_unit, check_undamaged, read_newest
from tests.crash.damage import flip
from tests.crash.models import PLAIN, VARIED, Model, content
from tests.crash.simulated import Disk, Fault, SimulatedFiles, disk_after, every_crash
from tests.crash.workload import Job, Memory

RULE = Retention(keep_last=1, log_spaced=False, weights_every=20, weights_last=99)


@dataclass
class Aging:
    """A job that saves and prunes under a rule. began: the operations before the first copy, and the first removal."""

    files: SimulatedFiles
    model: Model = PLAIN
    rule: Retention = RULE
    problems: list[str] = field(default_factory=list)
    acknowledged: dict[SaveId, int] = field(default_factory=dict)
    began: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.job = Job(self.files, Memory(), self.model)
        self.catalog = open_catalog(self.files)

    def save(self, times: int = 1) -> None:
        for _ in range(times):
            save = self.job.save()
            self.acknowledged[save] = len(self.files.log)
            self.prune()

    def prune(self, **options: Any) -> None:
        plan = plan_prune(self.catalog, self.rule, **options)
        assert plan.unrecognised == ()
        for what in ("to_copy", "weights"):
            if getattr(plan, what):
                self.began.setdefault(what, len(self.files.log))
        execute(self.files, plan)
        self.problems += keep_named_weights(self.catalog, plan)


def weights_of(files: Files, save: SaveId) -> dict[tuple[str, str], bytes]:
    """All values of a weights-only commit, as its manifest says; checked against what was written."""
    catalog = open_weights(open_catalog(files), save)
    resolution = resolve(catalog, save)
    assert not resolution.problems
    found: dict[tuple[str, str], bytes] = {}
    for unit, version in resolution.versions.items():
        found |= _read_unit(catalog, resolution, unit, version)
        assert all(found[fqn, slot] == content(fqn, slot, version.save) for fqn, slot in found if slot == unit.slot and
                   resolution.manifest.tensors[fqn].layer == unit.layer)  # fmt: skip
    assert verify(catalog).ok
    return found


def steps(files: Files) -> list[int]:
    return [save.step for save in weights_only_saves(files)]


@pytest.mark.parametrize("model", [PLAIN, VARIED], ids=["plain", "varied"])
def test_they_hold_the_weights_of_the_commit_and_nothing_else(model: Model) -> None:
    aging, before = Aging(SimulatedFiles(), model), {}
    for _ in range(8):
        aging.save()
        newest = max(aging.acknowledged)
        before[newest] = certify(resolve(aging.catalog, newest))
    assert aging.problems == []
    kept = [80] if model is PLAIN else [80, 70, 60, 50, 40]  # those of the chains of the newest need nothing more
    assert [save.step for save in aging.catalog.saves()] == kept
    assert steps(aging.files) == [60, 40, 20, 10]
    for save in weights_only_saves(aging.files):
        assert {name for name, _ in weights_of(aging.files, save)} == model.tensors.keys()
        after = certify(resolve(open_weights(aging.catalog, save), save))
        assert after.units == tuple(unit for unit in before[save].units if unit.slot == "fp32"), "ages included"
    assert {unit.staleness for unit in after.units} == {0}
    assert {
        unit.staleness for unit in certify(resolve(open_weights(aging.catalog, SaveId(40, 1)), SaveId(40, 1))).units
    } != {0}
    check_undamaged(aging.files)


def test_no_resume_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    aging = Aging(SimulatedFiles())
    aging.save(5)
    inner = open_weights(aging.catalog, SaveId(20, 1))
    with pytest.raises(NothingToResumeError, match="00000020-000001: it holds weights only"):
        newest_resumable(inner)
    assert read_newest(aging.catalog).save.step == 50
    assert inner.record.reader == inner.manifest(SaveId(20, 1)).reader == 5
    assert aging.catalog.record.reader < 5, "an older release still reads the store itself"
    monkeypatch.setattr(schema, "READER", 4)
    with pytest.raises(NewerFormatError):
        open_weights(aging.catalog, SaveId(20, 1))


def test_the_newest_stay_and_without_the_rule_all_do() -> None:
    aging = Aging(SimulatedFiles(), rule=Retention(1, None, False, weights_every=20, weights_last=2))
    aging.save(9)
    assert steps(aging.files) == [80, 60]
    aging.rule = Retention(1, log_spaced=False)
    aging.save(2)
    assert steps(aging.files) == [80, 60]
    aging.files.make_dir("weights/mine")
    assert plan_prune(aging.catalog, aging.rule).unrecognised == ("weights/mine",)


def test_damaged_weights_are_told_and_hold_up_nothing() -> None:
    aging = Aging(SimulatedFiles())
    aging.save()
    part = aging.catalog.group(SaveId(10, 1), aging.catalog.manifest(SaveId(10, 1)).groups["00000010-000001"]).parts[0]
    entry = next(entry for entry in part.entries if entry.slot == "fp32")
    flip(aging.files, payload_path(part.save, 0), part.header_bytes + entry.offset)
    aging.save(4)
    assert len(aging.problems) == 2, "of steps 10 and 20, which takes half of its units from it"
    assert all("do not match their hash" in problem for problem in aging.problems)
    assert steps(aging.files) == [40, 30]
    assert [save.step for save in aging.catalog.saves()] == [50, 40]


@pytest.mark.parametrize("fault", [Fault("write", path="weights/", error=errno.ENOSPC), Fault("sync", path="weights/"),
                                   Fault("write", path="weights/", phantom=True)])  # fmt: skip
def test_the_commit_stays_until_its_weights_are_whole(fault: Fault) -> None:
    aging = Aging(SimulatedFiles())
    aging.save()
    aging.files.faults = [fault]
    aging.save()
    assert len(aging.problems) == 1
    assert [save.step for save in aging.catalog.saves()] == [20, 10]
    aging.prune()
    assert steps(aging.files) == [10]
    aging.prune()
    assert [save.step for save in aging.catalog.saves()] == [20]
    weights_of(aging.files, SaveId(10, 1))


def test_what_another_process_copied_is_read_again_before_the_commit_goes() -> None:
    aging = Aging(SimulatedFiles())
    aging.save(2)
    assert steps(aging.files) == [10]
    flip(aging.files, f"{weights_dir(SaveId(10, 1))}/{payload_path(SaveId(10, 1), 0)}", -1)
    later = Aging(aging.files)
    later.prune()
    assert [save.step for save in later.catalog.saves()] == [20, 10]
    later.prune()
    assert [save.step for save in later.catalog.saves()] == [20]
    weights_of(aging.files, SaveId(10, 1))


def test_they_give_way_last_where_room_is_short() -> None:
    aging = Aging(SimulatedFiles(), rule=Retention(4, log_spaced=False, weights_every=20, weights_last=99))
    for _ in range(5):
        aging.job.save()
    plan = plan_prune(aging.catalog, aging.rule, make_room=1)
    assert ([save.step for save in plan.to_copy], [save.step for save in plan.given_up]) == ([10], [20, 30])
    plan = plan_prune(aging.catalog, aging.rule, make_room=EVERYTHING)
    assert plan.to_copy == () and SaveId(10, 1) in plan.given_up


def crashes(run: Aging, check: Callable[[SimulatedFiles, Sequence[SaveId]], None], since: str, limit: int = 4) -> int:
    """Check each state that a crash may leave, after each operation, with the saves acknowledged by then."""
    seen = set()
    for done in reversed(range(run.began[since], len(run.files.log) + 1)):
        told = [save for save, at in run.acknowledged.items() if at <= done]
        for disk in every_crash(disk_after(Disk(), run.files.log[:done]), limit):
            key = hashlib.md5(repr((disk.files(), told)).encode()).digest()
            if key not in seen:
                seen.add(key)
                check(SimulatedFiles(disk), told)
    return len(seen)


def full_or_weights(files: SimulatedFiles, told: Sequence[SaveId]) -> None:
    """Each commit that the rule names is whole, or its weights are; and a later job completes what was begun."""
    catalog = open_catalog(files)
    assert verify_all(catalog).ok, verify_all(catalog)
    named = {save for save in told if save.step == 10 or save.step % 20 == 0}
    kept = set(weights_only_saves(files))
    assert named <= kept | set(catalog.saves()), "a commit went before its weights were kept"
    for save in kept:
        weights_of(files, save)
    later = Aging(files)
    assert later.job.last is not None and later.job.last.save >= max(told)
    for _ in range(3):
        later.prune()
    assert later.problems == []
    assert {save for save in named if save != max(catalog.saves())} <= set(weights_only_saves(files))
    assert catalog.manifest_names() and len(open_catalog(files).saves()) == 1
    assert verify_all(open_catalog(files)).ok


def aged(rule: Retention = RULE, saves: int = 4) -> Aging:
    run = Aging(SimulatedFiles(), PLAIN, rule)
    run.save(saves)
    return run


@pytest.mark.slow
@pytest.mark.core
def test_a_crash_leaves_the_commit_or_its_weights() -> None:
    assert crashes(aged(saves=3), full_or_weights, "to_copy") > 100


@pytest.mark.slow
@pytest.mark.core
def test_a_crash_while_they_are_removed_leaves_nothing_damaged() -> None:
    def check(files: SimulatedFiles, told: Sequence[SaveId]) -> None:
        assert verify_all(open_catalog(files)).ok
        later = Aging(files, rule=rule)
        for _ in range(3):
            later.prune()
        assert len(weights_only_saves(files)) <= 1
        assert len(list_or_empty(files, "weights")) <= 1

    rule = Retention(1, log_spaced=False, weights_every=10, weights_last=1)
    assert crashes(aged(rule=rule, saves=3), check, "weights") > 50


def _no_sync(files: Files, path: str) -> None:
    """A stand-in of ensure_dir that syncs no parent."""
    for depth in range(len(path.split("/"))):
        files.make_dir("/".join(path.split("/")[: depth + 1]))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["unsynced directories", "names not synced", "manifest after segments"])
def test_the_sweep_finds_what_would_lose_weights(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Testing the test: each safeguard taken out is caught."""
    rule = RULE
    if mutant == "unsynced directories":
        monkeypatch.setattr(weights_module, "ensure_dir", _no_sync)
    elif mutant == "names not synced":
        real = weights_module.write_new
        monkeypatch.setattr(
            weights_module, "write_new", lambda files, path, data, **_: real(files, path, data, sync_name=False)
        )
    else:
        rule = Retention(1, log_spaced=False, weights_every=10, weights_last=1)
        real_remove = weights_module.remove_all

        def late(files: Files, names: Sequence[str]) -> None:
            if not any("/manifests/" in name for name in names):
                real_remove(files, names)

        monkeypatch.setattr(weights_module, "remove_all", late)
    with pytest.raises((AssertionError, DamagedError, StorageError)):
        crashes(aged(rule=rule), full_or_weights if rule is RULE else _undamaged, "to_copy")


def _undamaged(files: SimulatedFiles, told: Sequence[SaveId]) -> None:
    report = verify_all(open_catalog(files))
    assert report.ok, report
