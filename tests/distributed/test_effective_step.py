"""A composite of two ranks goes on at its effective step: counters, schedules, loaders and generators of every rank are
those of one save, to the bit, under DeepSpeed and DistributedDataParallel, also on another number of ranks.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from store.catalog import open_catalog
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASES = {
    "zero2": {"name": "zero2", "kind": "zero", "stage": 2, "precision": "bf16"},
    "zero3": {"name": "zero3", "kind": "zero", "stage": 3, "precision": "bf16"},
    "ddp": {"name": "ddp", "kind": "ddp"},
}
STEPS = 9
LIVES = {0: 2, 1: 2, 2: 1}
"""Ranks of each incarnation. The second goes on with two, the third with one."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("effective")


@pytest.fixture(scope="module")
def launched(directory: Path) -> Launched:
    pytest.importorskip("deepspeed")
    records: list[dict[str, Any]] = []
    for life, ranks in LIVES.items():
        spec = {"cases": list(CASES.values()), "life": life, "seed": life + 1, "steps": STEPS if life == 0 else 7}
        done = torchrun("effective_train.py", ranks, spec, directory)
        assert done.code == 0, done.output[-6000:]
        records += done.records
    return Launched(0, "", records)


def resumed(launched: Launched, case: str, life: int) -> list[dict[str, Any]]:
    found = launched.of("resumed", case=case, life=life)
    assert len(found) == LIVES[life]
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("life", [1, 2])
def test_it_goes_on_at_the_save_next_to_its_effective_step(launched: Launched, case: str, life: int) -> None:
    for one in resumed(launched, case, life):
        steps = {step for _, _, step in one["units"]}
        assert min(steps) < one["effective"] < one["newest"] and not one["exact"]
        assert one["step"] == min(steps, key=lambda step: (abs(step - one["effective"]), step)) < one["newest"]


@pytest.mark.parametrize("case", CASES)
def test_every_rank_stands_where_it_stood_after_that_step(launched: Launched, case: str) -> None:
    for one in resumed(launched, case, 1):
        before = launched.one("trained", case=case, life=0, rank=one["rank"], step=one["step"])
        assert (one["all"], one["mine"]) == (before["all"], before["mine"])
        assert one["all"]["steps"] == [one["step"]]
        if case != "ddp":
            assert one["all"]["global_steps"] == one["step"]


@pytest.mark.parametrize("case", CASES)
def test_on_one_rank_it_stands_where_rank_0_stood(launched: Launched, case: str) -> None:
    (one,) = resumed(launched, case, 2)
    before = launched.one("trained", case=case, life=1, rank=0, step=one["step"])
    assert (one["all"], one["mine"]) == (before["all"], before["mine"])


@pytest.mark.parametrize("case", CASES)
def test_its_tensors_are_those_that_the_certificate_names(launched: Launched, case: str) -> None:
    for one in resumed(launched, case, 1):
        steps = {(layer, slot): step for layer, slot, step in one["units"]}
        layers = {layer for layer, _ in steps}
        for fragment, digest in one["hashes"].items():
            fqn, slot, *_ = fragment.split("|")
            layer = next((layer for layer in layers if fqn.startswith(f"{layer}.")), "(root)")
            before = launched.one("trained", case=case, life=0, rank=one["rank"], step=steps[layer, slot])
            assert before["hashes"][fragment] == digest, (fragment, steps[layer, slot])


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_and_leaves_commits_whole(launched: Launched, case: str, directory: Path) -> None:
    for life in (1, 2):
        first = resumed(launched, case, life)[0]["step"]
        found = launched.of("trained", case=case, life=life, rank=0)
        assert [one["step"] for one in found] == list(range(first + 1, first + 8))
        assert all(math.isfinite(loss) for one in found for loss in one["losses"])
        assert found[-1]["losses"][0] < launched.one("trained", case=case, life=0, rank=0, step=1)["losses"][0]
    catalog = open_catalog(LocalFiles(directory / case))
    assert verify(catalog).ok
    assert catalog.saves()[0].epoch == 3
