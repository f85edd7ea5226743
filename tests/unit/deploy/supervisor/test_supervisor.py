"""``driftpoint run`` with real training processes on a real store: they die, are started again, and come to an end."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.catalog import Catalog, mark_suspect, open_catalog
from store.names import SaveId
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.cli import driftpoint
from tests.support.processes import holding_lock
from tests.support.stores import StoreBuilder
from tests.support.supervised import PYTHON, supervised, training

pytestmark = pytest.mark.slow


def catalog(folder: Path) -> Catalog:
    return open_catalog(LocalFiles(folder / "store"))


@pytest.mark.core
def test_killed_and_failed_it_goes_on_to_the_end_as_if_nothing_had_been(tmp_path: Path) -> None:
    dies = [[1, 5, "kill"], [2, 7, 3], [3, 9, "kill"], [4, 11, 1]]
    with supervised(tmp_path, PYTHON + training(tmp_path, dies=dies)) as run:
        assert run.ends() == 0, run.said
        assert run.starts == [0, 4, 6, 8, 10]
        died = run.of("done")[0]["total"]
    whole = tmp_path / "whole"
    whole.mkdir()
    with supervised(whole, PYTHON + training(whole)) as run:
        assert run.ends() == 0, run.said
        assert run.of("done")[0]["total"] == died
    ends = [event for event in (tmp_path / "events.jsonl").read_text().splitlines() if '"end"' in event]
    assert len(ends) == 5
    assert verify(catalog(tmp_path)).ok


def test_what_it_tells(tmp_path: Path) -> None:
    with supervised(tmp_path, PYTHON + training(tmp_path, total=4, dies=[[1, 3, "kill"]])) as run:
        assert run.ends() == 0, run.said
        told = [line for line in run.said.splitlines() if line.startswith("driftpoint run: ")]
        assert told[:2] == [
            "driftpoint run: attempt 1: from the beginning",
            "driftpoint run: attempt 1 ended: SIGKILL; committed up to step 2",
        ]
        assert told[2].startswith("driftpoint run: attempt 2 (after 0.0") and told[2].endswith("resuming from step 2")
        assert [(event["event"], event.get("code")) for event in run.events] == [
            ("begin", None), ("end", -9), ("begin", None), ("end", 0), ("stop", 0),
        ]  # fmt: skip
        assert [event.get("commit") for event in run.events[:4]] == [
            None, "00000002-000001", "00000002-000001", "00000004-000002",
        ]  # fmt: skip


def test_without_getting_further_it_ends_with_93(tmp_path: Path) -> None:
    with supervised(tmp_path, PYTHON + training(tmp_path, dies=[[None, 3, 7]]), "--max-restarts", 2) as run:
        assert run.ends() == 93, run.said
        assert run.starts == [0, 2, 2, 2], "the first one got as far as a commit, which counts for none"
        assert "the command died 3 times in a row without progress" in run.said
        assert "attempt 4: exit code 7, resuming from step 2" in run.said and "driftpoint verify" in run.said
        assert catalog(tmp_path).suspects().why == {}, "there is nothing to fall back to"


def test_a_poisoned_commit_is_passed_over_and_training_goes_on(tmp_path: Path) -> None:
    """Loads, takes a step, so that it is even proven, and dies: the job falls back, and gets further."""
    spec = {"dies": [[1, 7, "kill"]], "poison": [6]}
    with supervised(tmp_path, PYTHON + training(tmp_path, every=3, **spec)) as run:
        assert run.ends() == 0, run.said
        assert run.starts == [0, 6, 6, 3]
        assert "commit 00000006-000001 is suspect" in run.said and "falling back to step 3" in run.said
        assert [e["commit"] for e in run.events if e["event"] == "suspect"] == ["00000006-000001"]
        assert set(catalog(tmp_path).suspects().why) <= {SaveId(6, 1)}
        assert verify(catalog(tmp_path)).ok


def test_a_commit_that_leads_to_nan_is_passed_over_where_nan_ends_the_job(tmp_path: Path) -> None:
    spec = {"dies": [[1, 7, "kill"]], "nan": [6], "settings": {"bounds": {"nonfinite": "raise"}}}
    with supervised(tmp_path, PYTHON + training(tmp_path, every=3, **spec)) as run:
        assert run.ends() == 0, run.said
        assert run.starts == [0, 6, 6, 3]
        assert "NotFiniteError: NaN or Inf at step" in run.said and "ended: exit code 1" in run.said
        assert [e["commit"] for e in run.events if e["event"] == "suspect"] == ["00000006-000001"]
        assert verify(catalog(tmp_path)).ok


def test_what_dies_everywhere_ends_and_no_commit_is_blamed(tmp_path: Path) -> None:
    spec = {"every": 3, "dies": [[1, 7, "kill"]], "poison": [3, 6]}
    with supervised(tmp_path, PYTHON + training(tmp_path, **spec)) as run:
        assert run.ends() == 93, run.said
        assert run.starts == [0, 6, 6, 3, 3]
        assert "commit 00000006-000001 is no longer suspect" in run.said
        assert catalog(tmp_path).suspects().why == {}
        status = driftpoint("status", tmp_path / "store", "--json")
        assert (status.code, status.json["resume"]["step"]) == (0, 6)


def test_a_script_that_cannot_even_begin_blames_no_commit(tmp_path: Path) -> None:
    with supervised(tmp_path, PYTHON + training(tmp_path, total=4)) as run:
        assert run.ends() == 0
    with supervised(tmp_path, PYTHON + training(tmp_path, broken=9)) as run:
        assert run.ends() == 93, run.said
        assert run.said.count("ended: exit code 9") == 4
        assert not any(event["event"] == "suspect" for event in run.events)


def test_total_limit(tmp_path: Path) -> None:
    spec = {"dies": [[None, step, 1] for step in (3, 5, 7, 9)]}
    with supervised(tmp_path, PYTHON + training(tmp_path, **spec), "--max-failures", 2) as run:
        assert run.ends() == 1, run.said
        assert "failed 2 times" in run.said


def test_preempted_by_someone_else_it_starts_again_uncounted(tmp_path: Path) -> None:
    spec = {"dies": [[attempt, 2 * attempt, 75] for attempt in (1, 2)], "total": 6}
    with supervised(tmp_path, PYTHON + training(tmp_path, **spec), "--max-restarts", 0, "--max-failures", 1) as run:
        assert run.ends() == 0, run.said
        assert run.starts == [0, 2, 4]


def test_where_the_store_is_gone_the_job_does_not_begin_anew(tmp_path: Path) -> None:
    """As where its disk is not mounted for a while. When it is back the job goes on."""
    spec = {"dies": [[1, 3, 9]], "total": 6}
    with supervised(tmp_path, PYTHON + training(tmp_path, **spec), "--backoff", 2.5, "--max-restarts", 9) as run:
        run.until(lambda: "attempt 1 ended" in run.said)
        (tmp_path / "store").rename(tmp_path / "away")
        run.until(lambda: "attempt 2 ended" in run.said)
        assert "held step 2 and is now empty or another store: is its disk mounted?" in run.said
        assert not (tmp_path / "store").exists()
        (tmp_path / "away").rename(tmp_path / "store")
        assert run.ends() == 0, run.said
        assert run.starts == [0, 2]


def test_preempted_for_ever_with_nothing_saved_it_ends(tmp_path: Path) -> None:
    with supervised(tmp_path, ["sh", "-c", "exit 75"], "--max-restarts", 2) as run:
        assert run.ends() == 93, run.said
        assert run.said.count("ended: exit code 75") == 3


def test_a_command_that_cannot_be_started_for_a_while_is_tried_again(tmp_path: Path) -> None:
    """A network disk that does not show it for a moment, say. At the first start it is wrong usage."""
    command = tmp_path / "command.sh"
    command.write_text(f"#!/bin/sh\nmv {command} {command}.away; exit 1\n")
    command.chmod(0o755)
    with supervised(tmp_path, [command], "--backoff", 0.5) as run:
        run.until(lambda: "attempt 2 ended: exit code 127" in run.said)
        command.write_text("#!/bin/sh\nexit 0\n")
        command.chmod(0o755)
        assert run.ends() == 0, run.said
        assert f"cannot start '{command}': [Errno 2]" in run.said
    with supervised(tmp_path, [f"{command}.gone"]) as run:
        assert run.ends() == 2, run.said


def test_an_unreadable_store_is_told_and_does_not_stop_the_supervisor(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "STORE.json").write_text("garbage")
    with supervised(tmp_path, ["sh", "-c", "exit 5"], "--max-restarts", 1) as run:
        assert run.ends() == 93
        assert run.said.count("the store cannot be read: STORE.json") >= 3


def test_a_file_where_the_store_should_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with supervised(tmp_path, ["true"]) as run:
        assert run.ends() == 0, run.said
        assert "the store cannot be read" in run.said


def test_a_store_in_use_is_refused_or_waited_for(tmp_path: Path) -> None:
    StoreBuilder(tmp_path / "store").save(10)
    with holding_lock(tmp_path / "store") as pid:
        with supervised(tmp_path, ["touch", tmp_path / "ran"]) as run:
            assert run.ends() == 11
            assert f"in use by process {pid} on this machine" in run.said and "--wait" in run.said
            assert not (tmp_path / "ran").exists()
        with supervised(tmp_path, ["touch", tmp_path / "ran"], "--wait", 0.3) as run:
            assert run.ends() == 11
    with supervised(tmp_path, ["touch", tmp_path / "ran"]) as run:
        assert run.ends() == 0


def test_it_waits_until_the_store_is_free(tmp_path: Path) -> None:
    StoreBuilder(tmp_path / "store").save(10)
    with holding_lock(tmp_path / "store"):
        second = supervised(tmp_path, ["touch", tmp_path / "ran"], "--wait", 60)
        run = second.__enter__()
        run.until(lambda: "waiting up to" in run.said)
        assert not (tmp_path / "ran").exists()
    try:
        assert run.ends() == 0, run.said
        assert (tmp_path / "ran").exists()
    finally:
        second.__exit__(None, None, None)


def test_before_a_restart_the_store_is_waited_for(tmp_path: Path) -> None:
    """As where a file server shows the lock of a rank 0 that hangs on another node."""
    StoreBuilder(tmp_path / "store").save(10)
    script = "until test -e go; do sleep 0.05; done; test -e once || { touch once; exit 1; }"
    with supervised(tmp_path, ["sh", "-c", script]) as run:
        run.until(lambda: "attempt 1:" in run.said)
        with holding_lock(tmp_path / "store"):
            (tmp_path / "go").touch()
            run.until(lambda: "waiting up to 1800 s" in run.said)
            assert "attempt 2" not in run.said
        assert run.ends() == 0, run.said
        assert "attempt 2" in run.said


def test_suspects_from_before_are_respected(tmp_path: Path) -> None:
    with supervised(tmp_path, PYTHON + training(tmp_path, total=4)) as run:
        assert run.ends() == 0
    found = catalog(tmp_path)
    mark_suspect(found.files, found.store_id, SaveId(4, 1), "exit code 1")
    with supervised(tmp_path, PYTHON + training(tmp_path, total=6)) as run:
        assert run.ends() == 0, run.said
        assert run.starts == [0, 2]
    assert catalog(tmp_path).saves()[0] == SaveId(6, 2)
