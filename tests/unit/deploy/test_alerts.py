"""Alerts and dashboard as files: rules hold what they say, each name in them is served, each alert is explained."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from deploy.cli.app import app
from deploy.daemon.metrics import DaemonMetrics
from monitor.telemetry.metrics import Metrics
from tests.support.prometheus import DASHBOARD, PROMETHEUS, promtool

ROOT = Path(__file__).resolve().parents[3]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
ALERTS = [
    rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


def served() -> set[str]:
    """Every sample that can be scraped."""
    found = set()
    for metrics in (Metrics(), DaemonMetrics()):
        for family in metrics.registry.collect():
            kinds = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            found |= {f"{family.name}{kind}" for kind in kinds}
    return found


def named(query: str) -> set[str]:
    return set(re.findall(r"\bdriftpoint_\w+", query))


def test_the_rules_hold_what_they_say() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", "alerts.yml")
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


def test_every_alert_is_tested_firing_and_quiet() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    firing, quiet = set(), set()
    for one in (one for test in tests for one in test.get("promql_expr_test", ())):
        (name,) = re.findall(r'alertname="(\w+)"', one["expr"])
        (firing if "exp_samples" in one else quiet).add(name)
    assert firing == quiet == {rule["alert"] for rule in ALERTS}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    notes = rule["annotations"]
    assert notes["summary"] and len(notes["description"]) > 50
    link = f"{{{{ . }}}}/runbook.html#{rule['alert'].lower()}"
    assert notes["runbook_url"] == f"{{{{ with $externalLabels.driftpoint_docs }}}}{link}{{{{ end }}}}"
    assert named(rule["expr"]) <= served()
    section = RUNBOOK.partition(f"\n## {rule['alert']}\n")[2].partition("\n## ")[0]
    for part in ("**What it means.**", "**How to look.**", "**What to do.**", "**Harmless**"):
        assert part in section


def test_the_runbook_has_a_section_for_every_alert_and_no_other() -> None:
    sections = re.findall(r"^## (\w+)$", RUNBOOK, re.M)
    assert sorted(sections) == sorted(rule["alert"] for rule in ALERTS)
    anchors = set(re.findall(r"\]\(#(\w+)\)", RUNBOOK))
    assert anchors <= {name.lower() for name in sections}


def test_what_one_is_told_to_type_exists() -> None:
    told = RUNBOOK + (PROMETHEUS / "alerts.yml").read_text() + (ROOT / "docs" / "metrics.md").read_text()
    group: Any = typer.main.get_command(app)
    words = set(re.findall(r"`driftpoint\s+(\w+)", told))
    assert words and words <= set(group.commands)
    for name, options in re.findall(r"`driftpoint\s+(\w+)([^`]*)`", told):
        command = group.commands[name]
        known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
        assert set(re.findall(r"--[\w-]+", options)) <= known, (name, options)


def test_every_metric_of_the_dashboard_is_served_and_every_served_one_is_on_it() -> None:
    on_it = {name for query in QUERIES for name in named(query)}
    assert on_it <= served()
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in served()}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in on_it} == families


def test_the_dashboard_is_what_grafana_takes() -> None:
    """What its schema asks of a dashboard of version 39; Grafana itself was not there to open it."""
    assert BOARD["schemaVersion"] == 39 and BOARD["id"] is None and re.fullmatch(r"[\w-]{1,40}", BOARD["uid"])
    assert BOARD["panels"][0]["type"] == "row" and "safe now" in BOARD["panels"][0]["title"]
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {one["name"] for one in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps([BOARD["panels"], BOARD["annotations"]])))
    assert used - {"__rate_interval", "__interval"} <= variables
    kinds = {"stat", "timeseries", "table", "status-history"}
    for panel in PANELS:
        assert panel["type"] in kinds and panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] is None
    taken: Counter[tuple[int, int]] = Counter()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= 24 and at["h"] > 0
        taken.update((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"]))
    assert max(taken.values()) == 1, "panels lie on each other"


def test_several_jobs_on_one_panel_are_told_apart() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            assert "by (le)" not in target["expr"], panel["title"]
            if panel["type"] in ("timeseries", "status-history"):
                assert "{{instance}}" in target["legendFormat"], panel["title"]


def test_every_variable_is_filled_from_a_metric_that_is_served() -> None:
    for one in BOARD["templating"]["list"]:
        if one["type"] == "query":
            assert one["query"]["query"] == one["definition"]
            assert named(one["definition"]) <= served()


def test_no_address_is_in_the_files_that_would_be_asked() -> None:
    for path in (*PROMETHEUS.iterdir(), DASHBOARD):
        assert not re.search(r"https?://(?!docs\.example\.org)", path.read_text()), path
