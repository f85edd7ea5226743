"""Metrics of layers over real training: what is not finite, what jumps, and which layers have series of their own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from monitor.telemetry.metrics import Metrics
from policies.interval import FIRST
from store.names import Unit
from tests.support.jobs import Job, job
from tests.support.slow import others_slow

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "in turn": {"policy": {"name": "parity", "k": 2}},
    "by drift": {"policy": {"name": "threshold", "threshold": 0.02}},
    "encoded": {"policy": "full", "encoding": "compact"},
}


def warmed(one: Job, steps: int) -> None:
    """As schedules do: up for a third of the steps, then down, then up again at once."""
    rate = one.optimizer.param_groups[0]["lr"]
    for i in range(steps):
        up, down = (i + 1) / (steps / 3), max(0.02, 1.5 - 1.5 * i / steps)
        one.optimizer.param_groups[0]["lr"] = rate * min(up, down, 1.0)
        one.step()
    one.optimizer.param_groups[0]["lr"] = rate
    for _ in range(4):
        one.step()


def spikes(one: Job) -> float:
    return one.metric("driftpoint_drift_spikes_total")


@pytest.mark.parametrize("settings", others_slow(pytest.param(POLICIES[name], id=name) for name in POLICIES))
def test_a_layer_multiplied_by_three_is_a_spike_and_a_whole_schedule_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    torch.manual_seed(11)
    with job(tmp_path / "store", width=32, **settings) as one:
        warmed(one, 45)
        assert spikes(one) == 0
        with torch.no_grad():
            one.model.blocks[1][0].weight.mul_(3.0)
        one.step()
        one.step()
        assert spikes(one) == 1
        assert "drift spike: the weights of blocks.1 moved" in caplog.text
        assert one.metric("driftpoint_layer_drift_jump_ratio", layer="blocks.0", slot="fp32") < 4


def test_a_layer_that_is_not_finite_is_named_until_it_is_well(tmp_path: Path) -> None:
    with job(tmp_path / "store") as one:
        one.step()
        bias = one.model.head.bias
        one.update()
        with torch.no_grad():
            sound = bias.clone()
            bias[0] = float("inf")
            one.ckpt.step()
            one.ckpt.flush()
            bias.copy_(sound)
        one.step()  # learns what became of the save before
        assert one.metric("driftpoint_layer_nonfinite", layer="head") == 1
        assert one.metric("driftpoint_layer_nonfinite", layer="embed") == 0
        assert one.metric("driftpoint_nonfinite_layers") == 1
        assert one.metric("driftpoint_saves_failed_total") == 0
        one.step()
        assert one.metric("driftpoint_nonfinite_layers") == 0
        assert one.metric("driftpoint_layer_nonfinite", layer="head") == 0


def test_all_layers_at_once_are_seen_too(tmp_path: Path) -> None:
    """Then no save comes about at all: this is what divergence looks like."""
    with job(tmp_path / "store") as one:
        one.step()
        with torch.no_grad():
            for parameter in one.model.parameters():
                parameter.fill_(float("nan"))
        one.step()
        one.step()
        assert one.metric("driftpoint_nonfinite_layers") == 5
        assert one.metric("driftpoint_failures_total", reason="NotFiniteError") == 1
        assert one.metric("driftpoint_saves_failed_in_a_row") == 1
        assert one.metric("driftpoint_last_commit_step") == 1


def test_layers_beyond_the_limit_are_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with job(tmp_path / "store", metrics={"enabled": False, "layer_series": 8}) as one:
        for _ in range(3):
            one.step()
        units = one.metric("driftpoint_units")
        series = [
            sample.labels["layer"]
            for family in one.registry.collect()
            if family.name == "driftpoint_layer_drift_ratio"
            for sample in family.samples
        ]
        assert units == 15 and 0 < len(series) <= 8
        assert one.metric("driftpoint_units_hidden") == units - 6
        told = [record for record in caplog.records if "metrics.layer_series is 8" in record.getMessage()]
        assert len(told) == 1 and told[0].levelno == logging.WARNING
        assert one.metric("driftpoint_drift_max_ratio") > 0


def test_ten_thousand_layers_are_no_burden() -> None:
    metrics = Metrics(layer_series=512)
    units = [Unit(f"experts.{i}", slot) for i in range(10_000) for slot in ("fp32", "exp_avg", "exp_avg_sq")]
    metrics.layers.set_units(units)
    metrics.layers.update(dict.fromkeys(units, 0.5), dict.fromkeys(units, 3))
    metrics.layers.update_health(units, [units[1]])
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert len([one for one in samples if one.name == "driftpoint_layer_drift_ratio"]) <= 512
    assert len([one for one in samples if "layer" in one.labels]) <= 3 * 512
    assert metrics.registry.get_sample_value("driftpoint_layer_nonfinite", {"layer": units[1].layer}) == 1


def test_layers_that_get_well_and_layers_that_go_have_no_more_series_than_others() -> None:
    def named() -> list[str]:
        return [one.labels["layer"] for one in next(iter(metrics.layers.layer_nonfinite.collect())).samples]

    metrics = Metrics(layer_series=16)
    units = [Unit(f"experts.{i}", "fp32") for i in range(1000)]
    metrics.layers.set_units(units)
    metrics.layers.update_health(units, units)
    assert len(named()) == 16
    metrics.layers.update_health(units, [])
    assert len(named()) == 16 and metrics.registry.get_sample_value("driftpoint_nonfinite_layers") == 0
    metrics.layers.set_units([Unit("others.0", "fp32")])
    assert named() == ["others.0"]


def test_the_room_on_disk_is_known(tmp_path: Path) -> None:
    with job(tmp_path / "store") as one:
        one.step()
        size, free = one.metric("driftpoint_store_size_bytes"), one.metric("driftpoint_store_free_bytes")
        assert 0 < free <= size
        full = sum(value.numel() * 4 for value in one.weights().values())
        assert full <= one.metric("driftpoint_full_save_bytes") <= full + 1000
        assert one.metric("driftpoint_step") == 1 and one.metric("driftpoint_step_timestamp_seconds") > 1e9


@pytest.mark.parametrize(("every", "steps"), [(1000, 1000), ("auto", FIRST)])
def test_how_long_a_decision_is_off_is_known_before_the_first_one(tmp_path: Path, every: int | str, steps: int) -> None:
    """Alerts wait for as long: one that takes half an hour is not late after half an hour."""
    with job(tmp_path / "store", every=every) as one:
        assert one.metric("driftpoint_decision_interval_steps") == steps
        assert one.metric("driftpoint_step_seconds") == 0
        one.step()
        one.step()
        assert one.metric("driftpoint_step_seconds") > 0


def test_a_resume_tells_what_it_stands_on(tmp_path: Path) -> None:
    with job(tmp_path / "store") as one:
        one.step()
        one.step()
        one.ckpt.flush()
    first = Job(tmp_path / "store")
    assert first.metric("driftpoint_last_commit_timestamp_seconds") == 0
    assert first.metric("driftpoint_attached_timestamp_seconds") > 1e9
    assert first.ckpt.resume() == 2
    assert first.metric("driftpoint_last_commit_step") == 2
    assert (
        abs(first.metric("driftpoint_last_commit_timestamp_seconds") - one.metric("driftpoint_step_timestamp_seconds"))
        < 300
    )
    assert first.metric("driftpoint_resumed_exact") == 1
    assert first.metric("driftpoint_resume_passed_over_commits") == 0
    first.ckpt.close()
    newest = max((tmp_path / "store" / "manifests").iterdir())
    newest.write_bytes(b"{}")
    second = Job(tmp_path / "store")
    assert second.ckpt.resume() == 1
    assert second.metric("driftpoint_resume_passed_over_commits") == 1
    assert second.metric("driftpoint_last_commit_step") == 1
    second.ckpt.close()
