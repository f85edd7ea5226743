"""The end of a job: what was trained is committed, or is told not to be; memory goes only when a commit is as new."""

from __future__ import annotations

import logging
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from store.errors import SaveError, StorageError, UnsupportedError
from tests.support.hooked import nothing
from tests.support.internals import hold_writer
from tests.support.jobs import Job, committed_steps, job, same
from tests.support.kept import kept_step, memory


def full_disk(operation: str, path: str) -> None:
    """Refuse every write of a segment."""
    if operation == "write":
        raise StorageError(f"cannot write {path}: No space left on device")


def stuck(operation: str, path: str) -> None:
    """Hold the commit up for longer than the job waits."""
    import time

    if operation == "create" and "manifests" in path:
        time.sleep(1.0)


# ---- a save that is waited for


def test_a_save_that_is_waited_for_and_fails_raises(tmp_path: Path) -> None:
    with job(tmp_path / "store", every=100) as one:
        one.step()
        one.hook().before = full_disk
        with pytest.raises(SaveError, match="there is no commit yet"):
            one.ckpt.save(wait=True)
    assert committed_steps(tmp_path / "store") == []


def test_a_save_that_is_not_finished_in_time_is_no_success(tmp_path: Path) -> None:
    with job(tmp_path / "store", every=100, timeouts={"close": 0.2}) as one:
        one.step()
        one.hook().before = stuck
        with pytest.raises(SaveError, match="not enough time"):
            one.ckpt.save(wait=True)
        report = one.ckpt.save(wait=True, strict=False)
        assert report.skipped == "busy"
        assert not report.saved


def test_a_save_that_is_not_strict_warns_and_returns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with job(tmp_path / "store", every=100) as one:
        one.step()
        files = one.hook()
        files.before = full_disk
        with caplog.at_level(logging.WARNING, "driftpoint"):
            report = one.ckpt.save(wait=True, strict=False)
        assert (report.skipped, dict(report.saved or {})) == ("failed", {})
        assert any("step 1 is not committed" in record.getMessage() for record in caplog.records)
        files.before = nothing
        assert one.ckpt.save(wait=True).skipped is None
    assert committed_steps(tmp_path / "store") == [1]


# ---- the last step


def test_a_clean_end_commits_the_last_step(tmp_path: Path) -> None:
    one = Job(tmp_path / "store", every=5)
    for _ in range(7):
        one.step()
    one.ckpt.close()
    assert committed_steps(tmp_path / "store") == [5, 7]
    with job(tmp_path / "store") as other:
        assert other.ckpt.resume() == 7
        assert same(other.weights(), one.weights())


def test_the_last_step_of_a_composite_is_committed_whole(tmp_path: Path) -> None:
    one = Job(tmp_path / "store", policy={"name": "parity", "k": 2})
    for _ in range(4):
        one.step()
    one.ckpt.close()
    with job(tmp_path / "store") as other:
        assert other.ckpt.resume() == 4
        assert other.ckpt.certificate is not None
        assert other.ckpt.certificate.exact


def test_a_step_that_is_committed_is_not_saved_again(tmp_path: Path) -> None:
    one = Job(tmp_path / "store")
    one.step()
    one.ckpt.close()
    assert len(list((tmp_path / "store" / "manifests").iterdir())) == 1


def test_an_end_by_an_error_saves_nothing_more(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Job(tmp_path / "store", every=5).ckpt as ckpt:
        ckpt.step()
        raise ZeroDivisionError
    assert committed_steps(tmp_path / "store") == []


def test_a_close_without_a_save_saves_nothing_more(tmp_path: Path) -> None:
    one = Job(tmp_path / "store", every=5)
    one.step()
    one.ckpt.close(save=False)
    assert committed_steps(tmp_path / "store") == []


def test_an_end_whose_last_save_fails_raises_and_releases_the_store(tmp_path: Path) -> None:
    one = Job(tmp_path / "store", every=5)
    one.step()
    one.hook().before = full_disk
    with pytest.raises(SaveError):
        one.ckpt.close()
    one.ckpt.close()
    with job(tmp_path / "store") as other:
        assert other.ckpt.resume() == 0


# ---- memory


def remembered(tmp_path: Path) -> dict[str, Any]:
    return {"memory": memory(tmp_path / "store")}


def test_memory_that_is_newer_than_every_commit_outlives_a_failed_last_save(tmp_path: Path) -> None:
    one, weights = Job(tmp_path / "store", every=5, **remembered(tmp_path)), {}
    for step in range(1, 9):
        kept_step(one)
        weights[step] = one.weights()
    one.hook().before = full_disk
    with pytest.raises(SaveError):
        one.ckpt.close()
    with job(tmp_path / "store", **remembered(tmp_path)) as other:
        assert other.ckpt.resume() == 8, "the store has step 5"
        assert same(other.weights(), weights[8])


def test_memory_goes_when_the_last_step_is_committed(tmp_path: Path) -> None:
    one = Job(tmp_path / "store", every=5, **remembered(tmp_path))
    for _ in range(8):
        one.step()
    one.ckpt.close()
    assert not [path for path in (tmp_path / "shm").rglob("*") if path.is_file() and "rank" in path.name]
    assert committed_steps(tmp_path / "store") == [5, 8]


def test_what_was_resumed_from_memory_is_committed_at_the_end(tmp_path: Path) -> None:
    one = Job(tmp_path / "store", every=5, **remembered(tmp_path))
    for _ in range(8):
        kept_step(one)
    one.ckpt.finish(clean=False)
    other = Job(tmp_path / "store", every=5, **remembered(tmp_path))
    assert other.ckpt.resume() == 8
    other.ckpt.close()
    assert committed_steps(tmp_path / "store") == [5, 8]


# ---- a job that can never save


class Unstorable:
    """Has a state that cannot be stored without pickling, once training has begun."""

    begun = False

    def state_dict(self) -> dict[str, Any]:
        return {"file": object() if self.begun else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


def test_state_that_can_never_be_stored_is_refused_at_the_first_decision(tmp_path: Path) -> None:
    item = Unstorable()
    with job(tmp_path / "store", state=[item]) as one:
        item.begun = True
        with pytest.raises(UnsupportedError, match="file"):
            one.step()


def test_a_python_object_in_the_optimizer_is_refused_at_the_first_decision(tmp_path: Path) -> None:
    with job(tmp_path / "store") as one:
        one.update()
        one.optimizer.state[next(one.model.parameters())]["note"] = object()
        with pytest.raises(UnsupportedError):
            one.ckpt.step()


def test_a_job_without_any_commit_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "driftpoint"), job(tmp_path / "store") as one:
        one.hook().before = full_disk
        for _ in range(9):
            one.step()
    texts = [record.getMessage() for record in caplog.records]
    found = [
        (int(n), int(m)) for text in texts for n, m in re.findall(r"after (\d+) decisions: .* all (\d+) steps", text)
    ]
    assert found == [(4, 4), (8, 8)]
    assert any("ends without any commit" in text for text in texts)


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_a_first_save_that_is_being_written_is_no_alarm_for_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    monkeypatch.setattr("monitor.telemetry.log._PATIENCE", patience)
    release = threading.Event()
    with caplog.at_level(logging.ERROR, "driftpoint"), job(tmp_path / "store") as one:
        hold_writer(one.ckpt, release)
        for _ in range(6):
            one.update()
            one.ckpt.step()
        release.set()
    said = [record for record in caplog.records if "nothing is committed after 4 decisions" in record.getMessage()]
    assert len(said) == (not patience)


def test_a_job_with_commits_does_not_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "driftpoint"), job(tmp_path / "store") as one:
        for _ in range(6):
            one.step()
    with caplog.at_level(logging.ERROR, "driftpoint"), job(tmp_path / "store") as other:
        other.ckpt.resume()
        other.hook().before = full_disk
        for _ in range(6):
            other.step()
    assert not [record for record in caplog.records if "commit after" in record.getMessage()]
    assert not [record for record in caplog.records if "without any" in record.getMessage()]


@pytest.mark.parametrize("commits", [False, True])
def test_an_end_that_saves_nothing_names_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, commits: bool
) -> None:
    settings = {"every": 2 if commits else 100}
    with caplog.at_level(logging.WARNING, "driftpoint"), job(tmp_path / "store", **settings) as one:
        for _ in range(3):
            one.step()
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            one.ckpt.close()
    (text,) = [record.getMessage() for record in caplog.records if "is not committed to" in record.getMessage()]
    assert "its step 3 " in text and ("the newest commit is that of step 2" in text) is commits
    assert committed_steps(tmp_path / "store") == ([2] if commits else [])


def test_a_job_that_only_observes_loses_nothing_at_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "driftpoint")
    with suppress(KeyboardInterrupt), job(tmp_path / "store", policy="observe", every=2) as one:
        for _ in range(3):
            one.step()
        raise KeyboardInterrupt
    assert not [record for record in caplog.records if "is not committed" in record.getMessage()]
