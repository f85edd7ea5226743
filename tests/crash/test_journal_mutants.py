"""Mutants of the journal: each line that keeps a replay exact, changed in turn, must be missed by the check it names.

A mutant is the product's own function with one place of its source changed.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import monitor.checkpointer
import store.journal
from monitor.resume import journal_replay
from monitor.resume.journal_replay import Replay
from monitor.save.journaled_saver import JournaledSaver
from store.errors import DriftpointError
from tests.crash import test_journal_sweep as sweep
from tests.unit.monitor.save import test_journal as replayed
from tests.unit.monitor.save import test_journal_back as back
from tests.unit.monitor.save import test_journal_interrupted as interrupted
from tests.unit.monitor.save import test_journal_records as kept

Patch = pytest.MonkeyPatch
Check = Callable[[Path, Patch], object]
PARITY = {"name": "parity", "k": 2}


def changed(patch: Patch, owner: Any, name: str, old: str, new: str) -> None:
    """Put a function in place of itself, with one place of its source changed."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, source
    source = source.replace(old, new).replace("super()", f"super({getattr(owner, '__name__', '')}, self)")
    found: dict[str, Any] = {}
    exec(compile(source, "<mutant>", "exec"), vars(sys.modules[function.__module__]), found)
    patch.setattr(owner, name, found[name])
    for module in list(sys.modules.values()):  # those that import it by name
        if vars(module).get(name) is function:
            patch.setattr(module, name, found[name])


def after_a_crash(*_: Any) -> None:
    sweep.test_a_power_loss_after_a_crash()


def power_loss(*_: Any) -> None:
    """The sweep, where it was just told that a step is durable."""
    run = sweep.two_jobs()
    sweep.checked(run, [at for at, _ in run.told])


def damaged(how: str) -> Check:
    return lambda path, _: replayed.test_a_damaged_record_ends_the_replay_before_it(path, how)


def replays(policy: Any) -> Check:
    return lambda path, _: replayed.test_a_job_that_died_goes_on_from_the_step_before(path, policy)


def beside(case: str) -> Check:
    return lambda path, _: interrupted.test_a_resume_gives_the_state_of_the_step_that_it_names(path, case)


def plain(test: Callable[[Path], object]) -> Check:
    return lambda path, _: test(path)


MUTANTS: dict[str, tuple[Any, str, str, str, Check]] = {
    "the names in a record's directory are not synced": (
        JournaledSaver, "_write", "self._journal.sync_dir(segment_dir(draft.save))", "pass", power_loss),
    "the name of a record's directory is not synced": (
        JournaledSaver, "_write", "self._journal.sync_dir(SEGMENTS)", "pass", power_loss),
    "the directories above are not synced": (
        JournaledSaver, "_write", "ensure_dir(self._session.files, f\"{JOURNAL}/{SEGMENTS}\")",
        "self._journal.make_dir(\"\")", after_a_crash),
    "a record is followed without a look at what it continues": (
        store.journal, "_ahead", "by_step.get(step, ()), names)", "by_step.get(step, ()))",
        plain(back.test_records_of_an_abandoned_branch_are_not_followed)),
    "a record that is missing is passed over": (
        store.journal, "_ahead", "            return\n",
        "            if step > 99:\n                return\n            names = frozenset()\n            continue\n",
        damaged("gone")),
    "a version of another branch is taken for one of this": (
        store.journal, "find_chain", "<= names:", "<= names and False:",
        plain(replayed.test_a_layer_of_another_branch_is_not_joined)),
    "hashes are not checked": (Replay, "_read", "if values.bad:", "if False:", damaged("gradient flipped")),
    "samples are not compared": (
        Replay, "_check_sample", "if same and not", "if False and not", beside("weights clamped through data")),
    "records are never removed": (
        JournaledSaver, "_prune_records", "ledger.newest != last", "False",
        plain(kept.test_records_go_once_two_commits_do_not_need_them)),
    "records are removed that a composite needs": (
        JournaledSaver, "_prune_records", "needed.append(min(", "needed.append(max(",
        plain(kept.test_records_that_a_composite_needs_stay)),
    "records are removed that an older commit needs": (
        JournaledSaver, "_prune_records", "min(needed) if len(needed) > 1 else 0", "max(needed)",
        plain(kept.test_records_that_lead_to_the_newest_commit_stay)),
    "a job that lost the store removes records": (
        store.journal, "prune_journal", "require_newest(store, epoch)", "pass",
        plain(kept.test_a_job_that_lost_the_store_removes_no_records)),
    "the hyperparameters are those after the step": (
        JournaledSaver, "_record", '"groups": made.groups',
        '"groups": [one for n in made.members for one in job.adapter.step_inputs(n)[0]]', replays("full")),
    "the random state of the step is not restored": (
        Replay, "_repeat_step", 'if record.stepped["rng"] is not None:', "if False:",
        plain(replayed.test_an_optimizer_that_draws_random_numbers)),
    "a step that was skipped is taken": (
        Replay, "_repeat_step", 'in record.stepped["members"]', "in range(1)",
        plain(replayed.test_a_skipped_optimizer_step_is_a_step)),
    "newer layers are not set at their step": (
        Replay, "run", "self._set_versions(later.pop(record.step.save.step, ()))", "pass",
        replays(PARITY)),
    "a composite that was not joined counts": (
        Replay, "run", "if done < newest:", "if False:",
        plain(replayed.test_a_composite_that_is_not_joined_is_resumed_as_one_by_any_implementation)),
    "buffers are not loaded": (Replay, "_finish", "read.load(self._held)", "pass", replays("full")),
    "a save does not wait for the records before it": (
        JournaledSaver, "_segment", "while not (", "while not (True or ",
        kept.test_a_save_is_written_after_the_records_before_it),
    "a changed state is recorded": (
        JournaledSaver, "_is_whole", "self._changes != self._updates or self._is_changed()", "False",
        plain(interrupted.test_moments_that_a_script_changes_are_not_those_of_the_record)),
    "what follows a step that was gone back to keeps its names": (
        JournaledSaver, "resumed", "self._renewing or self._recorded", "self._renewing",
        plain(back.test_a_job_goes_back_in_mid_run)),
    "a step that was gone back to is not committed": (
        monitor.checkpointer.Checkpointer, "resume", "self.save(wait=True)", "pass",
        lambda path, _: back.test_a_resume_goes_back_to_a_step_and_a_failure_after_it_does_not_return(
            path, "full", 7)),
    "an older commit is preferred although its records end before": (
        journal_replay, "chain_of", "reached.step >= wanted", "True",
        plain(replayed.test_without_the_records_between_a_damaged_slot_is_replaced_by_its_older_version)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_the_place_of_the_mutant_is_there(name: str, monkeypatch: Patch) -> None:
    changed(monkeypatch, *MUTANTS[name][:4])


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_caught(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    owner, function, old, new, check = MUTANTS[name]
    changed(monkeypatch, owner, function, old, new)
    with pytest.raises((AssertionError, pytest.fail.Exception, DriftpointError)):
        check(tmp_path, monkeypatch)
