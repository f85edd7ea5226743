"""Another world size, another ZeRO stage, another framework, in place: what comes back is what was saved, to the
last bit, gathered by parameter name; and training goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from store.catalog import open_catalog
from store.storage.local import LocalFiles
from tests.support.launch import Launched, once, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def zero(stage: int, precision: str) -> dict[str, Any]:
    return {"kind": "zero", "stage": stage, "precision": precision}


CHAINS: dict[str, dict[str, tuple[int, dict[str, Any]]]] = {
    "DeepSpeed": {
        "2 ranks, ZeRO-2": (2, zero(2, "bf16")),
        "1 rank, ZeRO-3": (1, zero(3, "bf16")),
        "3 ranks, ZeRO-1": (3, zero(1, "bf16")),
    },
    "FSDP2": {
        "2 ranks, ZeRO-3": (2, zero(3, "fp32")),
        "3 ranks, FSDP2": (3, {"kind": "fsdp2", "checkpointed": True}),
        "1 rank, ZeRO-2": (1, zero(2, "fp32")),
        "4 ranks, FSDP2 in two replicas": (4, {"kind": "fsdp2", "hybrid": 2, "bf16": True, "reshard": False}),
        "2 ranks, DDP": (2, {"kind": "ddp"}),
    },
}
"""Each link resumes from the store what the one before left, compares, trains and saves."""


def links(first: int) -> list[Any]:
    return [
        pytest.param(chain, number, id=link, marks=[pytest.mark.core] if chain == "DeepSpeed" else [])
        for chain, found in CHAINS.items()
        for number, link in enumerate(found)
        if number >= first
    ]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Launched]]:
    """The launches of a chain, made when it is first asked for."""
    pytest.importorskip("deepspeed")

    @once
    def launch(chain: str) -> list[Launched]:
        directory, done = tmp_path_factory.mktemp(chain), []
        for number, (ranks, case) in enumerate(CHAINS[chain].values()):
            done.append(torchrun("resume_reshard.py", ranks, {"case": case, "seed": number}, directory))
            assert done[-1].code == 0, done[-1].output[-6000:]
        saves = open_catalog(LocalFiles(directory / "store")).saves()
        newest = range(len(done), len(done) - 3, -1)  # older ones may be pruned
        assert [(save.step, save.epoch) for save in saves[:3]] == [(3 * number, number) for number in newest]
        return done

    return launch


def ranks_of(chain: str, link: int) -> int:
    return list(CHAINS[chain].values())[link][0]


@pytest.mark.parametrize(("chain", "link"), links(1))
def test_the_whole_state_comes_back(launched: Callable[[str], list[Launched]], chain: str, link: int) -> None:
    resumed = launched(chain)[link].of("resumed")
    assert len(resumed) == ranks_of(chain, link)
    for one in resumed:
        assert one["differences"] == []
        assert one["unlike_fresh"] > 10
        assert one["slots"] == ["buffer", "exp_avg", "exp_avg_sq", "fp32", "frozen"]
        assert (one["step"], one["exact"]) == (3 * link, True)


@pytest.mark.parametrize(("chain", "link"), links(0))
def test_training_goes_on(launched: Callable[[str], list[Launched]], chain: str, link: int) -> None:
    assert [one["finite"] for one in launched(chain)[link].of("trained")] == [True] * ranks_of(chain, link)
