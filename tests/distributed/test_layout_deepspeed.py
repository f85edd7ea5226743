"""Stores of real DeepSpeed runs, written for other ZeRO stages and world sizes: stock DeepSpeed loads them and goes on.

Three things are compared: the layout that is computed with the one that live engines have; the state that stock
DeepSpeed loads, in a process that cannot import driftpoint, with the one that was saved; and how it trains on from
there with an engine that driftpoint's own resume filled in place.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")
sys.path.insert(0, str(Path(__file__).parent / "workers"))

from layout_cases import FAMILIES, SAVED, TARGETS, WORLDS

from merger.checkpoint import Checkpoint
from merger.layouts.deepspeed_facts import engine_facts
from merger.layouts.deepspeed_retarget import retarget
from merger.merge import MergeResult, merge
from merger.report import CERTIFICATE
from merger.target import Target
from store.certificate import Certificate
from store.coverage import FragmentIndex
from store.schema import TensorRecord
from tests.support.launch import torchrun
from tests.support.pt_trees import differences, names, read

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TRAINED = (2, 3, 1, 4)
"""Order of the launches: a target's source has to be there before how it goes on is noted."""
GOES_ON = [name for name, target in TARGETS.items() if (target.source.world, target.world) != (3, 2)]

Facts = dict[int, dict[str, dict[str, Any]]]


def launch(worker: str, world: int, directory: Path) -> None:
    done = torchrun(worker, world, {}, directory)
    assert done.code == 0, done.output[-6000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("layouts")
    for world in TRAINED:
        launch("layout_train.py", world, directory)
    return directory


@pytest.fixture(scope="module")
def merged(trained: Path) -> dict[str, MergeResult]:
    """Every target written, and loaded by stock DeepSpeed."""
    results = {
        name: merge(
            trained / target.source.name / "store",
            trained / name / "merged",
            target=Target("deepspeed", target.stage, target.world),
        )
        for name, target in TARGETS.items()
    }
    for world in WORLDS:
        launch("layout_load.py", world, trained)
    return results


@pytest.fixture(scope="module")
def facts(trained: Path) -> Facts:
    return {world: json.loads((trained / f"facts-{world}.json").read_text()) for world in WORLDS}


def described(noted: dict[str, Any]) -> Checkpoint:
    """A checkpoint without bytes: names, shapes and facts."""
    tensors = {fqn: _record(**record) for fqn, record in noted["tensors"].items()}
    state: dict[str, Any] = {"param_groups": [], "scalars": {}, "slots": {}}
    certificate = Certificate("0", "00000001-000001", 1, True, (), ())
    return Checkpoint("a run", "deepspeed", 1, tensors, (), FragmentIndex(()), state, noted["facts"], {}, certificate)


def _record(shape: list[int], dtype: str, kind: Any, aliases: list[str]) -> TensorRecord:
    return TensorRecord(layer="any", shape=tuple(shape), dtype=dtype, kind=kind, aliases=tuple(aliases))


def pairs(noted: dict[int, dict[str, Any]]) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    points = [(stage, world) for world in noted for stage in ("1", "2", "3")]
    return product(points, points)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_is_that_of_live_engines(facts: Facts, family: str) -> None:
    noted = {world: found[family] for world, found in facts.items()}
    checked = 0
    for (stage, world), (other_stage, other_world) in pairs(noted):
        source, live = noted[world][stage], noted[other_world][other_stage]
        found = retarget(engine_facts(source["facts"]), described(source), int(other_stage), other_world)
        assert found == engine_facts(live["facts"]), (stage, world, other_stage, other_world)
        checked += 1
    assert checked == (3 * len(WORLDS)) ** 2


@pytest.mark.parametrize("name", TARGETS)
def test_stock_deepspeed_loads_the_very_state_that_was_saved(
    trained: Path, merged: dict[str, MergeResult], name: str
) -> None:
    del merged
    saved, found = read(trained / TARGETS[name].source.name / "state.pt"), read(trained / name / "found.pt")
    assert saved["trained"] and saved["steps"] and set(saved["steps"].values()) == {float(SAVED)}
    assert differences(saved, found) == []


@pytest.mark.parametrize("name", TARGETS)
def test_stock_deepspeed_writes_the_same_files(trained: Path, merged: dict[str, MergeResult], name: str) -> None:
    del merged
    ours, theirs = trained / name / "merged", trained / name / "again"
    assert [file for file in names(ours) if file != CERTIFICATE] == names(theirs)
    found = []
    for file in names(theirs):
        if file.endswith(".pt"):
            mine, stock = read(ours / file), read(theirs / file)
            mine.pop("driftpoint", None)
            found += differences(stock, mine, file)
        elif (ours / file).read_bytes() != (theirs / file).read_bytes():
            found.append(file)
    assert found == []


@pytest.mark.parametrize("name", GOES_ON)
def test_training_goes_on_as_after_a_resume_in_place(trained: Path, merged: dict[str, MergeResult], name: str) -> None:
    del merged
    folder = trained / name
    for rank in range(TARGETS[name].world):
        losses = json.loads((folder / f"after-{rank}.json").read_text())["losses"]
        assert losses and losses == json.loads((folder / f"losses-{rank}.json").read_text())
    assert differences(read(folder / "trained.pt"), read(folder / "trained-on.pt")) == []
    assert differences(read(folder / "found.pt"), read(folder / "trained-on.pt")) != []


@pytest.mark.parametrize("name", TARGETS)
def test_no_rank_s_own_state_is_lost_or_doubled(trained: Path, merged: dict[str, MergeResult], name: str) -> None:
    target = TARGETS[name]
    told = [json.loads((trained / name / f"after-{rank}.json").read_text())["ranks"] for rank in range(target.world)]
    saved = list(range(target.source.world))
    found = sorted(rank for ranks in told for rank in ranks) if target.stage == 3 else told[0]
    assert found == saved
    assert bool(merged[name].notes) == (target.world != target.source.world)
