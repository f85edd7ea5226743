"""The published metrics are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from monitor.telemetry.metrics import Metrics

DOCS = Path(__file__).resolve().parents[4] / "docs"


def test_every_metric_is_documented_and_no_other() -> None:
    documented = set(re.findall(r"^\| `(driftpoint_\w+)`", (DOCS / "metrics.md").read_text(), re.M))
    served = set()
    for family in Metrics().registry.collect():
        served.add(f"{family.name}_total" if family.type == "counter" else family.name)
    assert documented == served
