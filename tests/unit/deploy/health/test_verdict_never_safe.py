"""Never called safe when it is not: what a job that hangs, died, or is somewhere else looks like from files alone."""

from __future__ import annotations

import socket
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deploy.health.checks import Verdict, judge
from deploy.health.facts import Check, Facts, gather, in_memory
from deploy.report.history import read_history
from deploy.report.page import build_report
from deploy.store_status import store_status
from store.catalog import open_catalog
from store.location import store_place
from store.names import SaveId, manifest_path
from store.session import IncarnationCount, claim_epoch, mark_closed, new_incarnation
from store.storage.local import LocalFiles
from store.verify import VerifyReport
from tests.support.processes import holding_lock
from tests.support.seen_runs import SeenRun, verified
from tests.support.stores import StoreBuilder, flip_byte


@pytest.fixture
def run(tmp_path: Path) -> SeenRun:
    """One whose epoch says that a job owns it."""
    made = SeenRun(tmp_path / "store")
    claim(made)
    return made


def claim(run: SeenRun) -> None:
    """The next incarnation, as a job begins it."""
    store = run.store
    store.epoch = claim_epoch(store.files, store.store_id, new_incarnation(IncarnationCount(), 1)).epoch
    run.begin()


def save(run: SeenRun, step: int) -> SaveId:
    """A commit that says that it was made when its step was."""
    run.store.created = datetime.fromtimestamp(run.at(step), UTC).isoformat()
    return run.save(step)


def facts(run: SeenRun, step: float, *, traced: bool = True, checked: VerifyReport | None = None) -> Facts:
    """At the parse_time of ``step``."""
    catalog = open_catalog(LocalFiles(run.root))
    memory = run.root.parent / "memory"
    memory.mkdir(exist_ok=True)
    job_status = read_history(run.trace).job_status if traced and run.trace.exists() else None
    return gather(catalog, run.root, in_memory(memory, catalog), job_status, run.at(step), checked=checked)


def verdict(run: SeenRun, step: float, *, traced: bool = True, checked: VerifyReport | None = None) -> Verdict:
    return judge(facts(run, step, traced=traced, checked=checked))


def check(found: Verdict, name: str) -> Check:
    return next(one for one in found.checks if one.name == name)


def test_commits_that_are_late_without_a_trace(run: SeenRun) -> None:
    for step in (480, 540, 600):
        save(run, step)
    with holding_lock(run.root):
        assert verdict(run, 610, traced=False).level == "good"
        assert verdict(run, 600 + 4 * 60, traced=False).level == "look"
        assert verdict(run, 600 + 11 * 60, traced=False).level == "bad"


def test_one_commit_and_then_none_for_hours(run: SeenRun) -> None:
    save(run, 10)
    with holding_lock(run.root):
        assert verdict(run, 60, traced=False).level == "good"
        assert check(verdict(run, 10 + 7200, traced=False), "Newest commit").level == "look"


def test_a_job_that_hangs_before_its_first_decision(run: SeenRun) -> None:
    for step in (480, 540, 600):
        save(run, step)
    run.started += 700
    claim(run)
    with holding_lock(run.root):
        assert check(verdict(run, 5), "Job").level == "good"
        hung = verdict(run, 5000)
    assert check(hung, "Job").level == "look" and "no decision for" in check(hung, "Job").text
    assert hung.level == "bad", "and no commit for ten times as long as usual"


def test_an_interval_that_grows_is_no_lateness(run: SeenRun) -> None:
    for step, interval in ((3, 3), (6, 12), (18, 48), (66, 192), (258, 768)):
        save(run, step)
        run.decide(step, interval=interval)
    with holding_lock(run.root):
        assert verdict(run, 258 + 700).level == "good", "the job said when it decides next"
        assert verdict(run, 258 + 768 * 4).level == "look"
        assert verdict(run, 258 + 768 * 11).level == "bad"


@pytest.mark.parametrize(("skipped", "level"), [("disagree", "bad"), ("unsupported", "bad"), ("storage", "look")])
def test_decisions_that_save_nothing_and_never_will(run: SeenRun, skipped: str, level: str) -> None:
    for step in (580, 590, 600):
        save(run, step)
    run.decide(610, drift=None, skipped=skipped)
    with holding_lock(run.root):
        found = verdict(run, 611)
        assert (check(found, "Saves").level, found.level) == (level, level)
        save(run, 620)
        assert verdict(run, 621).level == "good"


def test_a_job_that_died(run: SeenRun) -> None:
    for step in (580, 590, 600):
        save(run, step)
    died = verdict(run, 700)
    assert (died.level, check(died, "Job").text) == ("look", "ended unexpectedly")
    mark_closed(run.store.files, run.store.store_id, run.store.epoch, 600.0)
    ended = verdict(run, 700)
    assert (ended.level, check(ended, "Job").text) == ("good", "ended cleanly")


def test_a_job_on_another_machine_whose_trace_is_not_here(run: SeenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (480, 540, 600):
        save(run, step)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    lives, silent = verdict(run, 650, traced=False), verdict(run, 4000, traced=False)
    assert lives.level == "good" and lives.sentence.startswith("If the job failed now")
    assert (silent.level, check(silent, "Job").text) == ("look", "unknown")
    assert silent.sentence.startswith("No running job is visible from here.")


def test_a_job_of_this_machine_whose_store_is_in_a_bucket(run: SeenRun) -> None:
    for step in (580, 590, 600):
        save(run, step)
    lives = replace(facts(run, 605), root=store_place("s3://bucket/runs/a"))
    dies = replace(facts(run, 1000), root=store_place("s3://bucket/runs/a"))
    assert lives.running and judge(lives).level == "good", "no lock tells of it: it writes its trace"
    assert check(judge(dies), "Job").text == "ended unexpectedly"
    assert check(judge(replace(dies, job_status=None)), "Job").text == "unknown"


def test_damage_of_an_older_commit(run: SeenRun) -> None:
    old = save(run, 590)
    save(run, 600)
    flip_byte(run.store.manifest(old), 100)
    with holding_lock(run.root):
        found = verdict(run, 601)
        read = verdict(run, 601, checked=verified(2, (), ("header of x is not what was written",)))
    assert (found.level, check(found, "Bytes").text) == ("look", "1 problem found")
    assert check(read, "Bytes").text == "2 problems found"


def test_a_commit_of_the_future(run: SeenRun) -> None:
    for step in (580, 590, 600):
        save(run, step)
    with holding_lock(run.root):
        assert verdict(run, 600 - 60).level == "good", "clocks differ a little"
        found = check(verdict(run, 600 - 3600), "Newest commit")
    assert (found.level, found.text) == ("look", "step 600, in the future")


class Pruned(LocalFiles):
    """A store of which a job deletes a commit, having made another one, when ``path`` is read."""

    path = ""
    then = staticmethod(lambda: None)

    def read(self, path: str, limit: int) -> bytes:
        if path == self.path:
            self.path = ""
            self.then()
        return super().read(path, limit)


def test_what_is_pruned_meanwhile_is_no_damage(tmp_path: Path) -> None:
    store = StoreBuilder(tmp_path / "store", world_size=1)
    old, _ = store.save(10), store.save(20)

    def prune() -> None:
        store.save(30)
        store.manifest(old).unlink()

    files = Pruned(store.root)
    files.path, files.then = manifest_path(old), prune  # type: ignore[assignment]
    found = store_status(open_catalog(files), store.root)
    assert found.problems == ()
    assert found.resume is not None and found.resume.step == 30


def test_a_store_without_its_manifests_has_a_page(run: SeenRun, tmp_path: Path) -> None:
    save(run, 600)
    run.store.manifest(SaveId(600, run.store.epoch)).unlink()
    run.store.manifest(SaveId(600, run.store.epoch)).parent.rmdir()
    made = build_report(run.root, None, tmp_path, verify=False)
    assert made.verdict.level == "bad"
    assert made.exit_code != 0
