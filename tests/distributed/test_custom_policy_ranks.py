"""Policies and settings on two ranks: what is wrong with one is told to all of them, and never leaves one waiting."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.launch import Launched, torchrun
from tests.support.policies import policy_file, selecting

pytestmark = pytest.mark.distributed


OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "every": ({"every": 2}, {"every": 3}),
    "auto": ({"every": "auto"}, {"every": 5}),
    "resume": ({"resume": {"at": "effective"}}, {"resume": {"at": "newest"}}),
    "data": ({"resume": {"data": "back"}}, {"resume": {"data": "on"}}),
    "policy": ({"policy": "full"}, {"policy": "observe"}),
    "bounds": ({"bounds": {"max_drift": 0.1}}, {}),
    "encoding": ({"encoding": "compact"}, {"encoding": "careful"}),
}
"""Settings of rank 0 and rank 1 that would leave one of them waiting for the other."""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("own")
    sound = policy_file(folder)
    raises = policy_file(
        folder,
        selecting(
            "if history.step in (1, 2, 5): raise ValueError('later')\n"
            "takes = lambda one: 'raw' if one.position or not history.commits else None\n"
            "return Decision({one.unit: Choice(takes(one), 'all but the first layer') for one in stats})"
        ),
        "later.py",
    )
    refused = {
        "missing": [{"policy": sound}, {"policy": f"{folder}/missing.py:Mine"}],
        **{case: list(pair) for case, pair in OTHERWISE.items()},
    }
    done = torchrun("custom_policy.py", 2, {"refused": refused, "raises": raises}, folder)
    assert done.code == 0, done.output[-6000:]
    for case in refused:
        assert not (folder / case).exists()
    return done


def test_one_that_a_rank_lacks_is_refused_on_all_ranks(launched: Launched) -> None:
    for rank in (0, 1):
        found = launched.one("refused", case="missing", rank=rank)
        assert found["error"] == "ConfigError" and "missing.py" in found["text"]


@pytest.mark.parametrize("case", sorted(OTHERWISE))
def test_settings_that_differ_between_ranks_are_refused(launched: Launched, case: str) -> None:
    key = {"auto": "every", "data": "resume"}.get(case, case)
    for rank in (0, 1):
        found = launched.one("refused", case=case, rank=rank)
        assert found["error"] == "ConfigError" and "all ranks must use the same configuration" in found["text"]
        assert found["text"].removeprefix("rank 1: ").startswith(f"{key} is ")


def test_a_policy_that_raises_in_mid_run_leaves_the_ranks_together(launched: Launched) -> None:
    for rank in (0, 1):
        found = launched.one("ran", rank=rank)
        assert found["saved"] == [15, 15, 12, 12, 15] and found["step"] == 5 and found["same"]
        assert found["failures"] == (3 if rank == 0 else 0)
