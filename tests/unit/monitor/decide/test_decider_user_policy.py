"""A policy of the user's in a real job: where it fails, everything is saved, and training goes on."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from store.catalog import open_catalog
from store.certificate import certify
from store.names import Unit
from store.resolve import newest_resumable
from store.schema import ManifestRecord
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.jobs import LAYERS, job, same
from tests.support.policies import policy_file, selecting

RAISES = "if history.step in (3, 4): raise ValueError(f'at step {history.step}')\n"
TURNS = """return Decision({
    one.unit: Choice("raw" if one.position == 0 else None, "the first layer only") for one in stats
})"""
FAILURES = "driftpoint_policy_failures_total"


def manifest(store: Path, step: int) -> ManifestRecord:
    catalog = open_catalog(LocalFiles(store))
    return next(catalog.manifest(save) for save in catalog.saves() if save.step == step)


def test_it_decides_and_is_named_in_the_manifest(tmp_path: Path) -> None:
    with job(tmp_path / "store", policy={"name": policy_file(tmp_path), "every": 5}) as one:
        one.ckpt.resume()
        reports = [one.step() for _ in range(4)]
    assert [len(report.saved) for report in reports if report] == [15, 3, 3, 3]
    found = manifest(tmp_path / "store", 3)
    assert found.policy == "mine"
    assert {record.reason for record in found.units} == {"its turn", ""}


def test_a_file_beside_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import monitor

    folder = tmp_path / "settings"
    folder.mkdir()
    policy_file(folder)
    (folder / "driftpoint.yaml").write_text(
        f"store: {tmp_path}/store\npolicy: {{name: 'my.py:Mine', every: 3}}\nmetrics: {{enabled: false}}\n"
    )
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    with monitor.attach((model, torch.optim.AdamW(model.parameters())), folder / "driftpoint.yaml") as ckpt:
        assert ckpt.config.policy == {"name": f"{folder}/my.py:Mine", "every": 3}


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("raise ValueError('no')", "raised ValueError('no')"),
        ("if stats[0].staleness is None: 1 / 0", "raised ZeroDivisionError('division by zero')"),
        ("raise SystemExit(0)", "raised SystemExit('0')"),
        ("return {}", "broke its contract (select returned {}, not a Decision; "),
        ("return Decision({})", "broke its contract (embed/exp_avg: shown but not decided on"),
        ("return Decision({one.unit: Choice('bf16', 'x') for one in stats})", "encoding 'bf16' may lose bits"),
    ],
)
def test_one_that_fails_at_the_first_decision_leaves_a_full_commit_and_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lines: str, told: str
) -> None:
    policy = policy_file(tmp_path, selecting(lines))
    with caplog.at_level(logging.ERROR), job(tmp_path / "store", policy=policy) as one:
        one.ckpt.resume()
        report = one.step()
        assert report is not None and len(report.saved) == 15
        assert one.metric(FAILURES) == 1
        kept = one.weights()
    (record,) = caplog.records
    assert told in record.message and "at step 1: everything is saved at this decision" in record.message
    found = manifest(tmp_path / "store", 1)
    assert {one.reason.partition(" (")[0] for one in found.units} == {"first save is full"}
    assert all("policy mine " in one.reason and told in one.reason for one in found.units)
    catalog = open_catalog(LocalFiles(tmp_path / "store"))
    assert verify(catalog).ok and certify(newest_resumable(catalog)[0]).exact
    with job(tmp_path / "store", policy="full") as other:
        assert other.ckpt.resume() == 1
        assert same(other.weights(), kept)


def test_where_it_raises_everything_is_saved_and_it_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = policy_file(tmp_path, selecting(RAISES + TURNS))
    with caplog.at_level(logging.ERROR), job(tmp_path / "store", policy=policy) as one:
        one.ckpt.resume()
        saved = [len(report.saved) for _ in range(6) if (report := one.step())]
        assert saved == [15, 3, 15, 15, 3, 3]
        assert one.metric(FAILURES) == 2
    assert one.metric("driftpoint_saves_total") == 6
    (record,) = caplog.records  # two failures of one kind
    assert "policy mine raised ValueError('at step 3') at step 3: everything is saved" in record.message
    assert record.exc_info and str(record.exc_info[1]) == "at step 3"
    reasons = {record.reason for record in manifest(tmp_path / "store", 4).units}
    assert reasons == {"policy mine raised ValueError('at step 4'): saved as under full"}


def test_the_state_saved_in_its_place_resumes_bit_for_bit(tmp_path: Path) -> None:
    policy = policy_file(tmp_path, selecting(RAISES + TURNS))
    with job(tmp_path / "store", policy=policy) as one:
        one.ckpt.resume()
        for _ in range(4):
            one.step()
        kept = one.weights()
    catalog = open_catalog(LocalFiles(tmp_path / "store"))
    assert certify(newest_resumable(catalog)[0]).exact and verify(catalog).ok
    with job(tmp_path / "store", policy=policy) as other:
        assert other.ckpt.resume() == 4
        assert same(other.weights(), kept)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("if history.step == 3: return None", "broke its contract (select returned None, not a Decision; "),
        ("if history.step == 3: return Decision({})", "broke its contract (embed/exp_avg: shown but not decided on"),
        (
            "if history.step == 3: return Decision({one.unit: Choice('bf17', 'x') for one in stats})",
            "broke its contract (embed/exp_avg: encoding 'bf17' is unknown",
        ),
        (
            "if history.step == 3: return Decision({one.unit: Choice('bf16', 'x') for one in stats})",
            "broke its contract (embed/exp_avg: encoding 'bf16' may lose bits and precision is 'exact'",
        ),
        ("if history.step == 3: raise SystemExit(7)", "raised SystemExit('7')"),
        ("if history.step == 3: raise MemoryError", "raised MemoryError()"),
        ("if history.step == 3: self.select(stats, budget, history)", "raised RecursionError("),
        ("if history.step == 3: raise ValueError('a\\nb ' + 'x' * 999)", "raised ValueError('a\\nb xxx"),
    ],
)
def test_whatever_it_does_the_decision_stands(tmp_path: Path, lines: str, told: str) -> None:
    policy = policy_file(tmp_path, selecting(lines + "\n" + TURNS))
    with job(tmp_path / "store", policy=policy) as one:
        one.ckpt.resume()
        assert [len(report.saved) for _ in range(4) if (report := one.step())] == [15, 3, 15, 3]
        assert one.metric(FAILURES) == 1
    (reason,) = {record.reason for record in manifest(tmp_path / "store", 3).units}
    assert reason.startswith(f"policy mine {told}") and reason.endswith(": saved as under full")
    assert len(reason) < 300


def test_it_falls_back_inside_the_bounds_and_in_the_same_encodings(tmp_path: Path) -> None:
    policy = policy_file(tmp_path, selecting(RAISES + TURNS, drift=True))
    with job(tmp_path / "store", policy=policy, encoding="compact") as one:
        one.model.blocks[0].requires_grad_(False)
        one.ckpt.resume()
        one.step(), one.step()
        with torch.no_grad():
            one.optimizer.state[one.model.head.weight]["exp_avg"][0, 0] = float("nan")
        one.update()
        report = one.ckpt.step()
        one.ckpt.flush()
        assert report is not None
        told = "policy mine raised ValueError('at step 3')"
        head = report.choices[Unit("head", "fp32")]
        assert not head.saved and head.reason.startswith("health gate: ") and head.reason.endswith(f" ({told})")
        frozen = report.choices[Unit("blocks.0", "frozen")]
        assert frozen.reason == f"does not move; the version of step 1 holds ({told})" and not frozen.saved
        moments = report.choices[Unit("embed", "exp_avg")]
        assert (moments.encoding, moments.reason) == ("int8-shared-exponent-128", f"{told}: saved as under full")
        assert {unit.layer for unit in report.saved} == {*LAYERS} - {"head", "blocks.0"}


def test_bytes_saved_in_its_place_are_owed(tmp_path: Path) -> None:
    """A policy that spends, and raises at one decision, is given nothing to spend until the debt is paid."""
    body = selecting(
        "if history.step == 3: raise ValueError('no')\n"
        "return Decision({one.unit: Choice(None if one.staleness else 'raw', str(budget.bytes)) for one in stats})",
        more="spends = True",
    )
    settings = {"policy": policy_file(tmp_path, body), "budget": {"bytes_per_hour": 3600.0, "burst_seconds": 60}}
    with job(tmp_path / "store", **settings) as one:
        one.ckpt.resume()
        reports = [report for _ in range(4) if (report := one.step())]
        assert [report.skipped for report in reports] == [None, "nothing", None, "nothing"]
        full = sum(stats.nbytes for stats in reports[0].stats)
        assert one.metric("driftpoint_budget_bytes") < -0.5 * full
        assert one.metric("driftpoint_budget_overdraft_bytes_total") > 0.5 * full
        assert float(reports[3].choices[Unit("head", "fp32")].reason) < -0.5 * full


def test_ours_are_guarded_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from policies.builtin import Parity

    with job(tmp_path / "store", policy="parity") as one:
        one.ckpt.resume()
        one.step()
        monkeypatch.setattr(Parity, "select", lambda *_: 1 / 0)
        report = one.step()
        assert report is not None and len(report.saved) == 15 and one.metric(FAILURES) == 1
        monkeypatch.undo()
        report = one.step()
        assert report is not None and len(report.saved) < 15 and one.metric(FAILURES) == 1


def test_distinct_errors_are_logged_once_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = "if history.step % 3 == 1 and 1 < history.step < 100: raise KeyError(history.step)\n"
    lines += "if history.step % 3 == 2 and 2 < history.step < 100: raise ValueError(history.step)\n"
    with caplog.at_level(logging.ERROR), job(tmp_path / "store", policy=policy_file(tmp_path, selecting(lines))) as one:
        one.ckpt.resume()
        for _ in range(12):
            one.step()
        assert one.metric(FAILURES) == 6
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError, ValueError]


def test_reading_a_store_runs_no_policy(tmp_path: Path) -> None:
    reference = policy_file(tmp_path)
    with job(tmp_path / "store", policy=reference) as one:
        one.ckpt.resume()
        one.step()
    policy_file(tmp_path, "raise SystemExit('run')")
    assert verify(open_catalog(LocalFiles(tmp_path / "store"))).ok
    with job(tmp_path / "store", policy="full") as other:
        assert other.ckpt.resume() == 1
