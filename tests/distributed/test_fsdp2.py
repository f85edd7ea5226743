"""FSDP2 in place at other world sizes, from other frameworks and back: what comes back is what was saved, to the last
bit, gathered by parameter name; and training goes on.
"""

from __future__ import annotations

from typing import Any

import pytest

from store.catalog import open_catalog
from store.files import LocalFiles
from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CHAIN: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks, ZeRO-3": (2, {"kind": "zero", "stage": 3, "precision": "bf16"}),
    "3 ranks, FSDP2": (3, {"kind": "fsdp2", "checkpointed": True}),
    "1 rank, ZeRO-2": (1, {"kind": "zero", "stage": 2, "precision": "bf16"}),
    "4 ranks, FSDP2 in two replicas": (4, {"kind": "fsdp2", "hybrid": 2, "bf16": True, "reshard": False}),
    "2 ranks, DDP": (2, {"kind": "ddp"}),
}
LINKS = list(CHAIN)[1:]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launched]:
    """Each link resumes from the store what the one before left, compares, trains and saves."""
    pytest.importorskip("deepspeed")
    directory = tmp_path_factory.mktemp("fsdp2")
    launched = {}
    for number, (name, (ranks, case)) in enumerate(CHAIN.items()):
        launched[name] = torchrun("resume_reshard.py", ranks, {"case": case, "seed": number}, directory)
        assert launched[name].code == 0, launched[name].output[-6000:]
    newest = open_catalog(LocalFiles(directory / "store")).saves()[0]
    assert (newest.step, newest.epoch) == (3 * len(CHAIN), len(CHAIN))
    return launched


@pytest.mark.parametrize("link", LINKS)
def test_the_whole_state_comes_back(chain: dict[str, Launched], link: str) -> None:
    resumed = chain[link].of("resumed")
    assert len(resumed) == CHAIN[link][0]
    for one in resumed:
        assert one["differences"] == []
        assert one["unlike_fresh"] > 10
        assert one["slots"] == ["buffer", "exp_avg", "exp_avg_sq", "fp32", "frozen"]
        assert (one["step"], one["exact"]) == (3 * (1 + LINKS.index(link)), True)


@pytest.mark.parametrize("link", CHAIN)
def test_training_goes_on(chain: dict[str, Launched], link: str) -> None:
    assert [one["finite"] for one in chain[link].of("trained")] == [True] * CHAIN[link][0]
