"""The trace of real training on a real store: what it says is what happened, and it changes nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.report.history import read_history
from monitor.config.load import load_config
from monitor.observe.sketch_meter import Projection
from monitor.telemetry.drift_history import compared_with
from policies.base import Budget, History
from policies.builtin import Observe
from store.catalog import open_catalog
from store.errors import ConfigError, StorageError
from store.names import BUFFER, Unit
from store.retention import Retention, plan_prune
from store.storage.local import LocalFiles
from store.trace import CommitLine, DecisionLine, FailedLine, MovedLine, ResumedLine
from store.verify import verify
from tests.support.internals import history_bytes, tracer_of
from tests.support.jobs import LAYERS, Job, job, same
from tests.support.traced import beside, distances, only, shown, trace_of, traced, trained

WIDE: dict[str, Any] = {"width": 96}
"""Of the three blocks each slot has 9 312 values, more than a sketch keeps whole."""

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "full, compact": {"policy": "full", "encoding": "compact"},
    "full, compact while staging": {"policy": "full", "encoding": "compact", "encode": "staging"},
    "parity": {"policy": {"name": "parity", "k": 3}, "encoding": "compact", "packing": 1},
    "parity in bounds": {"policy": {"name": "parity", "k": 3}, "bounds": {"max_drift": 0.3, "max_staleness": 2}},
    "threshold": {"policy": {"name": "threshold", "threshold": 0.05}, "encoding": "compact"},
    "budget": {"policy": "budget", "budget": {"bytes_per_hour": 1e9, "burst_seconds": 0.3}, "encoding": "compact"},
    "auto": {"policy": "auto", "budget": {"bytes_per_hour": 1e9, "burst_seconds": 0.3}, "encoding": "compact"},
    "budget of time": {"policy": "budget", "budget": {"storage_share": 0.3, "burst_seconds": 0.3}},
    "observe": {"policy": {"name": "observe", "inner": {"name": "threshold", "threshold": 0.05}}},
    "observe budget": {
        "policy": {"name": "observe", "inner": "budget"},
        "budget": {"bytes_per_hour": 1e9, "burst_seconds": 0.3},
        "encoding": "careful",
    },
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", POLICIES)
def test_a_replay_of_what_was_seen_decides_alike(store: Path, name: str) -> None:
    settings = POLICIES[name] | WIDE
    with job(store, **settings) as one:
        reports, _ = trained(one, 9)
    found = only(store)
    policy = load_config(found.job.settings).bounded_policy()
    policy = policy.inner if isinstance(policy, Observe) else policy
    decisions = found.of(DecisionLine)
    assert [line.step for line in decisions] == [report.step for report in reports]
    for line, report in zip(decisions, reports, strict=True):
        stats = shown(found.job, line)
        assert list(report.stats) == stats
        budget = Budget(line.offered, frozenset(), line.per_step, line.most, line.resumed_for)
        again = policy.select(stats, budget, History(line.step, line.commits))
        assert again.choices == report.choices
        chosen = {unit: choice.encoding for unit, choice in (report.saved or {}).items()}
        assert {found.units[at]: encoding for at, encoding in line.saved.items()} == chosen


@pytest.mark.parametrize("name", POLICIES)
def test_moved_is_the_distance_between_live_values(store: Path, name: str) -> None:
    with job(store, **POLICIES[name], **WIDE) as one:
        reports, states = trained(one, 12)
    found = only(store)
    lines = found.of(MovedLine)
    assert [line.step for line in lines] == list(range(2, 12))  # the last is told at a decision that never came
    exact = [unit for unit in found.units if not unit.layer.startswith("blocks")]
    assert len(exact) == 6 and len(found.units) == 15
    for line in lines:
        assert [step - 1 for step in line.since] == compared_with(line.step - 1, 6)
        for then, ratios in line.since.items():
            for unit, true in distances(states[line.step], states[then], LAYERS).items():
                seen = ratios[found.units.index(unit)]
                assert seen == pytest.approx(true, rel=2e-5 if unit in exact else 0.06), (line.step, then, unit)
    assert all(report.skipped in (None, "nothing", "observe") for report in reports)


@pytest.mark.parametrize("name", [name for name in POLICIES if "of time" not in name])  # that goes by the clock
def test_no_more_passes_over_the_state(store: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    project = Projection.project

    def counted(self: Projection, pieces: Any, *rest: Any) -> torch.Tensor:
        passes.append(sum(len(piece) for piece in pieces))
        return project(self, pieces, *rest)

    monkeypatch.setattr(Projection, "project", counted)
    settings = POLICIES[name] | WIDE
    settings = settings | ({"budget": {"bytes_per_hour": 1e15}} if "budget" in settings else {})
    counts = {}
    for enabled in (True, False):
        passes.clear()
        torch.manual_seed(0)
        with job(store.with_name(str(enabled)), trace={"enabled": enabled}, **settings) as one:
            trained(one, 6)
        counts[enabled] = sorted(passes)
    assert counts[True] == counts[False] and counts[True]


def test_training_and_saves_are_the_same_with_it_and_without(store: Path) -> None:
    states = []
    for enabled in (True, False):
        torch.manual_seed(0)
        with job(store.with_name(str(enabled)), trace={"enabled": enabled}, **POLICIES["threshold"]) as one:
            reports, live = trained(one, 5)
        states.append((live[5], [report.choices for report in reports]))
    assert same(states[0][0], states[1][0]) and states[0][1] == states[1][1]
    assert [path.name for path in store.parent.iterdir() if path.is_file()] == ["True.trace.jsonl"]


def test_commits_say_what_the_store_holds(store: Path) -> None:
    settings = POLICIES["parity"] | WIDE | {"retention": {"keep_last": 100}}
    with job(store, **settings) as one:
        trained(one, 7)
    weighed = one.metric("driftpoint_written_bytes_total")
    found, catalog = only(store), open_catalog(LocalFiles(store))
    lines = found.of(CommitLine)
    assert [line.step for line in lines] == [save.step for save in reversed(catalog.saves())] == list(range(1, 8))
    assert sum(line.written for line in lines) == weighed
    drifts = {line.step: line.drift for line in found.of(DecisionLine)}
    for save, line in zip(reversed(catalog.saves()), lines, strict=True):
        manifest = catalog.manifest(save)
        new = {one.unit: one for one in manifest.units if one.save == save.name}
        assert {found.units[at] for at in line.sizes} == set(new)
        assert line.written == manifest.groups[save.name].payload_bytes
        assert 0 < line.took < line.seconds
        for at, (nbytes, encoding, error, drift) in line.sizes.items():
            record = new[found.units[at]]
            assert (nbytes, encoding, error) == (record.nbytes, record.encoding, record.error)
            assert (drift is None) == (line.step == 1)
            assert drifts[line.step][at] is None  # parity does not look


def test_what_observe_would_write_is_told_as_it_would_be_stored(store: Path) -> None:
    policy = {"name": "observe", "inner": {"name": "parity", "k": 3}}
    with job(store, policy=policy, encoding="compact", **WIDE) as one:
        trained(one, 5)
        told = one.metric("driftpoint_observed_written_bytes_total")
        avoided = one.metric("driftpoint_observed_avoided_bytes_total")
    with job(store.with_name("real"), policy=policy["inner"], encoding="compact", **WIDE) as other:
        trained(other, 5)
    assert not store.exists()
    observed, real = only(store), traced(store.with_name("real.trace.jsonl"))[0]
    assert observed.job.observing and not real.job.observing and observed.job.policy == "parity"
    assert [line.saved for line in observed.of(DecisionLine)] == [line.saved for line in real.of(DecisionLine)]
    lines = observed.of(CommitLine)
    assert len(lines) == 5 and all(line.took == 0.0 for line in lines)
    for line, written in zip(lines, real.of(CommitLine), strict=True):
        assert {at: size[1] for at, size in line.sizes.items()} == {at: size[1] for at, size in written.sizes.items()}
        for at, (nbytes, *_) in line.sizes.items():
            assert nbytes == pytest.approx(written.sizes[at][0], abs=8)  # blocks end with parameters, not with units
        assert line.written == sum(size[0] for size in line.sizes.values()) < written.written
        if line.step > 1:
            drifts = observed.of(DecisionLine)[line.step - 1].drift
            assert {at: size[3] for at, size in line.sizes.items()} == {at: drifts[at] for at in line.sizes}
    assert told == sum(line.written for line in lines)
    raw = sum(unit.nbytes for unit in observed.job.units)
    assert avoided == 5 * raw - told and told < 0.3 * 5 * raw


def test_a_unit_that_changed_its_pieces_has_drift_again_once_observed(store: Path) -> None:
    one = Job(store, policy="observe")
    for parameter in one.model.blocks[1].parameters():
        parameter.requires_grad_(False)
    trained(one, 3)
    for parameter in one.model.blocks[1].parameters():
        parameter.requires_grad_(True)
    trained(one, 4)
    one.ckpt.close(save=False)
    last = traced(beside(store))[-1]
    assert None not in last.of(DecisionLine)[-1].drift
    assert {unit.slot for unit in last.units} == {"fp32", "exp_avg", "exp_avg_sq"}


def test_a_restart_appends_and_says_where_it_stands(store: Path) -> None:
    for _ in range(3):
        with job(store) as one:
            trained(one, 2)
    found = traced(beside(store))
    assert [one.job.epoch for one in found] == [1, 2, 3]
    assert [[line.step for line in one.of(ResumedLine)] for one in found] == [[], [2], [4]]
    assert [line.newest for one in found for line in one.of(ResumedLine)] == [2, 4]
    assert [[line.step for line in one.of(DecisionLine)] for one in found] == [[1, 2], [3, 4], [5, 6]]
    assert [[list(line.since) for line in one.of(MovedLine)] for one in found] == [[], [], []]
    assert [[line.commits for line in one.of(DecisionLine)] for one in found] == [[0, 1], [2, 3], [4, 5]]
    for one in found:
        times = [line.seconds for line in one.lines if not isinstance(line, MovedLine)]
        assert times == sorted(times)


def test_after_going_back_nothing_is_compared_with_the_branch_that_was_left(store: Path) -> None:
    with job(store, every=2) as one:
        trained(one, 0)
        for _ in range(7):
            one.step()
        assert one.ckpt.resume() == 6
        for _ in range(5):
            one.step()
    found = only(store)
    assert [line.step for line in found.of(ResumedLine)] == [6]
    at = found.lines.index(found.of(ResumedLine)[0])
    after = [line for line in found.lines[at:] if isinstance(line, MovedLine)]
    assert [(line.step, list(line.since)) for line in after] == []
    before = [line for line in found.lines[:at] if isinstance(line, MovedLine)]
    assert [(line.step, list(line.since)) for line in before] == [(4, [2]), (6, [4, 2])]


def test_a_save_by_hand_is_forced(store: Path) -> None:
    with job(store, every=2) as one:
        trained(one, 0)
        one.step()
        one.ckpt.save(wait=True)
        one.step()
    decisions = only(store).of(DecisionLine)
    assert [(line.step, line.forced, line.interval) for line in decisions] == [(1, True, 2), (2, False, 2)]
    assert all(len(line.saved) == 15 for line in decisions)


def test_busy_and_failed_saves_are_told(store: Path) -> None:
    goes_on, hangs = threading.Event(), threading.Event()

    def hung(operation: str, path: str) -> None:
        if operation == "write" and "segments" in path:
            hangs.set()
            goes_on.wait(180)
            raise StorageError("the disk is gone")

    with job(store, timeouts={"commit": 5}) as one:
        one.ckpt.resume()
        one.step()
        files = one.hook()
        files.before = hung
        one.step(flush=False)
        assert hangs.wait(180)
        one.step(flush=False)
        goes_on.set()
        one.ckpt.flush()
        files.before = lambda operation, path: None
        one.step()
        one.step()
    found = only(store)
    assert [line.skipped for line in found.of(DecisionLine)] == [None, None, "busy", None, None]
    assert found.of(DecisionLine)[2].drift == () and found.of(DecisionLine)[2].saved == {}
    assert [(line.step, line.reason) for line in found.of(FailedLine)] == [(2, "StorageError")]
    assert [line.step for line in found.of(CommitLine)] == [1, 4, 5]
    # Step 2 is measured beside its writing, as far as that gets before the save fails. Step 3 was no decision.
    moved = {line.step: line.since for line in found.of(MovedLine)}
    assert list(moved[2]) == [1] and len(moved[2][1]) == 15
    assert list(moved[4]) == [2, 1] and None not in moved[4][1]
    assert [one is None for one in moved[4][2]] == [one is None for one in moved[2][1]]


@pytest.mark.parametrize("policy", ["full", {"name": "threshold", "threshold": 0.0}])
def test_values_that_are_not_finite_are_null(store: Path, policy: Any) -> None:
    with job(store, policy=policy) as one:
        trained(one, 2)
        with torch.no_grad():
            one.model.head.weight[0, 0] = math.nan
        one.ckpt.save(wait=True)
        one.step()
    found = only(store)
    at = found.units.index(Unit("head", "fp32"))
    looks = policy != "full"
    assert [at in line.sick for line in found.of(DecisionLine)] == [False, False, looks, looks]
    assert found.of(DecisionLine)[2].drift[at] is None
    assert all(at not in line.sizes for line in found.of(CommitLine) if line.step > 2)


def test_the_units_are_told_again_when_they_change(store: Path) -> None:
    one = Job(store)
    for parameter in one.model.blocks[1].parameters():
        parameter.requires_grad_(False)
    trained(one, 3)
    for parameter in one.model.blocks[1].parameters():
        parameter.requires_grad_(True)
    one.step()
    one.step()
    one.ckpt.close(save=False)
    before, after = traced(beside(store))
    assert (before.job.started, before.job.epoch) == (after.job.started, after.job.epoch)
    assert Unit("blocks.1", "frozen") in before.units and Unit("blocks.1", "frozen") not in after.units
    at = before.units.index(Unit("blocks.1", "frozen"))
    assert not before.job.units[at].moving
    for line in before.of(MovedLine):
        assert all(ratios[at] is None and ratios.count(None) == 1 for ratios in line.since.values())
    assert all(len(line.drift) == len(after.units) for line in after.of(DecisionLine))
    assert all(line.step > 4 for line in after.of(MovedLine))


def test_buffers_are_left_out_of_what_moved(store: Path) -> None:
    one = Job(store)
    one.ckpt.close(save=False)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    import monitor

    ckpt = monitor.attach((model, optimizer), {"store": str(store), "every": 1, "metrics": {"enabled": False}})
    ckpt.resume()
    for _ in range(3):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        ckpt.step()
        ckpt.flush()
    ckpt.close(save=False)
    found = traced(beside(store))[-1]
    (line,) = found.of(MovedLine)
    buffers = [at for at, unit in enumerate(found.units) if unit.slot == BUFFER]
    assert buffers and [at for at, ratio in enumerate(line.since[1]) if ratio is None] == buffers


@pytest.mark.parametrize("anchors", [0, 1, 3])
def test_anchors_are_a_setting(store: Path, anchors: int) -> None:
    with job(store, trace={"anchors": anchors}) as one:
        trained(one, 12)
        assert history_bytes(tracer_of(one.ckpt)._history) <= (anchors + 2) * 15 * 4 * 4099 * (anchors > 0)
    assert [len(line.since) for line in only(store).of(MovedLine)] == [
        len(compared_with(number, anchors)) for number in range(1, 11) if anchors
    ]


def test_another_path(store: Path, tmp_path: Path) -> None:
    with job(store, trace={"path": str(tmp_path / "elsewhere" / "run.jsonl")}) as one:
        trained(one, 1)
    assert len(traced(tmp_path / "elsewhere" / "run.jsonl")) == 1
    assert not beside(store).exists()


@pytest.mark.parametrize("inside", ["trace.jsonl", "segments/trace.jsonl", "../store/x", ""])
def test_a_path_in_the_store_is_refused(store: Path, inside: str) -> None:
    with pytest.raises(ConfigError, match="is inside the store"), job(store, trace={"path": f"{store}/{inside}"}):
        pass


def test_a_store_with_a_slash_at_its_end_has_its_trace_beside_it(store: Path) -> None:
    settings = {"store": f"{store}/"}
    assert load_config(settings).trace_path() == beside(store)


def test_the_store_does_not_mind(store: Path) -> None:
    with job(store, retention={"keep_last": 1, "log_spaced": False}) as one:
        trained(one, 4)
    catalog = open_catalog(LocalFiles(store))
    assert verify(catalog).ok
    plan = plan_prune(catalog, Retention(keep_last=1))
    assert plan.blocked is None and plan.unrecognised == () and beside(store).exists()
    assert "trace" not in "".join(str(path.relative_to(store)) for path in store.rglob("*"))


def test_a_trace_that_cannot_be_written_costs_a_warning_and_nothing_else(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beside(store).mkdir()
    with job(store) as one:
        reports, saved = trained(one, 4)
        assert one.metric("driftpoint_failures_total", reason="upkeep") == 1
        assert one.metric("driftpoint_saves_total") >= 3
    assert [report.skipped for report in reports] == [None] * 4
    told = [record.message for record in caplog.records if str(beside(store)) in record.message]
    assert len(told) == 1
    with job(store) as other:
        assert other.ckpt.resume() == 4 and same(other.weights(), saved[4])


def test_a_job_that_lost_its_store_writes_no_more(store: Path) -> None:
    others = set(threading.enumerate())
    with job(store) as one:
        trained(one, 2)
        from store.session import claim_epoch

        claim_epoch(LocalFiles(store), open_catalog(LocalFiles(store)).store_id)
        for _ in range(4):
            one.step()
    for thread in set(threading.enumerate()) - others:
        if thread.name == "driftpoint-trace":  # which a job that lost its store does not wait for
            thread.join(180)
            assert not thread.is_alive()
    found = only(store)
    assert "fenced" not in [line.skipped for line in found.of(DecisionLine)]
    assert [line.reason for line in found.of(FailedLine)] == ["FencedError"]
    assert trace_of(beside(store)).lines[-1] == found.of(FailedLine)[0] or isinstance(found.lines[-1], MovedLine)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(180)
        assert not thread.is_alive()


def test_the_trace_knows_the_epoch_of_a_step_that_is_saved_again(tmp_path: Path) -> None:
    """Otherwise readers take its lines for those of an earlier job."""
    store = tmp_path / "store"
    one = Job(store, policy={"name": "parity", "k": 2})
    trained(one, 2)
    one.ckpt.close()  # saves the rest of step 2, which has a commit
    newest = open_catalog(LocalFiles(store)).saves()[0]
    assert (newest.step, newest.epoch) == (2, 2)
    found = read_history(beside(store)).job_status
    assert found is not None and found.job.epoch == newest.epoch
