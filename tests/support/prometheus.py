"""Prometheus and promtool as processes of their own: own ports, own folders, and nothing of them outlives a test."""

from __future__ import annotations

import json
import math
import secrets
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

PROMETHEUS = Path(__file__).parents[2] / "deploy" / "prometheus"
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "driftpoint.json"


def promtool(*words: object, cwd: Path = PROMETHEUS, stdin: str | None = None) -> str:
    """Run it; what it said. Skips, loudly, where there is none; fails where it found something wrong."""
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool here (Debian: prometheus), so rules and metrics are NOT checked by it")
    done = subprocess.run(
        ["promtool", *map(str, words)], cwd=cwd, input=stdin, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def free_port() -> int:
    """Below those that the system gives to others, who would have it before it is used."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.choice(range(10_000, max(first, 20_000)))
        with closing(socket.socket()) as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


@dataclass
class Prometheus:
    """A running one."""

    url: str
    log: Path
    began: float

    def ask(self, path: str, **query: object) -> Any:
        """``/api/v1/PATH``: its data."""
        words = urllib.parse.urlencode({name: str(value) for name, value in query.items()})
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{words}", timeout=180) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def now(self, query: str) -> dict[tuple[tuple[str, str], ...], float]:
        """An instant query: value by labels."""
        found = self.ask("query", query=query)["result"]
        return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in found}

    def ever(self, query: str) -> list[float]:
        """All values since the beginning, of every series, that are numbers."""
        found = self.ask("query_range", query=query, start=self.began, end=time.time(), step="1s")["result"]
        values = [float(value) for one in found for _, value in one["values"]]
        return [value for value in values if not math.isnan(value)]

    def until(self, true: Callable[[], Any], what: str | Callable[[], str], seconds: float = 300.0) -> Any:
        """Wait for a condition; its value."""
        deadline = time.monotonic() + seconds
        while not (found := true()):
            if time.monotonic() > deadline:
                raise AssertionError(f"{what if isinstance(what, str) else what()} did not come about in {seconds:g} s")
            time.sleep(0.2)
        return found


@contextmanager
def prometheus(
    folder: Path, targets: Mapping[str, Sequence[int]], rules: str, more: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[Prometheus]:
    """Scraping ports of this machine each second, by job; evaluating ``rules`` as often. Skips where there is none.

    more: of the scrape configuration, by job."""
    if shutil.which("prometheus") is None:
        pytest.skip(
            "there is no prometheus here (Debian: prometheus), so dashboards and alerts are NOT run against one"
        )
    folder.mkdir()
    (folder / "rules.yml").write_text(rules)
    scrape = [
        {
            "job_name": job,
            "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}],
            **(more or {}).get(job, {}),
        }
        for job, ports in targets.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": scrape,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port, log = free_port(), folder / "prometheus.log"
    words = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}"]
    with log.open("w") as output:
        process = subprocess.Popen(["prometheus", *words], cwd=folder, stdout=output, stderr=output)
    running = Prometheus(f"http://127.0.0.1:{port}", log, time.time())
    try:
        running.until(lambda: process.poll() is not None or _ready(running), "Prometheus")
        assert process.poll() is None, log.read_text()
        yield running
    finally:
        process.terminate()
        try:
            process.wait(180)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(180)


def _ready(running: Prometheus) -> bool:
    try:
        with urllib.request.urlopen(f"{running.url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
