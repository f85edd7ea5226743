"""Metrics as Prometheus scrapes them: names, types, and an endpoint that never costs the training anything."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from monitor.events import CommitEvent
from monitor.ledger import PreparedCommit
from monitor.telemetry.metrics import Metrics
from store.names import SaveId, Unit
from tests.support.jobs import job
from tests.support.made_versions import head_of


@pytest.fixture
def served() -> Iterator[Metrics]:
    metrics = Metrics()
    metrics.serve("127.0.0.1", 0)
    yield metrics
    metrics.close()


def scrape(metrics: Metrics) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=180) as answer:
        assert answer.status == 200
        text: str = answer.read().decode()
        return text


def test_names_follow_the_rules_of_prometheus(served: Metrics) -> None:
    """As ``promtool check metrics`` has them: a prefix, base units, ``_total`` on counters and nowhere else."""
    unit = Unit("a", "fp32")
    served.layers.set_units([unit])
    served.layers.update({unit: 0.1}, {unit: 3})
    served.counter("saves_skipped").labels("busy").inc()
    served.counter("failures").labels("StorageError").inc()
    served.counter("preemptions").labels("full").inc()
    families = list(text_string_to_metric_families(scrape(served)))
    assert len(families) >= 20
    for family in families:
        if family.name.endswith("_created"):
            continue
        assert re.fullmatch(r"driftpoint_[a-z]+(_[a-z]+)*", family.name)
        assert family.documentation
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent|total|count|sum|info)$", family.name)
        names = {sample.name for sample in family.samples}
        if family.type == "counter":
            assert any(name.endswith("_total") for name in names)
        else:
            assert not any(name.endswith("_total") for name in names)
        assert not {"le", "quantile", "job", "instance"} & {
            label for sample in family.samples for label in sample.labels if family.type != "histogram"
        }


def test_a_commit_is_counted(served: Metrics) -> None:
    manifest = head_of(SaveId(120, 1), 1).replace(bytes_avoided=3000)
    served.on_commit(CommitEvent(PreparedCommit(manifest, (), {}), 2.5, 1000, {}))
    text = scrape(served)
    assert "driftpoint_saves_total 1.0" in text
    assert "driftpoint_written_bytes_total 1000.0" in text
    assert "driftpoint_avoided_bytes_total 3000.0" in text
    assert "driftpoint_last_commit_step 120.0" in text
    assert 'driftpoint_save_duration_seconds_bucket{le="3.0"} 1.0' in text


def test_a_running_job_serves_its_drift(tmp_path: Path) -> None:
    metrics = {"enabled": True, "port": 0}
    with job(tmp_path / "store", metrics=metrics, policy={"name": "threshold", "threshold": 1e9}) as one:
        one.step()
        one.step()
        text = scrape(one.ckpt.metrics)
    assert 'driftpoint_layer_staleness_steps{layer="blocks.1",slot="fp32"} 1.0' in text
    drift = re.search(r'driftpoint_layer_drift_ratio\{layer="blocks\.1",slot="fp32"\} (\S+)', text)
    assert drift is not None and 0 < float(drift[1]) < 10
    assert 'driftpoint_saves_skipped_total{reason="nothing"} 1.0' in text
    assert "driftpoint_epoch 1.0" in text


def test_nothing_is_served_when_it_is_closed(tmp_path: Path) -> None:
    with job(tmp_path / "store", metrics={"enabled": True, "port": 0}) as one:
        port = one.ckpt.metrics.port
        assert port
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


def test_a_port_that_is_taken_costs_the_endpoint_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with job(tmp_path / "store", metrics={"enabled": True, "port": port}) as one:
            assert one.ckpt.metrics.port is None
            report = one.step()
            assert report is not None and report.skipped is None
    assert f"cannot listen on 127.0.0.1 port {port}" in caplog.text
    assert "metrics: {port: ...}" in caplog.text


def test_a_host_that_is_not_ours_costs_the_endpoint_only(caplog: pytest.LogCaptureFixture) -> None:
    for host in ("203.0.113.7", "no.such.host.invalid"):
        metrics = Metrics()
        metrics.serve(host, 0)
        assert metrics.port is None
        assert host in caplog.text


def test_two_jobs_of_a_process_do_not_share_numbers() -> None:
    one, other = Metrics(), Metrics()
    one.counter("saves").inc()
    assert other.registry.get_sample_value("driftpoint_saves_total") == 0
