"""The published settings and metrics are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from pydantic import BaseModel

from deploy.supervisor_metrics import SupervisorMetrics
from monitor.config import Config
from monitor.metrics import Metrics

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_every_setting_is_documented_with_its_default() -> None:
    block = re.search(r"```yaml\n(.*?)```", (DOCS / "configuration.md").read_text(), re.S)
    assert block is not None
    assert yaml.safe_load(block[1]) == Config().model_dump()
    assert isinstance(Config.model_validate(yaml.safe_load(block[1])), BaseModel)


def test_every_metric_is_documented_and_no_other() -> None:
    documented = set(re.findall(r"^\| `(driftpoint_\w+)`", (DOCS / "metrics.md").read_text(), re.M))
    served = set()
    for family in [*Metrics().registry.collect(), *SupervisorMetrics(3).registry.collect()]:
        served.add(f"{family.name}_total" if family.type == "counter" else family.name)
    assert documented == served
