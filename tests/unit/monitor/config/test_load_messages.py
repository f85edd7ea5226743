"""Full texts of errors for invalid settings, which are raised before training starts and before a store is created."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from store.errors import ConfigError
from tests.support.jobs import Job
from tests.support.policies import policy_file, selecting

MINE = "{folder}/my.py:Mine"

MESSAGES: list[tuple[dict[str, Any], str]] = [
    (
        {"budget": {"bytes_per_hour": -1}, "policy": "budget"},
        "the configuration: budget.bytes_per_hour: input should be greater than 0 (it is -1)",
    ),
    (
        {"policy": "budget"},
        "policy budget has no limit: set `budget: {bytes_per_hour: 2.0e+10}`, or stall_share, or storage_share",
    ),
    (
        {"policy": MINE, "budget": {"bytes_per_hour": 5}},
        """budget: only a policy that spends (budget, auto, or your own with `spends = True`) uses it, and the policy
        is mine: set `policy: budget`, or remove the section""",
    ),
    (
        {"policy": "auto"},
        "policy auto has no limit: set `budget: {bytes_per_hour: 2.0e+10}`, or stall_share, or storage_share",
    ),
    (
        {"policy": {"name": "auto", "lags": {"exp_avg": 0}}, "budget": {"bytes_per_hour": 5}},
        "policy auto: lags.exp_avg must lie between 1e-6 and 1e6, not 0",
    ),
    (
        {"every": 100, "bounds": {"max_staleness": 50}},
        """bounds: max_staleness 50 cannot hold with interval 100: even units saved every time become 100 steps
        old; set max_staleness >= 100, or decide more often (a smaller `every`)""",
    ),
    (
        {"memory": {"peers": True}},
        "memory.peers replicates the memory tier, which is off: set `memory: {enabled: true}`, too",
    ),
    ({"bounds": {"max_staleness": 0}}, "bounds: max_staleness must be an integer >= 1, not 0"),
    ({"bounds": {"max_drift": -0.1}}, "bounds: max_drift must be a finite number >= 0, not -0.1"),
    (
        {"policy": "treshold"},
        """unknown policy 'treshold': did you mean 'threshold'? Known: auto, budget, filter, full, observe, parity,
        threshold""",
    ),
    (
        {"bounds": {"max_stalenes": 5}},
        """the configuration: unknown key 'bounds.max_stalenes': did you mean 'max_staleness'? Known here:
        max_drift, max_staleness, nonfinite, precision""",
    ),
    (
        {"policy": {"name": MINE, "a": 1}},
        "policy {folder}/my.py:Mine takes no parameters, and 'a' was given; remove it",
    ),
    (
        {"policy": "{folder}/mine.py:Mine"},
        """policy {folder}/mine.py:Mine: cannot read {folder}/mine.py (No such file or directory): a path is taken
        from the folder of the configuration's file, or where there is none from the working directory""",
    ),
    (
        {"policy": "{folder}/my.py:Yours"},
        "policy {folder}/my.py:Yours: {folder}/my.py has no Yours: did you mean 'Mine'?",
    ),
]


@pytest.mark.parametrize(("values", "message"), MESSAGES)
def test_invalid_settings_are_refused_before_a_store_is_created(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    policy_file(tmp_path, selecting("raise ValueError('no')"))
    with pytest.raises(ConfigError) as caught:
        Job(tmp_path / "store", **_placed(values, str(tmp_path)))
    assert str(caught.value) == " ".join(message.split()).replace("{folder}", str(tmp_path))
    assert not (tmp_path / "store").exists()


def _placed(value: Any, folder: str) -> Any:
    if isinstance(value, dict):
        return {key: _placed(one, folder) for key, one in value.items()}
    return value.replace("{folder}", folder) if isinstance(value, str) else value
