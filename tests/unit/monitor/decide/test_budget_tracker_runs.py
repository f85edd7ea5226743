"""Policy ``budget`` in real training on a real store: the bytes hold over every window, and what it leaves resumes."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from monitor.config.schema import ENCODINGS
from policies.encodings import expected_bytes
from store.catalog import open_catalog
from store.certificate import certify
from store.errors import ConfigError
from store.names import BUFFER, FROZEN, RAW, SaveId, Unit
from store.resolve import newest_resumable
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.jobs import Job, job
from tests.support.slow import others_slow

RATE = 300_000.0
"""Bytes a second. The largest unit has 16 640 bytes raw, and the run state takes 11 000 at every save."""

BURST = 0.1
"""Seconds: 30 000 bytes, of the 157 000 that everything takes."""

SETTINGS: dict[str, Any] = {
    "width": 64,
    "policy": "budget",
    "budget": {"bytes_per_hour": RATE * 3600, "burst_seconds": BURST},
    "retention": {"keep_last": 10_000},
}


COMPACT = ENCODINGS["compact"]


@dataclass(frozen=True)
class Moment:
    """A decision: when it began and ended, and the live state as of its step."""

    step: int
    began: float
    ended: float
    state: dict[str, torch.Tensor]


def trained(one: Job, commits: int) -> list[Moment]:
    """Training until so many saves are committed."""
    one.ckpt.resume()
    moments = []
    deadline = time.monotonic() + 180
    while one.metric("driftpoint_saves_total") < commits:
        assert time.monotonic() < deadline, "no bytes came to be at hand"
        began = time.monotonic()
        report = one.step()
        assert report is not None and report.skipped in (None, "nothing")
        moments.append(Moment(report.step, began, time.monotonic(), one.weights()))
    return moments


def written(store: Path) -> dict[int, int]:
    """Payload bytes of every commit, by step."""
    catalog = open_catalog(LocalFiles(store))
    manifests = {save: catalog.manifest(save) for save in catalog.saves()}
    return {save.step: manifests[save].groups[save.name].payload_bytes for save in manifests}


@pytest.mark.parametrize("encoding", others_slow(["raw", "compact"]))
def test_over_every_window_no_more_is_written_than_was_set(tmp_path: Path, encoding: str) -> None:
    with job(tmp_path / "store", encoding=encoding, **SETTINGS) as one:
        moments = {moment.step: moment for moment in trained(one, 12)}
    sizes = written(tmp_path / "store")
    assert len(sizes) >= 12
    first, *later = sorted(sizes)
    assert all(sizes[step] < sizes[first] for step in later)
    # The size of the run state depends on counters in it, and so is known to within some bytes only.
    for begin, step in enumerate(later):
        for last in range(begin, len(later)):
            window = moments[later[last]].ended - moments[step].began
            total = sum(sizes[one] for one in later[begin : last + 1])
            assert total <= RATE * window + RATE * BURST + 512
    assert one.metric("driftpoint_budget_overdraft_bytes_total") == 0
    assert verify(open_catalog(LocalFiles(tmp_path / "store"))).ok


@pytest.mark.slow
def test_the_share_of_time_that_training_waits_holds_in_a_real_run(tmp_path: Path) -> None:
    share, burst = 0.3, 10.0
    settings = SETTINGS | {"budget": {"stall_share": share, "burst_seconds": burst}}
    waits: list[tuple[float, float, float]] = []
    with job(tmp_path / "store", **settings) as one:
        one.ckpt.resume()
        saves = 0
        while saves < 4:
            time.sleep(0.3)  # the step of a larger model
            began = time.monotonic()
            report = one.step()
            assert report is not None and report.skipped in (None, "nothing", "busy")
            if report.skipped is None:
                saves += 1
            if saves > 1:
                waits.append((began, time.monotonic(), report.stall_seconds))
            assert len(waits) < 1000, "nothing was ever affordable"
    worst = max(wait for _, _, wait in waits)
    for first, (began, _, _) in enumerate(waits):
        total = 0.0
        for _, ended, wait in waits[first:]:
            total += wait
            assert total <= share * (ended - began) + share * burst + 2 * worst


@pytest.mark.slow
def test_what_it_leaves_resumes_each_unit_from_the_step_that_is_recorded(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with job(store, **SETTINGS) as one:
        states = {moment.step: moment.state for moment in trained(one, 8)}
    resolution, _ = newest_resumable(open_catalog(LocalFiles(store)))
    steps = {unit: version.record.version.step for unit, version in resolution.versions.items()}
    assert len(set(steps.values())) > 1
    assert not certify(resolution).exact
    with job(store, **SETTINGS, resume={"at": "newest"}) as other:
        assert other.ckpt.resume() == resolution.manifest.step
        found = other.weights()
        for key, values in found.items():
            fqn, slot = key.split("/")
            layer = next(name for name in other.ckpt.layers if fqn.startswith(f"{name}."))
            assert torch.equal(values, states[steps[Unit(layer, slot)]][key])
        trained(other, 3)


def test_a_save_by_hand_is_full_and_paid_for_afterwards(tmp_path: Path) -> None:
    poor = SETTINGS | {"budget": {"bytes_per_hour": 3600.0, "burst_seconds": 1e5}}
    with job(tmp_path / "store", **poor) as one:
        trained(one, 1)
        report = one.ckpt.save(wait=True)
        assert report.skipped is None and {shown.unit for shown in report.stats} == set(report.saved or {})
        assert one.metric("driftpoint_budget_overdraft_bytes_total") > 100_000
        assert one.metric("driftpoint_budget_bytes") < -100_000
        later = one.step()
        assert later is not None and later.skipped == "nothing"


def test_bounds_hold_where_the_budget_cannot_pay_for_them(tmp_path: Path) -> None:
    poor = SETTINGS | {"budget": {"bytes_per_hour": 3600.0}, "bounds": {"max_staleness": 3}}
    with job(tmp_path / "store", **poor) as one:
        one.ckpt.resume()
        for _ in range(12):
            report = one.step()
            assert report is not None
            stale = [shown.staleness for shown in report.stats if shown.unit.slot not in (FROZEN, BUFFER)]
            assert all(age is None or age <= 3 for age in stale)
        assert one.metric("driftpoint_budget_bytes") < 0


def test_observing_spends_as_if_it_had_written(tmp_path: Path) -> None:
    policy = {"name": "observe", "inner": "budget"}
    poor = SETTINGS | {"policy": policy, "budget": {"bytes_per_hour": 1.0}}
    with job(tmp_path / "store", **poor) as one:
        one.ckpt.resume()
        for _ in range(4):
            one.step()
        assert one.metric("driftpoint_observed_saves_total") == 1
    assert not (tmp_path / "store").exists()


def test_a_first_save_that_costs_more_than_there_is_comes_about(tmp_path: Path) -> None:
    poor = SETTINGS | {"budget": {"bytes_per_hour": 1.0}}
    with job(tmp_path / "store", **poor) as one:
        one.ckpt.resume()
        reports = [one.step() for _ in range(3)]
        assert [report.skipped for report in reports if report is not None] == [None, "nothing", "nothing"]
        assert one.metric("driftpoint_budget_overdraft_bytes_total") == 0
    catalog = open_catalog(LocalFiles(tmp_path / "store"))
    assert [save.step for save in catalog.saves()] == [1]
    assert {record.encoding for record in catalog.manifest(SaveId(1, 1)).units} == {RAW}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"policy": "budget"}, "bytes_per_hour"),
        ({"policy": {"name": "observe", "inner": "budget"}}, "bytes_per_hour"),
        ({"budget": {"bytes_per_hour": 1e9}}, "policy is full"),
        ({"policy": "budget", "budget": {"bytes_per_hour": 0}}, "greater than 0"),
        ({"policy": "budget", "budget": {"bytes_per_hour": float("inf")}}, "finite"),
        ({"policy": "budget", "budget": {"bytes_an_hour": 5}}, "did you mean 'bytes_per_hour'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told), job(tmp_path / "store", **values):
        pass


def test_what_is_observed_costs_and_loses_what_its_encoding_does(tmp_path: Path) -> None:
    policy = {"name": "observe", "inner": "budget"}
    poor = SETTINGS | {"policy": policy, "encoding": "compact", "budget": {"bytes_per_hour": 1.0}}
    with job(tmp_path / "store", **poor) as one:
        one.ckpt.resume()
        one.step()
        report = one.step()
        assert report is not None
        moving = [shown for shown in report.stats if shown.moving]
        assert moving
        for shown in moving:
            assert shown.encoding == COMPACT[shown.unit.slot] and shown.error > 0
            assert shown.stored_bytes == expected_bytes(replace(shown, stored_bytes=0), COMPACT[shown.unit.slot])
            assert shown.stored_bytes < 0.6 * shown.nbytes
