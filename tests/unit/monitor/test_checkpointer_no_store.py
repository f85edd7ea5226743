"""A store that is not where it should be: refused where the settings say so, and told by a warning otherwise."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.run import places
from monitor.config.load import Config, load_config
from store.errors import ConfigError, NoStoreError
from tests.support.jobs import Job, job


def begun(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings that training begins from nothing."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "begins from nothing" in record.getMessage()
    ]


def required(store: Path) -> dict[str, Any]:
    return {"path": str(store), "create": False}


def test_a_store_that_must_exist_is_not_made(tmp_path: Path) -> None:
    for place in ("nowhere", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(NoStoreError, match="check that its disk is mounted"):
            Job(required(tmp_path / place))
    assert list(tmp_path.iterdir()) == [tmp_path / "empty"]
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_store_that_must_exist_and_does_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = tmp_path / "store"
    with job(store) as one:
        one.ckpt.resume()
        one.step()
    assert len(begun(caplog)) == 1
    caplog.clear()
    with job(required(store)) as two:
        assert two.ckpt.resume() == 1
        two.step()
        assert two.ckpt.config.trace_path() == tmp_path / "store.trace.jsonl"
    assert begun(caplog) == []


@pytest.mark.parametrize("resumes", [True, False])
def test_a_job_that_begins_from_nothing_says_so_once(
    tmp_path: Path, resumes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with job(tmp_path / "store") as one:
        if resumes:
            assert one.ckpt.resume() == 0
        one.step()
        one.step()
    (told,) = begun(caplog)
    assert f"there is no commit in {tmp_path / 'store'}" in told
    assert f"store: {{path: {tmp_path / 'store'}, create: false}}" in told


def test_a_job_that_observes_needs_no_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with job(tmp_path / "store", policy="observe") as one:
        assert one.ckpt.resume() == 0
        one.step()
    assert begun(caplog) == []


def test_a_store_is_a_path_or_a_mapping() -> None:
    plain, made = load_config({"store": "a"}), load_config({"store": {"path": "a"}})
    assert (plain.store_path, plain.creates_store) == (made.store_path, made.creates_store) == ("a", True)
    given = load_config({"store": {"path": "s3://bucket/run", "create": False}})
    assert Config.model_validate(given.model_dump()) == given
    for wrong in ({}, {"path": ""}, {"path": "a", "creat": False}, {"path": "a", "create": "maybe"}, ["a"], True):
        with pytest.raises(ConfigError, match="store"):
            load_config({"store": wrong})


def test_the_supervisor_reads_both(tmp_path: Path) -> None:
    file = tmp_path / "driftpoint.yaml"
    file.write_text("store: {path: runs/a, create: false}\n")
    assert places(file, None)[0].root == Path("runs/a")
    file.write_text("store: {create: false}\n")
    with pytest.raises(ConfigError, match="create: false"):
        places(file, None)
