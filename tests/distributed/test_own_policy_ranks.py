"""Own policies on two ranks: what is wrong with one is told to all of them, and never leaves one waiting."""

from __future__ import annotations

import pytest

from tests.support.launch import Launched, torchrun
from tests.support.policies import policy_file, selecting

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("own")
    sound = policy_file(folder)
    broken = policy_file(folder, selecting("raise ValueError('no')"), "broken.py")
    raises = policy_file(
        folder,
        selecting(
            "if history.step in (2, 5): raise ValueError('later')\n"
            "takes = lambda one: 'raw' if one.position or not history.commits else None\n"
            "return Decision({one.unit: Choice(takes(one), 'all but the first layer') for one in stats})"
        ),
        "later.py",
    )
    refused = {
        "missing": [sound, f"{folder}/missing.py:Mine"],
        "rehearsed": [broken, broken],
    }
    done = torchrun("own_policy.py", 2, {"refused": refused, "raises": raises}, folder)
    assert done.code == 0, done.output[-6000:]
    for case in refused:
        assert not (folder / case).exists()
    return done


@pytest.mark.parametrize(
    ("case", "told"),
    [("missing", "missing.py (No such file or directory)"), ("rehearsed", "raised ValueError('no') at")],
)
def test_refused_alike_on_all_ranks(launched: Launched, case: str, told: str) -> None:
    for rank in (0, 1):
        found = launched.one("refused", case=case, rank=rank)
        assert found["error"] == "ConfigError" and told in found["text"]


def test_a_policy_that_raises_in_mid_run_leaves_the_ranks_together(launched: Launched) -> None:
    for rank in (0, 1):
        found = launched.one("ran", rank=rank)
        assert found["saved"] == [15, 15, 12, 12, 15] and found["step"] == 5 and found["same"]
        assert found["failures"] == (2 if rank == 0 else 0)
