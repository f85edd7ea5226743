"""Mutants of fencing and of a job's end: each mechanism, taken away, must be missed by the test that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import store.retention
import store.session
from monitor.memory.tier import MemoryTier
from monitor.save.final_save import LastStep
from monitor.save.saver import Saver
from monitor.save.self_check import SelfCheck
from store.errors import DriftpointError
from store.schema import EpochRecord, ManifestRecord
from store.storage.local import Files
from tests.crash.simulated import SimulatedFiles
from tests.unit.monitor import test_checkpointer_end as end
from tests.unit.monitor import test_checkpointer_end_incomplete as incomplete
from tests.unit.monitor import test_checkpointer_store_away as away
from tests.unit.store import test_session_fencing as fencing

Patch = pytest.MonkeyPatch


def claim_any_epoch(files: Files, store_id: str, *_: Any) -> EpochRecord:
    return store.session.claim_epoch(files, store_id)


def fence_if_not_newest(files: Files, epoch: int) -> None:
    newest = store.session.newest_epoch(files)
    if newest != epoch:
        raise store.session._fenced(epoch, newest)


def fence_a_store_that_is_away(patch: Patch) -> None:
    patch.setattr("monitor.save.save_task.require_present", nothing)
    patch.setattr("store.commit.require_newest", fence_if_not_newest)


def nothing(*_: Any, **__: Any) -> None: ...


def only_settle(saver: Saver, step: int, timeout: float) -> None:
    saver.flush(timeout)
    saver.settle(step, False)


MUTANTS: dict[str, tuple[Callable[[Patch], None], Callable[[Path], object]]] = {
    "memory is given back at any clean end": (
        lambda patch: patch.setattr(MemoryTier, "_superseded", lambda _: True),
        end.test_memory_that_is_newer_than_every_commit_outlives_a_failed_last_save,
    ),
    "memory is given back for a commit with older layers": (
        lambda patch: patch.setattr(ManifestRecord, "oldest", property(lambda manifest: manifest.save)),
        incomplete.test_memory_stays_where_the_newest_commit_has_older_layers,
    ),
    "a save that failed counts as committed": (
        lambda patch: patch.setattr(Saver, "settle_commit", nothing),
        end.test_a_save_that_is_waited_for_and_fails_raises,
    ),
    "a save that is not finished counts as committed": (
        lambda patch: patch.setattr(Saver, "settle_commit", nothing),
        end.test_a_save_that_is_not_finished_in_time_is_no_success,
    ),
    "what a self-check found is forgotten at the next one": (
        lambda patch: patch.setattr(SelfCheck, "compare", lambda *_: ()),
        incomplete.test_what_a_self_check_found_stays_until_another_is_complete,
    ),
    "a branch that was left still counts": (
        lambda patch: patch.setattr(Saver, "abandon", only_settle),
        incomplete.test_a_save_of_a_branch_that_was_left_is_not_the_last_step_of_the_new_one,
    ),
    "the last step is not committed": (
        lambda patch: patch.setattr(LastStep, "commit", nothing),
        end.test_a_clean_end_commits_the_last_step,
    ),
    "deletions without a look at the epoch": (
        lambda patch: patch.setattr(store.retention, "require_newest", nothing),
        lambda _: fencing.test_a_prune_that_slept_through_a_takeover_deletes_nothing_that_the_younger_job_needs(
            SimulatedFiles(), "sync_dir"
        ),
    ),
    "segments go without a look at the present commits": (
        lambda patch: patch.setattr(store.retention, "_groups_of", forget_after_plan()),
        lambda _: fencing.test_a_prune_keeps_the_segments_of_a_commit_that_it_did_not_plan_for(SimulatedFiles()),
    ),
    "a renewal claims any epoch": (
        lambda patch: patch.setattr(fencing, "renew_epoch", claim_any_epoch),
        lambda _: fencing.test_a_job_that_renews_does_not_go_above_its_successor(SimulatedFiles()),
    ),
    "a store that is away fences": (
        fence_a_store_that_is_away,
        lambda tmp_path: away.test_a_store_that_comes_back_is_saved_to_again(tmp_path, again=False),
    ),
}


def forget_after_plan() -> Callable[..., dict[Any, int]]:
    """Return the groups that a manifest needs while a prune is planned, and none afterwards."""
    real, asked = store.retention._groups_of, [0]

    def groups_of(catalog: Any, save: Any) -> dict[Any, int]:
        asked[0] += 1
        return real(catalog, save) if asked[0] == 1 else {}

    return groups_of


@pytest.mark.parametrize("name", MUTANTS)
def test_the_place_of_the_mutant_is_there(name: str, monkeypatch: Patch) -> None:
    MUTANTS[name][0](monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_caught(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    mutate, check = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, DriftpointError)):
        check(tmp_path)
