"""The line that ``attach`` says: true of the job, seen by whoever starts it, once."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from monitor.config.load import load_config
from monitor.events import DecisionEvent
from monitor.telemetry.log import SaveLog, log_startup
from store.location import Mount
from tests.support.cli import environment
from tests.support.internals import job_of
from tests.support.jobs import Model

LOGGER = logging.getLogger("driftpoint")


@pytest.fixture(autouse=True)
def _unset_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a script that never set logging up: pytest's own handlers are taken away for a while."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    LOGGER.manager._clear_cache()
    yield
    LOGGER.manager._clear_cache()


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("monitor.api.mount_of", lambda path: Mount("ext4", "/"))


def _attached(config: Any = None) -> monitor.Checkpointer:
    model = Model()
    return monitor.attach((model, torch.optim.AdamW(model.parameters())), config)


def _said(capsys: pytest.CaptureFixture[str], config: Any = None) -> str:
    _attached(config).close()
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err.removesuffix("\n")


def test_a_scheduler_whose_sigterm_is_heeded_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"store": str(tmp_path / "store")}
    assert "SIGTERM" not in _said(capsys, config)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert "SIGTERM, which Slurm sends, saves and exits" in _said(capsys, config)


def test_attach_alone(capsys: pytest.CaptureFixture[str]) -> None:
    ckpt = _attached()
    said = capsys.readouterr().err
    ckpt.close()
    parameters = sum(one.numel() for one in Model().parameters())
    where = f"http://127.0.0.1:{ckpt.metrics.port}/metrics" if ckpt.metrics.port else "is taken"
    assert said.startswith(
        f"driftpoint: saving all of 5 layers ({parameters} parameters, exact), random generators and 0 objects "
        "in state= to ./driftpoint-checkpoints, every: auto (so that the least time is lost, to a failure 30 min at "
        "most); "
    )
    assert where in said
    assert said.endswith(
        "; nothing to resume; using default settings: `driftpoint init` writes a file to change them\n"
    )
    assert Path("driftpoint-checkpoints/STORE.json").is_file()


def test_a_file_that_was_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    Path("driftpoint.yaml").write_text("every: 5\n")
    _attached().close()
    assert "using default settings: driftpoint.yaml exists but was not passed to attach()" in capsys.readouterr().err


def test_a_put_off_decision_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    for every, level in (("auto", "INFO"), (3, "WARNING")):
        caplog.clear()
        with caplog.at_level(logging.INFO, "driftpoint"):
            SaveLog(load_config({"every": every})).on_decision(DecisionEvent(6, "busy", None, 0.0, None, 0))
        [one] = caplog.records
        assert one.levelname == level
        assert one.getMessage().startswith("no save at step 6: the one before is still being written")
        assert ("`every: auto`" in one.getMessage()) == (every == 3), "advice, where a setting is the reason"


def test_saves_that_take_longer_than_every_are_warned_of_ever_less_often(caplog: pytest.LogCaptureFixture) -> None:
    log = SaveLog(load_config({"every": 3}))
    with caplog.at_level(logging.INFO, "driftpoint"):
        for number in range(1, 10):
            log.on_decision(DecisionEvent(3 * number, "busy", None, 0.0, None, 1))
    assert len(caplog.records) == 9, "each is logged"
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert [text.split(":")[0] for text in warned] == [f"no save at step {3 * number}" for number in (1, 2, 4, 8)]
    assert "8 times so far" in warned[-1]
    for number in range(20):
        log.on_decision(DecisionEvent(100 + number, None, None, 0.0, None, 1))
    log.on_decision(DecisionEvent(120, "busy", None, 0.0, None, 1))
    assert caplog.records[-1].levelname == "WARNING", "after a time without, it is news again"


QUIET = {"metrics": {"enabled": False}}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"every": 20},
            (
                "saving all of 5 layers (266 parameters, exact), random generators and 0 objects in state= to "
                "./driftpoint-checkpoints, every 20 steps; the store takes up to 41.5 kB (13 commits of 3.19 kB), "
                "fewer where that is over 80% of its disk; no metrics (metrics.enabled: false); nothing to resume"
            ),
        ),
        (
            {"every": 1, "encoding": "compact"},
            "not exact: rounded to int16-shared-exponent, int8-log2, int8-shared-exponent-128), random",
        ),
        (
            {"policy": "parity", "every": 1},
            "saving the choice of policy parity from 5 layers (266 parameters, stored without rounding), random",
        ),
        (
            {"policy": "observe", "every": 1},
            "measuring 5 layers (266 parameters), at every step, and saving nothing (policy observe); no metrics",
        ),
        ({"store": "mine"}, "to mine, every: auto"),
        (
            {"every": 20, "retention": {"keep_last": 1, "log_spaced": False, "keep_every": 500, "max_share": None}},
            "the store takes up to 6.38 kB (2 commits of 3.19 kB), and one commit more every 500 steps; no metrics",
        ),
        (
            {"every": 20, "retention": {"keep_last": 1, "log_spaced": False, "weights_every": 500, "max_share": None}},
            "the store takes up to 12.8 kB (4 commits of 3.19 kB), and the weights alone of 10 commits; no metrics",
        ),
    ],
)
def test_it_says_what_was_decided(capsys: pytest.CaptureFixture[str], settings: dict[str, Any], told: str) -> None:
    said = _said(capsys, {**QUIET, **settings})
    assert told in said
    assert "default settings" not in said


def test_a_store_that_something_empties(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monitor.api.mount_of", lambda path: Mount("overlay", "/"))
    assert "to ./driftpoint-checkpoints (on overlay: it goes with the container), every" in _said(capsys, QUIET)


def test_commits_and_the_resume(capsys: pytest.CaptureFixture[str]) -> None:
    first = _attached(QUIET)
    assert first.resume() == 0
    job_of(first).adapter.module.zero_grad()
    first.save(wait=True)
    first.close()
    assert capsys.readouterr().err.count("\n") == 1
    second = _attached(QUIET)
    assert "; ckpt.resume() continues from its newest commit\n" in capsys.readouterr().err
    assert second.resume() == 0
    said = "driftpoint: resumed step 0 from ./driftpoint-checkpoints (exact: the saved state, to the last bit)\n"
    assert capsys.readouterr().err == said
    second.close()


def test_whoever_set_logging_up_gets_it_there_and_only_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    monkeypatch.setattr(logging.getLogger(), "handlers", [Keeping()])
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    LOGGER.manager._clear_cache()
    log_startup("hello")
    assert (records, capsys.readouterr().err) == (["hello"], "")


def test_our_logger_can_be_silenced(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOGGER, "level", logging.ERROR)
    LOGGER.manager._clear_cache()
    log_startup("hello")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("count", "told"), [(999, "999"), (999_900, "1 M"), (109_500_000, "110 M"), (405e9, "405 G")])
def test_numbers_of_parameters(count: float, told: str) -> None:
    from monitor.api import shortened

    assert shortened(int(count)) == told


def test_a_layer_is_no_layers(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 2)
    monitor.attach((model, torch.optim.SGD(model.parameters())), QUIET).close()
    assert "saving all of 1 layer (8 parameters" in capsys.readouterr().err


_WARNS = """
import logging, sys
exec(sys.argv[1])
import monitor.telemetry.log as log
log.warn_of_beginning("100% %s")
logging.getLogger("other").warning("theirs")
"""


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        ("", "driftpoint: training begins"),
        ("logging.basicConfig()", "WARNING:driftpoint:training begins"),
        ("logging.getLogger('driftpoint').addHandler(logging.StreamHandler())", "training begins"),
        ("logging.basicConfig(format='%(name)s %(message)s')", "driftpoint training begins"),
    ],
)
def test_a_warning_has_our_name_where_logging_is_not_configured(configured: str, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WARNS, configured], check=True, capture_output=True, text=True, env=environment()
    )
    first, second = done.stderr.splitlines()
    assert first.startswith(f"{expected} from nothing: there is no commit in 100% %s. ")
    assert "driftpoint" not in second and second.endswith("theirs")
