"""Another world size, another ZeRO stage, another framework, in place: what comes back is what was saved, to the
last bit, gathered by parameter name; and training goes on.
"""

from __future__ import annotations

from typing import Any

import pytest

from store.catalog import open_catalog
from store.storage.local import LocalFiles
from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.core]


def zero(stage: int) -> dict[str, Any]:
    return {"kind": "zero", "stage": stage, "precision": "bf16"}


CHAIN: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks, ZeRO-2": (2, zero(2)),
    "1 rank, ZeRO-3": (1, zero(3)),
    "3 ranks, ZeRO-1": (3, zero(1)),
}
LINKS = list(CHAIN)[1:]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launched]:
    pytest.importorskip("deepspeed")
    directory = tmp_path_factory.mktemp("reshard")
    launched = {}
    for number, (name, (ranks, case)) in enumerate(CHAIN.items()):
        launched[name] = torchrun("resume_reshard.py", ranks, {"case": case, "seed": number}, directory)
        assert launched[name].code == 0, launched[name].output[-6000:]
    saves = open_catalog(LocalFiles(directory / "store")).saves()
    assert [save.name for save in reversed(saves)] == ["00000003-000001", "00000006-000002", "00000009-000003"]
    return launched


@pytest.mark.parametrize("link", LINKS)
def test_the_whole_state_comes_back(chain: dict[str, Launched], link: str) -> None:
    resumed = chain[link].of("resumed")
    assert len(resumed) == CHAIN[link][0]
    for one in resumed:
        assert one["differences"] == []
        assert one["unlike_fresh"] > 10
        assert one["slots"] == ["buffer", "exp_avg", "exp_avg_sq", "fp32", "frozen"]


@pytest.mark.parametrize("link", LINKS)
def test_the_step_goes_on(chain: dict[str, Launched], link: str) -> None:
    assert {one["step"] for one in chain[link].of("resumed")} == {3 * (1 + LINKS.index(link))}
    assert all(one["exact"] for one in chain[link].of("resumed"))


@pytest.mark.parametrize("link", CHAIN)
def test_training_goes_on(chain: dict[str, Launched], link: str) -> None:
    assert [one["finite"] for one in chain[link].of("trained")] == [True] * CHAIN[link][0]
