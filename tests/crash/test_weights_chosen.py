"""Weights-only commits: which commit stands for a range after a rollback, beside damage, and with suspect marks."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store import weights
from store.catalog import find_lineage, mark_suspect, open_catalog, withdraw_suspect
from store.errors import FencedError, StorageError
from store.names import SaveId, manifest_path, payload_path
from store.retention import Retention, execute, keep_named_weights, plan_prune
from store.storage.local import Files
from store.weights import all_saves, verify_all, weights_only_saves
from tests.crash.damage import flip, put, remove
from tests.crash.simulated import Fault, SimulatedFiles
from tests.crash.test_weights_only import Aging, crashes
from tests.crash.workload import Job, Memory
from tests.support.stores import StoreBuilder, flip_byte

HUNDRED = Retention(keep_last=1, log_spaced=False, weights_every=100, weights_last=99)


class Run(Aging):
    """A job that may go back, and saves everything, so that no two commits share a segment."""

    def save(self, times: int = 1) -> None:
        for _ in range(times):
            save = self.job.save(everything=True)
            self.acknowledged[save] = len(self.files.log)
            self.prune()

    def go_back(self, step: int, suspect: bool = False) -> None:
        """The next job resumes from ``step``: the commits after it are moved away, or suspect."""
        for save in self.catalog.saves():
            if save.step > step:
                if suspect:
                    mark_suspect(self.files, self.catalog.store_id, save, "exit code 1")
                else:
                    remove(self.files, manifest_path(save))
                    self.acknowledged.pop(save, None)
        self.restart()

    def restart(self) -> None:
        self.job, self.catalog = Job(self.files, Memory(), self.model), open_catalog(self.files)

    def damage(self, save: SaveId) -> None:
        """Flip a bit of its weights, so that its records do not tell."""
        part = self.catalog.group(save, self.catalog.manifest(save).groups[save.name]).parts[0]
        entry = next(entry for entry in part.entries if entry.slot == "fp32")
        flip(self.files, payload_path(save, 0), part.header_bytes + entry.offset)

    @property
    def kept(self) -> list[str]:
        """Weights-only commits, oldest first, as step-epoch."""
        return [f"{save.step}-{save.epoch}" for save in sorted(weights_only_saves(self.files), key=lambda s: s.step)]

    @property
    def full(self) -> list[str]:
        return [f"{save.step}-{save.epoch}" for save in sorted(self.catalog.saves())]


def settle(run: Run) -> None:
    for _ in range(3):
        run.prune()


def marked(run: Run) -> list[int]:
    return sorted(save.step for save in run.catalog.suspects().saves)


@pytest.mark.parametrize("suspect", [False, True], ids=["moved away", "suspect"])
def test_the_running_branch_stands_for_what_it_ran_over(suspect: bool) -> None:
    run = Run(SimulatedFiles())
    run.save(4)
    run.job.prove()
    run.save(6)
    assert (run.kept, run.full) == (["10-1", "20-1", "40-1", "60-1", "80-1"], ["40-1", "100-1"])
    run.go_back(40, suspect)
    run.save()
    assert run.kept == ["10-1", "20-1", "40-1", "60-1", "80-1"], "the abandoned branch's, where the new one has none"
    run.save(7)
    assert run.kept == ["10-1", "20-1", "40-1", "60-2", "80-2", "100-2"]
    assert run.problems == [] and verify_all(run.catalog).ok


def test_the_weights_of_the_abandoned_branch_do_not_take_the_room_of_its_ancestors() -> None:
    run = Run(SimulatedFiles(), rule=Retention(1, log_spaced=False, weights_every=20, weights_last=3))
    run.save(2)
    run.job.prove()
    run.save(6)
    assert run.kept == ["20-1", "40-1", "60-1"]
    run.go_back(20)
    run.save()
    assert run.kept == ["20-1", "40-1", "60-1"]
    run.save(2)
    assert run.kept == ["20-1", "40-2", "60-1"]
    run.save(4)
    assert run.kept == ["40-2", "60-2", "80-2"]


def test_ancestors_go_before_the_abandoned_branch_where_room_is_for_few() -> None:
    run = Run(SimulatedFiles(), rule=Retention(1, log_spaced=False, weights_every=20, weights_last=3))
    run.save(2)
    run.job.prove()
    run.save(8)
    assert (run.kept, run.full) == (["40-1", "60-1", "80-1"], ["20-1", "100-1"]), "20 is there as it is"
    run.go_back(20)
    run.save()
    run.job.prove()
    run.save()
    settle(run)
    assert (run.kept, run.full) == (["20-1", "40-2", "80-1"], ["30-2", "40-2"])


def lineage(previous: dict[str, str | None]) -> list[str]:
    """Of the first, as names."""
    saves = [SaveId.parse(name) for name in previous]
    return [save.name for save in sorted(find_lineage(saves[0], dict(zip(saves, previous.values(), strict=True))))]


def test_a_commit_that_is_gone_still_tells_where_its_branch_began() -> None:
    """The abandoned 401 is of a later step than 395, which 405 continues, and of an earlier one than 405."""
    found = lineage({
        "00000405-000002": "00000395-000002",
        "00000401-000001": "00000350-000001",
        "00000350-000001": None,
    })  # fmt: skip
    assert found == ["00000350-000001", "00000405-000002"]


def test_a_job_that_went_back_by_itself_left_what_it_runs_over_again() -> None:
    """It commits after the newest commit, at an earlier step: a framework's own load, or an effective step."""
    found = lineage({
        "00000020-000002": "00000050-000001",
        "00000050-000001": "00000020-000001",
        "00000020-000001": "00000010-000001",
        "00000010-000001": None,
    })  # fmt: skip
    assert found == ["00000010-000001", "00000020-000002"]


def test_a_branch_that_was_left_and_taken_up_again_is_the_running_one() -> None:
    run = Run(SimulatedFiles(), rule=Retention(keep_last=3, log_spaced=False, weights_every=20, weights_last=99))
    run.save(8)
    left = {path: run.files.read(path, 1 << 20) for path in map(manifest_path, (SaveId(70, 1), SaveId(80, 1)))}
    run.go_back(60)
    tried = run.job.save(everything=True)
    for path, data in left.items():  # moved back
        put(run.files, path, data)
    mark_suspect(run.files, run.catalog.store_id, tried, "exit code 1")
    run.restart()
    assert run.job.last is not None and run.job.last.save == SaveId(80, 1)
    run.save(8)
    assert run.kept == ["10-1", "20-1", "40-1", "60-1", "80-1", "100-3", "120-3"]


def test_full_commits_of_the_running_branch_stand_for_ranges_too() -> None:
    run = Run(SimulatedFiles(), rule=Retention(keep_last=1, keep_every=20, log_spaced=False))
    run.save(8)
    run.go_back(40, suspect=True)
    for step in (60, 80):
        withdraw_suspect(run.files, SaveId(step, 1))
    run.save(2)
    assert run.full == ["10-1", "20-1", "40-1", "80-1", "60-2"]
    run.save(3)
    assert run.full == ["10-1", "20-1", "40-1", "60-2", "80-2", "90-2"]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from(["save"] * 6 + ["prove", "back", "away", "restart"]), min_size=8, max_size=30),
    st.integers(1, 4),
    st.data(),
)
def test_whatever_the_job_did_the_oldest_of_the_running_branch_stands_for_each_range(
    actions: list[str], keep_last: int, data: st.DataObject
) -> None:
    """Compared with what the test knows of the branches, not with what the store tells."""
    run = Run(SimulatedFiles(), rule=Retention(keep_last, log_spaced=False, weights_every=30, weights_last=99))
    branch: list[SaveId] = []  # the running one, oldest first
    for action in ("save", *actions):
        if action == "prove":
            run.job.prove()
            continue
        if action != "save":
            steps_there = sorted({save.step for save in branch if save in run.catalog.saves()})
            back = data.draw(st.sampled_from(steps_there))
            if action == "restart" or back == steps_there[-1]:
                run.restart()
            else:
                run.go_back(back, suspect=action == "back")
            assert run.job.last is not None
            branch = [save for save in branch if save.step <= run.job.last.step]
            assert branch[-1] == run.job.last.save
            continue
        before = {*run.catalog.saves(), *weights_only_saves(run.files)}
        run.job.save(everything=True)
        assert run.job.last is not None
        branch.append(run.job.last.save)
        before.add(branch[-1])
        for _ in range(4):
            run.prune()
        after = {*run.catalog.saves(), *weights_only_saves(run.files)}
        suspects = run.catalog.suspects().saves
        for number in {save.step // 30 for save in before & set(branch)}:
            mine = [save for save in branch if save.step // 30 == number and save in before - suspects]
            aged = [save for save in weights_only_saves(run.files) if save.step // 30 == number]
            assert not mine or mine[0] in after, "the oldest of the running branch"
            assert {*aged} <= {*mine[:1]} | {save for save in branch if save in run.catalog.saves()}, "and no other"
    assert run.problems == [] and verify_all(run.catalog).ok


def test_the_next_good_one_stands_for_a_damaged_commit_that_another_rule_retained() -> None:
    """It is found damaged before the others of its range go, not when it goes itself."""
    run = Run(SimulatedFiles(), rule=HUNDRED)
    run.save()
    run.job.prove()
    run.damage(SaveId(10, 1))
    run.save(5)
    run.job.prove()
    run.save(10)
    settle(run)
    assert (run.kept, run.full) == (["20-1", "100-1"], ["60-1", "160-1"])
    assert len(run.problems) == 1 and "do not match their hash" in run.problems[0]


def test_the_next_good_one_stays_while_the_weights_of_the_oldest_are_copied() -> None:
    """Copying may last longer than a save, and finds the damage at its end."""
    run = Run(SimulatedFiles(), rule=HUNDRED)
    run.save()
    run.damage(SaveId(10, 1))
    run.job.save(everything=True)
    slow = plan_prune(run.catalog, HUNDRED)
    assert slow.to_copy == (SaveId(10, 1),)
    for _ in range(10):
        run.job.save(everything=True)
        execute(run.files, plan_prune(run.catalog, HUNDRED))
    assert run.full == ["10-1", "20-1", "100-1", "110-1", "120-1"], "for each range whose oldest was not read"
    assert "do not match their hash" in keep_named_weights(run.catalog, slow)[0]
    settle(run)
    assert run.kept == ["20-1", "100-1"] and verify_all(run.catalog).ok


def test_the_one_that_stays_meanwhile_shares_no_segment_with_the_oldest(tmp_path: Path) -> None:
    """Damage to what they share would take both."""
    store = StoreBuilder(tmp_path, layers=2, world_size=1)
    oldest, _, *others = store.save(10), store.save(20, slots=["exp_avg"]), *map(store.save, (*range(30, 100, 10), 110))
    catalog = open_catalog(store.files)
    part = catalog.group(oldest, catalog.manifest(oldest).groups[oldest.name]).parts[0]
    entry = next(entry for entry in part.entries if entry.slot == "fp32")
    flip_byte(store.payload(oldest), part.header_bytes + entry.offset)
    found = list[str]()
    for _ in range(4):
        plan = plan_prune(catalog, HUNDRED)
        execute(store.files, plan)  # as a job does: what is copied goes at the next prune
        found += keep_named_weights(catalog, plan)
    assert len(found) == 1 and "do not match their hash" in found[0]
    assert (weights_only_saves(store.files), catalog.saves()) == ([others[0]], [others[-1]])


def test_weights_that_another_job_copied_meanwhile_are_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is stopped after it looked whether they are there, until the other job has copied them."""
    run, real = Run(SimulatedFiles(), rule=HUNDRED), weights._is_whole
    run.save()

    def stopped(inner: Files) -> bool:
        monkeypatch.undo()
        found = real(inner)
        other = Run(run.files, rule=HUNDRED)
        other.save(3)
        assert (other.kept, other.full, other.problems) == (["10-1"], ["40-2"], [])
        return found

    monkeypatch.setattr(weights, "_is_whole", stopped)
    with pytest.raises(FencedError):
        weights.keep_weights(run.files, SaveId(10, 1), 1)
    assert run.kept == ["10-1"] and verify_all(run.catalog).ok


def test_damage_that_an_earlier_process_found_does_not_empty_the_range() -> None:
    run = Run(SimulatedFiles(), rule=HUNDRED)
    run.save()
    run.damage(SaveId(10, 1))
    run.save()
    assert len(run.problems) == 1
    run.restart()
    run.save(12)
    assert run.kept == ["20-1", "100-2"]


def test_beside_weights_that_cannot_be_read_the_next_commit_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(SimulatedFiles(), rule=HUNDRED)
    run.save()
    real, bad = SimulatedFiles.read_into, payload_path(SaveId(10, 1), 0)

    def refused(files: SimulatedFiles, path: str, offset: int, target: memoryview) -> None:
        if path == bad:
            raise StorageError(f"cannot read {path}: the device reported an I/O error")
        real(files, path, offset, target)

    monkeypatch.setattr(SimulatedFiles, "read_into", refused)
    run.save(12)
    assert (run.kept, run.full) == (["100-1"], ["10-1", "20-1", "130-1"])
    assert run.problems and all("I/O error" in problem for problem in run.problems)
    monkeypatch.undo()
    settle(run)
    assert (run.kept, run.full) == (["10-1", "100-1"], ["130-1"])


def test_a_full_disk_does_not_empty_a_range() -> None:
    run = Run(SimulatedFiles(), rule=HUNDRED)
    run.files.faults = [Fault("write", path="weights/", error=errno.ENOSPC, times=None)]
    run.save(12)
    assert (run.kept, run.full) == ([], ["10-1", "20-1", "100-1", "110-1", "120-1"])
    run.files.faults = []
    settle(run)
    assert (run.kept, run.full) == (["10-1", "100-1"], ["120-1"]) and verify_all(run.catalog).ok


def test_a_suspect_stands_for_no_range_that_has_another() -> None:
    run = Run(SimulatedFiles())
    run.save(2)
    run.job.prove()
    run.save(4)
    assert (run.kept, run.full) == (["10-1", "20-1", "40-1"], ["20-1", "60-1"])
    for step in (10, 40):
        mark_suspect(run.files, run.catalog.store_id, SaveId(step, 1), "exit code 1")
    run.save(3)
    assert run.kept == ["10-1", "20-1", "40-1", "60-1", "80-1"] and marked(run) == [10, 40], "one that is alone stays"
    run.go_back(20)
    run.save(8)
    assert run.kept == ["10-1", "20-1", "40-2", "60-2", "80-2"]
    assert marked(run) == [10], "its mark stays with it, and no other"
    run.rule = Retention(1, log_spaced=False)
    run.save()
    assert marked(run) == [10], "under any rule"


def test_a_good_commit_takes_the_place_of_a_suspect_one() -> None:
    run = Run(SimulatedFiles(), rule=Retention(3, log_spaced=False, weights_every=40, weights_last=99))
    run.save(8)
    assert run.kept == ["10-1", "40-1"] and run.full == ["60-1", "70-1", "80-1"]
    mark_suspect(run.files, run.catalog.store_id, SaveId(40, 1), "exit code 1")
    run.save(3)
    assert run.kept == ["10-1", "60-1", "80-1"] and marked(run) == []


def test_a_damaged_record_of_a_weights_only_commit_stands_for_nothing_and_is_left_alone() -> None:
    run = Run(SimulatedFiles(), rule=Retention(2, log_spaced=False, weights_every=40, weights_last=99))
    run.save(6)
    run.prune()
    assert (run.kept, run.full) == (["10-1", "40-1"], ["50-1", "60-1"])
    flip(run.files, f"weights/00000040-000001/{manifest_path(SaveId(40, 1))}", 30)
    run.restart()
    run.save(3)
    assert run.kept == ["10-1", "40-1", "50-1"], "50 stands for the range"
    assert not verify_all(run.catalog).ok


@pytest.mark.parametrize("damaged", [False, True])
def test_a_record_that_was_not_read_does_not_cut_the_running_branch_off_from_its_ancestors(
    damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(SimulatedFiles(), rule=Retention(1, log_spaced=False, weights_every=20, weights_last=3))
    run.save(2)
    run.job.prove()
    run.save(8)
    run.go_back(20)
    run.save()
    run.job.prove()
    run.save(2)
    settle(run)
    assert (run.kept, run.full) == (["20-1", "40-2", "80-1"], ["30-2", "50-2"])
    run.restart()
    record = f"weights/00000040-000002/{manifest_path(SaveId(40, 2))}"
    if damaged:
        flip(run.files, record, 30)
    else:
        real = SimulatedFiles.read

        def refused(files: SimulatedFiles, path: str, limit: int) -> bytes:
            if path.endswith(record):
                raise StorageError(f"cannot read {path}: the device reported an I/O error")
            return real(files, path, limit)

        monkeypatch.setattr(SimulatedFiles, "read", refused)
        with pytest.raises(StorageError, match="I/O error"):
            run.prune()
        monkeypatch.undo()
    run.save(2)
    settle(run)
    assert run.kept == ["20-1", "40-2", *["50-2"] * damaged, "60-3"], "and not 80, which was abandoned"


def gone_back(damaged: bool) -> Run:
    """After a rollback, from the first operation of which a crash is to be checked."""
    run = Run(SimulatedFiles(), rule=Retention(keep_last=1, log_spaced=False, weights_every=20, weights_last=99))
    run.save(2)
    run.job.prove()
    run.save(4)
    run.go_back(20)
    run.began.clear()
    if damaged:
        run.save()
        run.damage(SaveId(20, 1))
    run.save(3 - damaged)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "damaged", [pytest.param(False, id="", marks=pytest.mark.core), pytest.param(True, id="damaged")]
)
def test_a_crash_after_a_rollback_leaves_a_commit_or_weights_of_each_range(damaged: bool) -> None:
    def check(files: SimulatedFiles, told: Sequence[SaveId]) -> None:
        there = {save.step // 20 for save in all_saves(open_catalog(files))}
        assert {save.step // 20 for save in told} <= there
        later = Run(files, rule=run.rule)
        later.save()
        settle(later)
        assert {save.step // 20 for save in told} <= {save.step // 20 for save in all_saves(later.catalog)}
        assert verify_all(later.catalog).ok or damaged
        newest = max(told)
        if newest.epoch == 2:
            left = [save for save in weights_only_saves(files) if save.epoch == 1 and 20 < save.step <= newest.step]
            assert not left, "of the abandoned branch"

    run = gone_back(damaged)
    assert crashes(run, check, "to_copy", limit=1) > 50
