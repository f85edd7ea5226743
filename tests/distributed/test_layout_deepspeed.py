"""Stores of real DeepSpeed runs, written for other ZeRO stages and world sizes: stock DeepSpeed loads them and goes on.

Three things are compared: the layout that is computed with the one that live engines have; the state that stock
DeepSpeed loads, in a process that cannot import driftpoint, with the one that was saved; and how it trains on from
there with an engine that driftpoint's own resume filled in place.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from layout_cases import FAMILIES, LAST, SAVED, SOURCES, TARGETS, WORLDS, loads_universally
from merge_cases import CASES

from merger.checkpoint import Checkpoint
from merger.io.output_dir import CERTIFICATE
from merger.layouts.base import Target
from merger.layouts.deepspeed_facts import engine_facts
from merger.layouts.deepspeed_reshard import retarget
from merger.merge import MergeResult, merge
from store.certificate import Certificate
from store.fragments import FragmentIndex
from store.schema import TensorRecord
from tests.support.launch import torchrun
from tests.support.pt_trees import differences, names, read

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SAVE = f"{SAVED:08d}-000001"
TRAINED = (2, 3, 1, 4)
"""Order of the launches: a target's source has to be there before how it goes on is noted."""
UNIVERSAL = [name for name, target in TARGETS.items() if loads_universally(target)]
GOES_ON = [name for name, target in TARGETS.items() if (target.source.world, target.world) != (3, 2)]

SAME_ORDER = [
    name
    for name in UNIVERSAL
    if name in GOES_ON and (TARGETS[name].stage == 3 or "round-robin" not in TARGETS[name].source.family)
]
"""Without round_robin_gradients the gradient's norm is summed in another order, so losses differ in the last bits."""
CONSOLIDATED = [
    name for name, target in TARGETS.items() if (target.source.family, target.stage) != ("bf16-fp32-accumulation", 1)
]
"""DeepSpeed's script knows no files of its own ``BF16_Optimizer``."""
CONVERTED = ("fp32-zero2-on2", "bf16-sub-groups-zero3-on2", "bf16-fp32-accumulation-zero1-on2", "fp16-zero2-on2")

Facts = dict[int, dict[str, dict[str, Any]]]


def launch(worker: str, world: int, directory: Path) -> None:
    done = torchrun(worker, world, {}, directory)
    assert done.code == 0, done.output[-6000:]


WORDS = ("exact", "as_found", "unvouched")
"""What a certificate says of the whole."""


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
    for name, source in SOURCES.items():
        if any(target.source == source for target in TARGETS.values()):
            results[name] = merge(trained / name / "store", trained / name / "universal", target=Target("universal"))
            (trained / name / "load.json").write_text(json.dumps(results[name].load))
    for world in WORLDS:
        launch("layout_load.py", world, trained)
    return results


@pytest.fixture(scope="module")
def traps(trained: Path, merged: dict[str, MergeResult]) -> Path:
    """What stock DeepSpeed makes of universal checkpoints without the lines that the merge prints."""
    del merged
    launch("layout_traps.py", 2, trained)
    return trained


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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_the_layout_of_each_merge_case_is_that_of_its_engine(trained: Path, world: int, case: str) -> None:
    live = json.loads((trained / f"cases-{world}.json").read_text())[case]
    facts = engine_facts(live["facts"])
    assert retarget(facts, described(live), facts.zero_stage, world) == facts


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


@pytest.mark.parametrize("name", CONSOLIDATED)
def test_deepspeed_s_own_script_finds_the_weights_in_the_files(
    trained: Path, merged: dict[str, MergeResult], name: str
) -> None:
    saved = read(trained / TARGETS[name].source.name / "state.pt")["trained"]
    found = get_fp32_state_dict_from_zero_checkpoint(str(merged[name].out))
    assert differences({fqn: state["fp32"] for fqn, state in saved.items()}, {fqn: found[fqn] for fqn in saved}) == []


@pytest.mark.parametrize(
    ("source", "stage"), [("bf16-round-robin-zero2-on2", 2), ("adapters-round-robin-zero3-on2", 3)]
)
def test_many_ranks(trained: Path, source: str, stage: int, tmp_path: Path) -> None:
    saved = read(trained / source / "state.pt")["trained"]
    result = merge(trained / source / "store", tmp_path / "out", target=Target("deepspeed", stage, 67))
    assert len([name for name in names(result.out) if name.endswith("optim_states.pt")]) == 67
    found = get_fp32_state_dict_from_zero_checkpoint(str(result.out))
    assert differences({fqn: state["fp32"] for fqn, state in saved.items()}, {fqn: found[fqn] for fqn in saved}) == []


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
    of_ranks = [note for note in merged[name].notes if "round_robin_gradients" not in note]
    assert bool(of_ranks) == (target.world != target.source.world)


@pytest.mark.parametrize("name", UNIVERSAL)
def test_a_universal_checkpoint_is_loaded_whole_by_the_lines_printed(
    trained: Path, merged: dict[str, MergeResult], name: str
) -> None:
    del merged
    saved = read(trained / TARGETS[name].source.name / "state.pt")
    assert differences(saved, read(trained / name / "found-universal.pt")) == []


@pytest.mark.parametrize("name", SAME_ORDER)
def test_training_goes_on_from_a_universal_checkpoint(trained: Path, merged: dict[str, MergeResult], name: str) -> None:
    del merged
    folder = trained / name
    for rank in range(TARGETS[name].world):
        losses = json.loads((folder / f"universal-{rank}.json").read_text())
        assert losses and losses == json.loads((folder / f"losses-{rank}.json").read_text())
    assert differences(read(folder / "trained.pt"), read(folder / "trained-universal.pt")) == []


@pytest.mark.parametrize("name", CONVERTED)
def test_a_universal_checkpoint_is_what_deepspeed_s_converter_makes(
    trained: Path, merged: dict[str, MergeResult], name: str, tmp_path: Path
) -> None:
    tag = merged[name].tag
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(trained / name / "own" / f"global_step{SAVED}")]
    command += ["--output_folder", str(tmp_path / tag), "--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = trained / name / "universal", tmp_path
    assert (ours / "latest_universal").read_bytes() == (theirs / "latest_universal").read_bytes()
    assert not (ours / "latest").exists()
    parameters = set(read(trained / name / "state.pt")["trained"])
    assert parameters == {path.name for path in (ours / tag / "zero").iterdir() if path.is_dir()}
    found = []
    for fqn in sorted(parameters):
        for path in sorted((theirs / tag / "zero" / fqn).iterdir()):
            stock, mine = read(path), read(ours / tag / "zero" / fqn / path.name)
            if path.name != "step.pt":  # which save it is of, beside what the converter writes
                assert mine.pop("driftpoint")["step"] == SAVED
            if isinstance(stock, torch.Tensor) and path.name != "step.pt":  # ZeRO-3's converter keeps them flat
                stock, mine = {"param": stock}, {"param": mine["param"].flatten()}
            found += differences(stock, mine, f"{fqn}/{path.name}")
    assert found == []
    stock, mine = (read(root / tag / "zero" / "optimizer_state.pt") for root in (theirs, ours))
    for key in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "ds_version"):
        assert key not in stock or differences(stock[key], mine[key]) == [], key
    hyper = [[{**group, "params": None} for group in one["param_groups"]] for one in (stock, mine)]
    assert differences(*hyper) == []


@pytest.mark.parametrize("name", ["fp32-zero2-on2", "bf16-round-robin-zero2-on2", "bf16-sub-groups-zero3-on2"])
def test_a_universal_checkpoint_is_a_source_that_loses_nothing(
    trained: Path, merged: dict[str, MergeResult], name: str, tmp_path: Path
) -> None:
    target = Target("deepspeed", 2, 3)
    straight = merge(trained / name / "store", tmp_path / "straight", target=target).out
    around = merge(merged[name].out, tmp_path / "around", target=target).out
    found = []
    for file in names(straight):
        if file.endswith(".pt"):
            one, other = read(straight / file), read(around / file)
            other.pop("universal_checkpoint_info", None)
            if "driftpoint" in one:  # each names the source that it was made of
                assert (one["driftpoint"].pop("save"), other["driftpoint"].pop("save")) == (SAVE, merged[name].tag)
                # a universal checkpoint holds no hashes, so what is made of it is called as found
                words = [{key: made["driftpoint"].pop(key, None) for key in WORDS} for made in (one, other)]
                assert [(word["exact"], word["as_found"]) for word in words] == [(True, False), (False, True)]
            found += differences(one, other, file)
    assert found == []


def test_what_stock_deepspeed_gets_wrong_by_itself(traps: Path, merged: dict[str, MergeResult]) -> None:
    found = read(traps / "traps.pt")
    for (source, stage), outcome in found.items():
        saved, loaded = read(traps / source / "state.pt"), outcome["loaded"]
        frozen = "blocks.1.up.weight"
        assert not torch.equal(saved["working"][frozen], loaded["working"][frozen])
        assert differences(outcome["before"], loaded["buffers"]) == []
        assert differences(saved["buffers"], loaded["buffers"]) != []
        same_places = differences(saved["trained"], loaded["trained"]) == []
        assert same_places == ("round-robin" not in source)
        assert (differences(saved["hyper"], loaded["hyper"]) == []) == (stage < 3)
        assert (set(outcome["steps"].values()) == {float(LAST)}) == (stage < 3)
    notes = "\n".join(merged["fp32-zero2-on2"].notes)
    assert all(words in notes for words in ("7 frozen parameters and buffers", "weight_decay, lr", "same step tensor"))
    assert "round_robin_gradients" not in notes
    assert "round_robin_gradients" in "\n".join(merged["bf16-round-robin-zero2-on2"].notes)


def test_a_rank_without_a_part_of_a_group_is_foretold(traps: Path, merged: dict[str, MergeResult]) -> None:
    assert json.loads((traps / "small-1.json").read_text()) == "IndexError"
    note = next(note for note in merged["adapters-zero2-on2"].notes if "IndexError" in note)
    assert note.startswith("param group 2 has only 1 element: on more than 1 rank ")
