"""The policy in the guide is a complete one: it passes the suite, and decides in a real job."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from examples.policy_checks import TIMED, broken_promises
from policies.registry import policy_from
from store.names import WEIGHTS
from tests.support.jobs import job

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "own-policies.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.S)


def written(folder: Path) -> str:
    (folder / "weights_first.py").write_text(blocks("python")[0])
    return f"{folder}/weights_first.py:WeightsFirst"


def test_it_is_as_long_as_it_says_and_keeps_every_promise(tmp_path: Path) -> None:
    assert broken_promises(policy_from({"name": written(tmp_path), "drift": 0.3})).keys() <= {TIMED}


def test_it_decides_in_a_job(tmp_path: Path) -> None:
    (settings,) = [yaml.safe_load(block)["policy"] for block in blocks("yaml")]
    assert settings.pop("name") == "weights_first.py:WeightsFirst"
    with job(tmp_path / "store", policy={"name": written(tmp_path), **settings, "drift": 1e9, "age": 3}) as one:
        one.ckpt.resume()
        reports = [report for _ in range(4) if (report := one.step())]
        assert [len(report.saved) for report in reports] == [15, 5, 5, 15]
        assert {unit.slot for unit in reports[1].saved} == {WEIGHTS}
        assert one.metric("driftpoint_policy_failures_total") == 0
