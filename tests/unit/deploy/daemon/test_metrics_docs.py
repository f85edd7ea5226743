"""The published metrics and outcomes of the daemon are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from deploy.daemon.metrics import DaemonMetrics
from deploy.daemon.rescuer import OUTCOMES

TEXT = (Path(__file__).resolve().parents[4] / "docs" / "daemon.md").read_text()


def test_every_metric_is_documented_and_no_other() -> None:
    documented = set(re.findall(r"^\| `(driftpoint_\w+)`", TEXT, re.M))
    served = set()
    for family in DaemonMetrics().registry.collect():
        served.add(f"{family.name}_total" if family.type == "counter" else family.name)
    assert documented == served


def test_every_outcome_is_documented() -> None:
    told = TEXT.partition("Its outcomes")[2].partition("## ")[0]
    assert all(f"`{outcome}`" in told for outcome in OUTCOMES)
