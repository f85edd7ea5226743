"""Going back to a step that the journal leads to, and what a failure after that returns to."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from store.catalog import open_catalog
from store.errors import ConfigError, DriftpointError, NothingToResumeError
from store.journal import find_chain, journal_catalog
from store.names import SaveId
from store.storage.local import LocalFiles
from tests.support.journaled import Job, damage, damage_gradient, damage_run_state, keep, records, same


@pytest.mark.parametrize("policy", ["full", {"name": "parity", "k": 2}], ids=str)
@pytest.mark.parametrize("step", [5, 6, 7, 8])
def test_a_resume_goes_back_to_a_step_and_a_failure_after_it_does_not_return(
    tmp_path: Path, policy: Any, step: int
) -> None:
    settings, kept = {"every": 2, "policy": policy}, dict[int, Any]()
    job = Job()
    job.run(job.attach(tmp_path, **settings), 9, after=keep(job, kept))
    again = Job(seed=2)
    ckpt = again.attach(tmp_path, **settings)
    assert ckpt.resume(step=step) == step
    assert same(again.state(), kept[step])
    assert again.schedule.last_epoch == step
    assert ckpt.certificate is not None
    assert ckpt.certificate.exact
    ckpt.finish(clean=False)
    third = Job(seed=3)
    ckpt = third.attach(tmp_path, **settings)
    assert ckpt.resume() == step
    assert same(third.state(), kept[step])
    torch.manual_seed(99)  # other data
    third.train_one_step()
    ckpt.step()
    ckpt.flush()
    reached = copy.deepcopy(third.state())
    ckpt.finish(clean=False)
    fourth = Job(seed=4)
    ckpt = fourth.attach(tmp_path, **settings)
    assert ckpt.resume() == step + 1
    assert same(fourth.state(), reached)
    ckpt.finish(clean=False)


def test_a_job_goes_back_in_mid_run(tmp_path: Path) -> None:
    job, kept = Job(), dict[int, Any]()
    ckpt = job.attach(tmp_path)
    ckpt.resume()
    for step in range(1, 8):
        job.train_one_step()
        ckpt.step()
        ckpt.flush()
        keep(job, kept)(step)
    assert ckpt.resume(step=5) == 5
    assert same(job.state(), kept[5])
    job.train_one_step()
    ckpt.step()
    ckpt.flush()
    keep(job, kept)(6)
    ckpt.finish(clean=False)
    again = Job(seed=2)
    ckpt = again.attach(tmp_path)
    assert ckpt.resume() == 6
    assert same(again.state(), kept[6])
    ckpt.finish(clean=False)


def test_steps_taken_again_in_mid_run_are_none_of_the_jobs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    ckpt = job.attach(tmp_path)
    ckpt.resume()
    for _ in range(7):
        job.train_one_step()
        ckpt.step()
        ckpt.flush()
    assert ckpt.resume(step=6) == 6
    assert "interrupted" not in caplog.text
    ckpt.finish(clean=False)


def test_a_resume_goes_back_to_a_commit_without_the_journal(tmp_path: Path) -> None:
    job, kept, off = Job(), dict[int, Any](), {"every": 2, "journal": {"enabled": False}}
    job.run(job.attach(tmp_path, **off), 7, after=keep(job, kept))
    again = Job(seed=2)
    ckpt = again.attach(tmp_path, **off)
    before = copy.deepcopy(again.state())
    for step in (3, 7, 100):
        with pytest.raises(NothingToResumeError, match=f"no commit is of step {step}"):
            ckpt.resume(step=step)
    assert same(again.state(), before)
    assert ckpt.resume(step=4) == 4
    assert same(again.state(), kept[4])
    ckpt.finish(clean=False)
    third = Job(seed=3)
    ckpt = third.attach(tmp_path, **off)
    assert ckpt.resume() == 4
    ckpt.finish(clean=False)


def test_a_step_behind_a_damaged_record_is_refused_and_nothing_is_saved(tmp_path: Path) -> None:
    job = Job()
    job.run(job.attach(tmp_path), 8)
    damage(tmp_path / "journal/segments/00000006-000001/rank-00000.safetensors")
    again = Job(seed=2)
    ckpt = again.attach(tmp_path)
    with pytest.raises(DriftpointError, match="step 7 cannot be reached"):
        ckpt.resume(step=7)
    with pytest.raises(ConfigError, match="failed midway"):
        ckpt.save(wait=True)
    assert ckpt.resume(step=5) == 5
    ckpt.finish(clean=False)


@pytest.mark.parametrize("step", [None, 9])
@pytest.mark.parametrize("older", [True, False])
def test_a_composite_whose_oldest_run_state_is_damaged_gives_way_to_an_older_one(
    tmp_path: Path, step: int | None, older: bool
) -> None:
    """If those of all are damaged, the composite stays one, and no step behind it is reached."""
    settings: dict[str, Any] = {"every": 2, "policy": {"name": "parity", "k": 2}}
    job, kept = Job(), dict[int, Any]()
    job.run(job.attach(tmp_path, **settings), 9, after=keep(job, kept))
    for damaged in (6,) if older else (6, 4, 2):
        damage_run_state(tmp_path / f"segments/{damaged:08d}-000001")
    again = Job(seed=2)
    ckpt, before = again.attach(tmp_path, **settings), copy.deepcopy(again.state())
    why = "the journal is not followed from 00000008-000001: skipped the run state of 00000006-000001"
    if step is not None and not older:
        with pytest.raises(NothingToResumeError, match=f"no commit is of step 9, .*{why}"):
            ckpt.resume(step=step)
        assert same(again.state(), before)
    assert ckpt.resume(step=step if older else None) == (9 if older else 8)
    assert ckpt.certificate is not None
    assert ckpt.certificate.exact == older
    assert same(again.state(), kept[9]) == older
    assert ckpt.resumed is not None
    assert any(why in note for note in ckpt.resumed.notes)
    ckpt.finish(clean=False)


@pytest.mark.parametrize("torn", [True, False])
def test_a_step_that_the_newest_branch_took_again_is_not_taken_from_one_that_was_left(
    tmp_path: Path, torn: bool
) -> None:
    """The newest branch goes from step 4 to 7. If one of its records is torn, step 7 is refused, although the old one
    has it. Step 9 is on the old branch only: it is restored, with a note."""
    job, kept = Job(), dict[int, Any]()
    job.run(job.attach(tmp_path, every=3), 9, after=keep(job, kept))
    again = Job(seed=2)
    ckpt = again.attach(tmp_path, every=100)
    assert ckpt.resume(step=4) == 4
    torch.manual_seed(99)  # other data
    for _ in range(3):
        again.train_one_step()
        ckpt.step()
    ckpt.finish(clean=False)
    if torn:
        (record,) = (tmp_path / "journal/segments").glob("00000006-000002")
        damage(record / "rank-00000.json")
    third = Job(seed=3)
    ckpt = third.attach(tmp_path, every=100)
    if torn:
        before = copy.deepcopy(third.state())
        with pytest.raises(NothingToResumeError, match="no commit is of step 7, and the journal does not lead to it"):
            ckpt.resume(step=7)
        assert same(third.state(), before)
    else:
        assert ckpt.resume(step=7) == 7
        assert same(third.state(), again.state())
        assert ckpt.resumed is not None and ckpt.resumed.notes == ()
    ckpt.finish(clean=False)
    fourth = Job(seed=4)
    ckpt = fourth.attach(tmp_path, every=100)
    assert ckpt.resume(step=9) == 9
    assert same(fourth.state(), kept[9])
    assert ckpt.resumed is not None
    assert "step 9, 00000009-000001, is of a branch that the job left" in ckpt.resumed.notes
    ckpt.finish(clean=False)


class Wanderer:
    """A job without the journal that saves every so many steps and goes back and forth."""

    def __init__(self, store: Path, every: int, **retention: Any) -> None:
        self.store, self.settings = store, {"every": every, "journal": {"enabled": False}, "retention": retention}
        self.kept = dict[str, Any]()  # states by save
        self.restart()

    def restart(self) -> None:
        self.job = Job(seed=5)
        self.ckpt = self.job.attach(self.store, **self.settings)
        self.ckpt.resume()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.job.train_one_step()
            self.ckpt.step()
            self.ckpt.flush()
            for save in open_catalog(LocalFiles(self.store)).saves()[:1]:
                self.kept.setdefault(save.name, copy.deepcopy(self.job.state()))

    def go_to(self, step: int) -> tuple[str, ...]:
        assert self.ckpt.resume(step=step) == step
        assert self.ckpt.resumed is not None
        return self.ckpt.resumed.notes


def test_a_step_is_taken_from_the_branch_that_the_job_is_on_after_going_up_again(tmp_path: Path) -> None:
    """From 10 to 4, on to 6, up to the old 10, and to 6: that of the first branch, not that of the detour."""
    run = Wanderer(tmp_path, 2, keep_last=50, log_spaced=False)
    run.train(10)
    assert run.go_to(4) == ()
    torch.manual_seed(99)  # other data
    run.train(2)
    run.ckpt.finish(clean=False)
    run.restart()
    assert any("is of a branch that the job left" in one for one in run.go_to(10))
    run.ckpt.finish(clean=False)
    run.restart()
    assert run.go_to(6) == ()
    assert same(run.job.state(), run.kept["00000006-000001"])
    run.ckpt.finish(clean=False)


def test_a_commit_of_the_own_branch_is_reached_though_those_in_between_are_pruned(tmp_path: Path) -> None:
    run = Wanderer(tmp_path, 3, keep_last=2, keep_every=3, log_spaced=False)
    run.train(9)
    run.go_to(3)
    run.ckpt.finish(clean=False)
    run.restart()
    run.go_to(9)
    run.train(3)
    run.go_to(9)
    run.train(1)
    run.ckpt.finish(clean=False)
    run.restart()
    assert all("may be of a branch" in one for one in run.go_to(6))
    assert same(run.job.state(), run.kept["00000006-000001"])
    run.ckpt.finish(clean=False)


def test_commits_that_are_all_gone_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Wanderer(tmp_path, 3)
    run.train(9)
    run.ckpt.finish(clean=False)
    for manifest in (tmp_path / "manifests").iterdir():
        manifest.unlink()
    with caplog.at_level("WARNING", "driftpoint"):
        run.restart()
    assert any("00000009-000001: it was committed" in one for one in caplog.messages)
    run.ckpt.finish(clean=False)


def test_a_resume_with_the_journal_off_tells_what_it_leads_to(tmp_path: Path) -> None:
    job, off = Job(), {"journal": {"enabled": False}}
    job.run(job.attach(tmp_path), 7)
    again = Job(seed=2)
    ckpt = again.attach(tmp_path, **off)
    assert ckpt.resume() == 4
    assert ckpt.resumed is not None
    assert [one for one in ckpt.resumed.notes if "has records up to step 7" in one]
    again.train_one_step()
    ckpt.step()
    ckpt.save(wait=True)
    ckpt.finish(clean=False)
    ckpt = Job(seed=3).attach(tmp_path, **off)
    assert ckpt.resume() == 5
    assert ckpt.resumed is not None and ckpt.resumed.notes == ()
    ckpt.finish(clean=False)


def test_a_journal_that_cannot_be_listed_keeps_no_job_from_its_commit(tmp_path: Path) -> None:
    job, kept = Job(), dict[int, Any]()
    job.run(job.attach(tmp_path), 7, after=keep(job, kept))
    again = Job(seed=2)
    ckpt = again.attach(tmp_path)
    (tmp_path / "journal/segments").rename(tmp_path / "elsewhere")
    (tmp_path / "journal/segments").write_text("a file in place of the directory")
    assert ckpt.resume() == 4
    assert same(again.state(), kept[4])
    ckpt.finish(clean=False)


def test_there_is_no_step_to_go_back_to_in_an_empty_store(tmp_path: Path) -> None:
    ckpt = Job().attach(tmp_path)
    with pytest.raises(NothingToResumeError, match="no commit"):
        ckpt.resume(step=3)
    ckpt.finish(clean=False)


def test_records_of_an_abandoned_branch_are_not_followed(tmp_path: Path) -> None:
    """A job goes back by a resume in mid-run, sees other data, and saves before the step that it had reached."""
    job = Job()
    ckpt = job.attach(tmp_path, every=100)
    ckpt.resume()
    job.train_one_step()
    ckpt.step()
    ckpt.save(wait=True)
    for _ in range(5):
        job.train_one_step()
        ckpt.step()
    ckpt.flush()
    assert len(records(tmp_path)) == 5
    kept = {one.name: one for one in records(tmp_path)}
    hidden = tmp_path / "hidden"
    (tmp_path / "journal/segments").rename(hidden)
    assert ckpt.resume() == 1
    hidden.rename(tmp_path / "journal/segments")
    torch.manual_seed(77)
    for _ in range(2):
        job.train_one_step()
        ckpt.step()
    ckpt.save(wait=True)
    reached = {name: value.clone() for name, value in job.model.state_dict().items()}
    ckpt.finish(clean=False)
    assert {f"{step:08d}-000001" for step in range(4, 7)} <= kept.keys() & {one.name for one in records(tmp_path)}
    assert find_chain(journal_catalog(open_catalog(LocalFiles(tmp_path))), SaveId(3, 2), ()) is None
    job = Job(seed=2)
    ckpt = job.attach(tmp_path, every=100)
    assert ckpt.resume() == 3
    assert same(job.model.state_dict(), reached)
    ckpt.finish(clean=False)


def test_a_composite_that_gives_way_never_gives_way_to_an_abandoned_branch(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"every": 2, "policy": {"name": "parity", "k": 2}}
    job = Job()
    job.run(job.attach(tmp_path, **settings), 13)
    again, kept = Job(seed=5), dict[int, Any]()
    ckpt = again.attach(tmp_path, **settings)
    assert ckpt.resume(step=10) == 10
    torch.manual_seed(99)  # other data
    for step in range(11, 14):
        again.train_one_step()
        ckpt.step()
        ckpt.flush()
        keep(again, kept)(step)
    ckpt.finish(clean=False)
    damage_run_state(tmp_path / "segments/00000010-000002")
    third = Job(seed=9)
    ckpt = third.attach(tmp_path, **settings)
    assert ckpt.resume() == 13
    assert ckpt.resumed is not None and ckpt.resumed.resume_point.save.epoch == 2
    assert ckpt.certificate is not None and ckpt.certificate.exact == same(third.state(), kept[13])
    ckpt.finish(clean=False)


def test_a_composite_that_gave_way_is_taken_where_the_records_turn_out_damaged(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"every": 2, "policy": {"name": "parity", "k": 2}}
    job = Job()
    job.run(job.attach(tmp_path, **settings), 9)
    damage_run_state(tmp_path / "segments/00000006-000001")
    damage_gradient(tmp_path / "journal/segments/00000007-000001")
    again = Job(seed=2)
    ckpt = again.attach(tmp_path, **settings)
    assert ckpt.resume() == 8
    assert ckpt.certificate is not None and not ckpt.certificate.exact
    ckpt.finish(clean=False)
