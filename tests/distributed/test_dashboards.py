"""A real Prometheus scrapes real runs in which things go wrong: every query of the dashboard has data, alerts fire.

One run of two ranks, supervised, with a daemon beside it, whose first incarnation is killed and rescued. And one in
this process, whose incidents are made one by one: an overdrawn budget, weights that jump, a layer with NaN, a store
that is away while it is saved to, and a byte on disk that rots before the next incarnation resumes."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from prometheus_client import CollectorRegistry, Gauge

from store.metrics_server import EndpointSecurity, MetricsServer, Tls
from tests.support.cli import driftpoint
from tests.support.daemons import rescues
from tests.support.jobs import Job
from tests.support.launch import WORKERS
from tests.support.prometheus import DASHBOARD, PROMETHEUS, Prometheus, free_port, prometheus, promtool
from tests.support.supervised import Supervised, supervised
from tests.support.tls import certificate

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

BOARD = json.loads(DASHBOARD.read_text())
QUERIES = sorted({target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", [])})
VARIABLES = {"$job": "driftpoint.*", "$instance": ".*", "$slot": "fp32", "$daemon": ".*", "$__rate_interval": "10s"}


@dataclass(frozen=True)
class Ports:
    ranks: int
    here: int
    daemon: int
    guarded: int


@pytest.fixture(scope="module")
def scrapes() -> dict[str, str]:
    """What each endpoint served in the end, once it was seen."""
    return {}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, scrapes: dict[str, str]) -> Iterator[Prometheus]:
    """Everything went wrong, and Prometheus has seen it."""
    folder = tmp_path_factory.mktemp("d")
    with guarded(folder) as (port, more):
        ports = Ports(*(free_port() for _ in range(3)), port)
        targets = {
            "driftpoint": [ports.ranks, ports.here],
            "driftpoint-daemon": [ports.daemon],
            "guarded": [ports.guarded],
        }
        with prometheus(folder / "prometheus", targets, impatient(), {"guarded": more}) as running:
            with ranks(folder, ports) as run:
                one = incidents(folder / "here", ports.here, running)
                try:
                    job, here = f'instance="127.0.0.1:{ports.ranks}"', f'instance="127.0.0.1:{ports.here}"'
                    rescued(folder, run)
                    running.until(lambda: running.now(f"driftpoint_resumed_step{{{job}}} > 0"), run.said, 180.0)
                    running.until(lambda: running.now(f"driftpoint_memory_versions_total{{{job}}} > 3"), "versions")
                    running.until(lambda: running.now(f"driftpoint_resume_fallback_units{{{here}}} > 0"), "fallbacks")
                    running.until(
                        lambda: firing(running) >= EXPECTED, lambda: f"alerts but {EXPECTED - firing(running)}"
                    )
                    scrapes |= {name: scrape(getattr(ports, name)) for name in SERVING}
                finally:
                    one.ckpt.close()
                (folder / "stop").touch()
                assert run.ends() == 0, run.said
            yield running


SERVING = ("ranks", "here", "daemon")
"""Endpoints without a guard."""


def impatient() -> str:
    """The alerts, but that they wait for seconds where they wait for minutes."""
    text = re.sub(r"for: \d+m", "for: 0s", (PROMETHEUS / "alerts.yml").read_text())
    assert text.count(", 1800)") == text.count(", 900)") == 1
    return text.replace(", 1800)", ", 3)").replace(", 900)", ", 3)")


EXPECTED = {
    "DriftpointCommitStale",
    "DriftpointSaveFailed",
    "DriftpointSavesFailing",
    "DriftpointBudgetExceeded",
    "DriftpointNoProgress",
    "DriftpointLayerNonFinite",
    "DriftpointDriftSpike",
    "DriftpointResumedFromFallback",
    "DriftpointEndpointGone",
}


def firing(running: Prometheus) -> set[str]:
    """All that ever fired."""
    query = 'ALERTS{alertstate="firing"}'
    found = running.ask("query_range", query=query, start=running.began, end=time.time(), step="1s")["result"]
    return {one["metric"]["alertname"] for one in found}


@contextmanager
def guarded(folder: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Serve over TLS with client certificates; gives the port and how it is scraped."""
    crt, key = certificate(folder, "here")
    ca, _ = certificate(folder, "clients")
    own_crt, own_key = certificate(folder, "prometheus", ca.with_suffix(""))
    registry = CollectorRegistry()
    Gauge("driftpoint_guarded", "One", registry=registry).set(1)
    security = EndpointSecurity(tls=Tls(cert=str(crt), key=str(key), client_ca=str(ca)))
    server = MetricsServer(registry, "127.0.0.1", 0, security)
    try:
        yield (
            server.port,
            {
                "scheme": "https",
                "tls_config": {"ca_file": str(crt), "cert_file": str(own_crt), "key_file": str(own_key)},
            },
        )
    finally:
        server.close()


@contextmanager
def ranks(folder: Path, ports: Ports) -> Iterator[Supervised]:
    """Two ranks under ``driftpoint run``, which starts the daemon."""
    base = folder / "shm"
    base.mkdir()
    config = {
        "store": str(folder / "store"),
        "every": 4,
        "policy": {"name": "parity", "k": 2},
        "memory": {"enabled": True, "every": 1, "path": str(base)},
        "daemon": {"enabled": True, "port": ports.daemon},
        "metrics": {"port": ports.ranks},
    }
    path = folder / "driftpoint.yaml"
    path.write_text(yaml.safe_dump(config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    options = ["-c", path, "--backoff", 12]
    command = [*torchrun, WORKERS / "metrics_train.py", path, folder / "stop"]
    try:
        with supervised(folder, command, *options) as run:
            yield run
    finally:
        driftpoint("daemon", "stop", "--memory", base)


def rescued(folder: Path, run: Supervised) -> None:
    run.until(lambda: "written" in rescues(folder / "shm"), 180.0)


def incidents(store: Path, port: int, running: Prometheus) -> Job:
    """Gives the job that resumed from what was left."""
    torch.manual_seed(1)
    settings = {
        "metrics": {"enabled": True, "port": port},
        "policy": "budget",
        "budget": {"bytes_per_hour": 1000},
        "bounds": {"max_staleness": 5},
    }
    one = Job(store, **settings)
    for _ in range(12):
        one.step()
    seen_once(running, port, "driftpoint_drift_spikes_total == 0")  # an increase is from something
    with torch.no_grad():
        one.model.blocks[1][0].weight.mul_(3.0)
    one.step()
    one.ckpt.save(wait=True)
    away = store.with_name("away")
    store.rename(away)
    for _ in range(3):
        one.update()
        one.ckpt.step()
        one.ckpt.save(wait=True, strict=False)
    away.rename(store)
    fired(running, port, "DriftpointSaveFailed", "DriftpointSavesFailing")
    one.ckpt.save(wait=True)
    bias = one.model.head.bias
    one.update()
    with torch.no_grad():
        sound = bias.clone()
        bias[0] = float("nan")
        one.ckpt.step()
        bias.copy_(sound)
    fired(running, port, "DriftpointLayerNonFinite")
    one.step()
    one.ckpt.save(wait=True)
    one.ckpt.close()
    rot(store)
    one = Job(store, **settings)
    one.ckpt.resume()
    one.step()
    return one


def seen_once(running: Prometheus, port: int, query: str) -> None:
    name, condition = query.split(" ", 1)
    running.until(lambda: running.now(f'{name}{{instance="127.0.0.1:{port}"}} {condition}'), query)


def fired(running: Prometheus, port: int, *alerts: str) -> None:
    """Wait until what is mended next was told: a scrape alone may fall between two looks at the rules."""
    for alert in alerts:
        labels = f'alertname="{alert}",alertstate="firing",instance="127.0.0.1:{port}"'
        running.until(lambda labels=labels: running.now(f"ALERTS{{{labels}}}"), alert)


def rot(store: Path) -> None:
    """A byte of the newest payload changes, in a layer's weights."""
    payload = max((store / "segments").glob("*/*.safetensors"))
    data = bytearray(payload.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    begin = min(one["data_offsets"][0] for name, one in header.items() if "blocks.1" in name)
    data[8 + length + begin] ^= 1
    payload.write_bytes(data)


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_of_the_dashboard_has_data(seen: Prometheus, query: str) -> None:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query
    assert seen.ever(query)


@pytest.mark.parametrize(
    "query",
    [
        "driftpoint_failures_total{reason='StorageError'}",
        "driftpoint_drift_spikes_total",
        "driftpoint_layer_nonfinite{layer='head'}",
        "driftpoint_budget_overdraft_bytes_total",
        "driftpoint_resume_fallback_units",
        "driftpoint_memory_step",
        "driftpoint_daemon_rescues_total{outcome='written'}",
        "driftpoint_store_free_bytes",
        "up{job='guarded'}",
    ],
)
def test_what_happened_was_seen(seen: Prometheus, query: str) -> None:
    assert max(seen.ever(query)) > 0


def test_variables_of_the_dashboard_are_filled(seen: Prometheus) -> None:
    for one in BOARD["templating"]["list"]:
        if one["type"] != "query":
            continue
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", one["definition"])
        assert found is not None
        query = found[1].replace("$job", ".*").replace("$instance", ".*")
        assert seen.ever(f"count by ({found[2]}) ({query})")


def test_alerts_fire_and_say_what_they_mean(seen: Prometheus) -> None:
    assert firing(seen) >= EXPECTED
    rules = [rule for group in seen.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(re.findall(r"- alert:", (PROMETHEUS / "alerts.yml").read_text()))
    assert {rule["health"] for rule in rules} == {"ok"}, [rule.get("lastError") for rule in rules]


@pytest.mark.parametrize("name", SERVING)
def test_scrapes_are_what_promtool_wants(seen: Prometheus, scrapes: dict[str, str], name: str) -> None:
    """Of a real run, and of the daemon beside it."""
    text = scrapes[name]
    assert text.count("# TYPE driftpoint_") > 10
    assert promtool("check", "metrics", stdin=text) == ""


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text
