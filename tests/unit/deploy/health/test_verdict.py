"""The verdict on real stores: what is safe, what needs a look, what is not safe, and what a failure now would cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.format import ago_text, span_text
from deploy.health.checks import Verdict, judge, loss_of_node
from deploy.health.facts import Check, Facts, gather, in_memory
from deploy.report.history import read_history
from store.catalog import mark_suspect, open_catalog
from store.memory.arena import Arena
from store.memory.layout import Generation, Tier
from store.names import SaveId
from store.session import read_epoch
from store.storage.local import LocalFiles
from store.verify import VerifyReport, verify
from tests.support.made_versions import NBYTES, abandon, content, head_of, part_of
from tests.support.processes import holding_lock
from tests.support.seen_runs import SeenRun, verified
from tests.support.stores import flip_byte


@pytest.fixture
def run(tmp_path: Path) -> SeenRun:
    return SeenRun(tmp_path / "store")


def facts(run: SeenRun, step: float, *, checked: VerifyReport | None = None) -> Facts:
    """At the parse_time of ``step``."""
    job_status = read_history(run.trace).job_status if run.trace.exists() else None
    memory = run.root.parent / "memory"
    memory.mkdir(exist_ok=True)
    catalog = open_catalog(LocalFiles(run.root))
    return gather(catalog, run.root, in_memory(memory, catalog), job_status, run.at(step), checked=checked)


def verdict(run: SeenRun, step: float, **more: VerifyReport) -> Verdict:
    return judge(facts(run, step, **more))


def check(found: Verdict, name: str) -> Check:
    return next(one for one in found.checks if one.name == name)


def test_a_running_job_is_safe_and_the_cost_of_a_failure_is_told(run: SeenRun) -> None:
    for step in (580, 590, 600):
        run.save(step)
    with holding_lock(run.root) as pid:
        found = verdict(run, 604)
    assert (found.level, found.title, found.concerns) == ("good", "Safe", ())
    assert found.sentence == (
        "If the job failed now, it would resume at step 600 and lose 4 steps (4.0 s), bit for bit."
    )
    assert check(found, "Newest commit").text == "step 600, 4.0 s ago"
    assert check(found, "Job").text == f"process {pid}"
    assert check(found, "Lost by a failure now").text == "4 steps, 4.0 s of training"


def test_an_estimate_never_goes_beyond_the_next_decision(run: SeenRun) -> None:
    for step in (580, 590, 600):
        run.save(step)
    with holding_lock(run.root):
        assert loss_of_node(facts(run, 607)).steps == 7
        assert loss_of_node(facts(run, 640)).steps == 10


def test_steps_that_the_journal_has_are_not_lost(run: SeenRun) -> None:
    for step in (580, 590, 600):
        run.save(step)
    with holding_lock(run.root):
        found = facts(run, 607)
    assert found.status is not None and found.status.resume is not None
    resume = replace(found.status.resume, journal=605)
    with_journal = replace(found, status=replace(found.status, resume=resume))
    assert (loss_of_node(with_journal).back_to, loss_of_node(with_journal).steps) == (605, 2)
    assert check(judge(with_journal), "A resume gives").note.endswith("the journal leads to step 605")


def test_a_commit_that_the_job_itself_found_not_exact_needs_a_look(run: SeenRun) -> None:
    run.save(590)
    run.store.save(600, differs=("the ranks differ in layers.0",))
    with holding_lock(run.root):
        found = check(verdict(run, 604), "A resume gives")
        said = verdict(run, 604).sentence
    assert (found.level, found.text) == ("look", "step 600, not exact")
    assert "the ranks differ in layers.0" in found.note
    assert "not exactly as it was" in said
    run.store.save(610, layers=("layers.0",), differs=("the ranks differ in layers.0",))
    with holding_lock(run.root):
        found = check(verdict(run, 614), "A resume gives")
    assert found.level == "look" and "the ranks differ in layers.0" in found.note


def test_a_composite_says_how_old_and_where_it_goes_on(run: SeenRun) -> None:
    run.save(580)
    run.save(590, layers=("layers.0",))
    run.save(600, layers=("layers.1",))
    with holding_lock(run.root):
        found = verdict(run, 600)
    assert found.level == "good"
    assert "as a composite whose layers are up to 20 steps old" in found.sentence
    assert "resume at step 590 and lose 10 steps" in found.sentence, "it resumes at its effective step"
    assert check(found, "A resume gives").text == "step 600, composite"


def test_no_job_is_running(run: SeenRun) -> None:
    run.save(590)
    run.save(600)
    run.decide(604)
    found = verdict(run, 4000)
    assert found.level == "good"
    assert found.sentence == (
        "No job is running. A restart now resumes at step 600, 4 steps before the last known step, bit for bit."
    )


def test_commits_that_are_late(run: SeenRun) -> None:
    for step in (480, 540, 600):
        run.save(step)
    with holding_lock(run.root):
        assert verdict(run, 600 + 2 * 60).level == "good"
        late, lost = verdict(run, 600 + 4 * 60), verdict(run, 600 + 11 * 60)
    assert check(late, "Newest commit").level == "look"
    assert "usually one every 1 min" in check(late, "Newest commit").note
    assert (lost.level, check(lost, "Newest commit").level) == ("bad", "bad")


def test_training_that_stands_still(run: SeenRun) -> None:
    for step in (580, 590, 600):
        run.save(step)
    with holding_lock(run.root):
        found = check(verdict(run, 700), "Job")
    assert (found.level, found.note) == ("look", "usually one every 10 s")
    assert "no decision for 1 min" in found.text


def test_saves_that_fail(run: SeenRun) -> None:
    run.save(590)
    run.fail(600)
    with holding_lock(run.root):
        found = check(verdict(run, 601), "Saves")
        assert (found.level, found.text, found.note) == ("look", "1 save failed since", "StorageError")
        run.fail(610)
        run.fail(620)
        assert check(verdict(run, 621), "Saves").level == "bad"
        run.save(630)
        assert check(verdict(run, 631), "Saves").level == "good"


def test_layers_that_are_not_finite(run: SeenRun) -> None:
    run.save(590)
    run.decide(600, sick=(0,))
    with holding_lock(run.root):
        found = verdict(run, 601)
        assert (found.level, found.concerns[0].name) == ("bad", "Finite")
        assert "embed_tokens/fp32" in found.concerns[0].note
        run.decide(610)
        assert check(verdict(run, 611), "Finite").level == "good"


def test_damage_that_is_worked_around(run: SeenRun) -> None:
    run.save(580)
    middle = run.save(590, layers=("layers.0",))
    run.save(600, layers=("norm",))
    run.store.payload(middle).unlink()
    found = verdict(run, 600)
    assert (found.level, found.title) == ("look", "Needs a look")
    assert "with 3 layer slots in an older version because of damage" in found.sentence
    assert check(found, "A resume gives").todo == f"driftpoint verify {run.root}"


def test_an_older_commit_because_the_newest_is_damaged(run: SeenRun) -> None:
    run.save(590)
    flip_byte(run.store.manifest(run.save(600)), 100)
    found = verdict(run, 600)
    assert (found.level, check(found, "A resume gives").text) == (
        "look",
        "step 590, not the newest commit: newer ones are damaged",
    )


def test_an_older_commit_because_jobs_died_of_the_newest(run: SeenRun) -> None:
    run.save(590)
    newest = run.save(600)
    mark_suspect(run.store.files, run.store.store_id, newest, "two attempts died")
    found = verdict(run, 600)
    assert found.level == "look" and "suspect: 00000600-000001" in check(found, "Kept").note
    assert "newer ones are suspect" in check(found, "A resume gives").text


def test_nothing_left(run: SeenRun) -> None:
    run.store.payload(run.save(600)).unlink()
    found = verdict(run, 600)
    assert (found.level, found.sentence) == (
        "bad",
        "None of 1 commit can be resumed: a restart now would lose the whole run.",
    )


def test_nothing_yet(run: SeenRun) -> None:
    assert (verdict(run, 5).level, "start at step 0" in verdict(run, 5).sentence) == ("look", True)
    run.decide(10)
    with holding_lock(run.root):
        found = verdict(run, 12)
    assert (found.level, found.sentence) == (
        "bad",
        "Nothing is saved yet: if the job failed now, it would restart at step 0 (10 steps so far).",
    )


def test_bytes_that_somebody_read(run: SeenRun) -> None:
    save = run.save(600)
    assert check(verdict(run, 601), "Bytes").level == "plain"
    good = check(verdict(run, 601, checked=verified(1, ())), "Bytes")
    assert (good.level, good.text) == ("good", "1 of 1 commit verified, all intact")
    hurt = check(verdict(run, 601, checked=verified(1, (save.name,))), "Bytes")
    assert (hurt.level, hurt.text) == ("look", "1 commit damaged")


def test_memory_that_is_newer_than_every_commit(run: SeenRun) -> None:
    for step in (580, 590, 600):
        run.save(step)
    remember(run, SaveId(603, 1))
    with holding_lock(run.root):
        found = verdict(run, 605)
    assert found.sentence == (
        "If the job failed now, it would resume from memory at step 603 and lose 2 steps (2.0 s); if this node failed, "
        "at step 600 and lose 5 steps (5.0 s), bit for bit."
    )
    assert check(found, "Memory of this node").text == "step 603"


def test_memory_that_no_commit_needs_any_more(run: SeenRun) -> None:
    remember(run, SaveId(595, 1))
    run.save(600)
    found = verdict(run, 600)
    assert "memory" not in found.sentence
    assert "not newer than the commits" in check(found, "Memory of this node").note


def test_memory_that_is_looked_at_again_and_again(run: SeenRun) -> None:
    run.save(600)
    catalog, memory = open_catalog(LocalFiles(run.root)), run.root.parent / "memory"
    assert in_memory(memory, catalog).newest is None
    arena = remember(run, SaveId(603, 1))
    first = in_memory(memory, catalog)
    assert (first.newest, first.alive, in_memory(memory, catalog)) == (SaveId(603, 1), False, first)
    Path(arena.folder, "rank-00000.0.json").unlink()
    assert in_memory(memory, catalog).newest is None


def test_memory_of_another_claim_is_not_believed(run: SeenRun) -> None:
    run.save(600)
    remember(run, SaveId(603, 1), claim="ef" * 16)
    assert check(verdict(run, 605), "Memory of this node").text == "no snapshot"


def test_a_trace_of_another_store_tells_nothing(run: SeenRun, tmp_path: Path) -> None:
    other = SeenRun(tmp_path / "other")
    other.save(600)
    other.restart(600, 600)
    other.decide(900)
    run.save(600)
    run.trace.write_bytes(other.trace.read_bytes())
    found = facts(run, 601)
    assert found.foreign_trace
    assert loss_of_node(found).steps is None


def test_a_trace_that_ends_before_the_newest_incarnation_tells_nothing_of_now(run: SeenRun) -> None:
    for step in (580, 590):
        run.save(step)
    run.store.restart()
    run.store.save(600)
    with holding_lock(run.root):
        found = verdict(run, 607)
    assert found.sentence == (
        "If the job failed now, it would resume at step 600 and lose up to 7.0 s of training, bit for bit."
    )
    assert check(found, "Saves").level == check(found, "Finite").level == "plain"


NONSENSE: list[dict[str, Any]] = [
    {"kind": "decision", "step": 610, "seconds": 610.0, "commits": 0, "drift": [0.5], "sick": [0]},
    {"kind": "decision", "step": 610, "seconds": 610.0, "commits": 0, "sick": [-1]},
    {"kind": "decision", "step": 610, "seconds": 610.0, "commits": 0, "saved": {"77": "raw"}},
    {"kind": "decision", "step": -5, "seconds": 610.0, "commits": 0},
    {"kind": "decision", "step": 610, "seconds": float("inf"), "commits": 0},
    {"kind": "decision", "step": 610, "seconds": float("nan"), "commits": 0, "stall": 1e300},
    {"kind": "commit", "step": 600, "seconds": 610.0, "took": 1.0, "written": 10**400, "sizes": {}},
    {
        "kind": "commit",
        "step": 600,
        "seconds": 610.0,
        "took": 1.0,
        "written": 1,
        "sizes": {"99": [1, "raw", 0.0, None]},
    },
    {"kind": "failed", "step": 10**30, "seconds": 1.0, "reason": "x"},
    {"kind": "resumed", "step": 1, "newest": -1, "seconds": 1.0},
]


@pytest.mark.parametrize("line", NONSENSE)
def test_lines_that_make_no_sense_do_no_harm(run: SeenRun, line: dict[str, Any]) -> None:
    run.save(590)
    run.save(600)
    before = facts(run, 605)
    with run.trace.open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert read_history(run.trace).skipped == 1
    after = replace(facts(run, 605), disk=before.disk)  # other processes write to the disk, too
    assert judge(after) == judge(before)


def test_a_job_line_that_makes_no_sense(run: SeenRun) -> None:
    run.save(600)
    bad = {"kind": "job", "started": 1e300, "epoch": 1, "framework": "x", "world_size": 1, "policy": "p"}
    with run.trace.open("a") as file:
        file.write(json.dumps({**bad, "settings": {"retention": [1]}, "units": []}) + "\n")
        file.write(json.dumps({**bad, "started": 1e9, "settings": {"retention": [1]}, "units": []}) + "\n")
    found = read_history(run.trace)
    assert found.skipped == 1
    assert check(verdict(run, 605), "Kept").level == "good"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.0421, "42 ms"),
        (3.21, "3.2 s"),
        (59.4, "59 s"),
        (60.0, "1 min"),
        (125.0, "2 min 5 s"),
        (3599.9, "60 min"),
        (7325.0, "2 h 2 min"),
        (200_000.0, "2 d 8 h"),
    ],
)
def test_times_as_people_read_them(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


def test_clocks_that_differ() -> None:
    assert (ago_text(-1.0), ago_text(-5000.0), ago_text(5.0)) == ("just now", "in the future", "5.0 s ago")


def remember(run: SeenRun, save: SaveId, claim: str | None = None) -> Generation:
    """A version in memory as a dead process of the newest epoch leaves it."""
    from store.memory.layout import VersionRecord
    from store.schema import READER

    base = run.root.parent / "memory"
    base.mkdir(exist_ok=True)
    store_id = run.store.store_id
    arena = Arena(Tier(base, store_id), save.epoch, 0)
    arena.room(0, NBYTES)
    arena.write_at(0, 0, content(save, 0))
    token = claim or read_epoch(run.store.files, save.epoch).token
    part, head = part_of(save, 0, 1, store_id=store_id), head_of(save, 1, store_id=store_id)
    arena.seal(0, VersionRecord(reader=READER, claim=token, part=part, head=head))
    abandon(arena)
    return Tier(base, store_id).generation(save.epoch)


def test_a_commit_whose_bytes_were_found_damaged_is_not_what_a_resume_gives(run: SeenRun) -> None:
    """Records and sizes are as they should be: only who reads every byte knows."""
    run.save(590)
    newest = run.save(600)
    payload = run.store.payload(newest)
    flip_byte(payload, payload.stat().st_size - 1)
    before = check(verdict(run, 600), "A resume gives")
    assert (before.level, before.text) == ("good", "step 600, exact")
    checked = verify(open_catalog(run.store.files))
    found = check(verdict(run, 600, checked=checked), "A resume gives")
    assert (found.level, found.text) == ("look", "not what was saved at step 600: bytes are damaged")
    assert verdict(run, 600, checked=checked).sentence.endswith("or earlier, because bytes of that commit are damaged.")
    alone = check(verdict(run, 600, checked=verified(1, (newest.name,))), "A resume gives")
    assert alone.level == "bad"
