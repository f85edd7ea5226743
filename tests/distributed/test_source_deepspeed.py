"""Checkpoints that stock DeepSpeed saved, read by the merger: every tensor, name and number is the live engine's.

One launch per world size trains and saves every case and notes the truth from the engine's memory.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from source_cases import ADAPTERS, CASES

from merger.checkpoint import Checkpoint
from merger.io.output_dir import CERTIFICATE
from merger.layouts.deepspeed_facts import engine_facts
from merger.merge import merge
from merger.sources import open_source
from store.errors import MergeError
from tests.support.foreign import directory_differences, read_tensors, train_stock
from tests.support.pt_trees import same_bits

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WORLDS = (1, 2, 3)
EVERY = [(ranks, case) for ranks in WORLDS for case in (*CASES, *ADAPTERS)]
_LAUNCHED: dict[int, Path] = {}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directory of a world size's cases; each is launched once."""

    def folder(ranks: int) -> Path:
        if ranks not in _LAUNCHED:
            directory = tmp_path_factory.mktemp(f"world-{ranks}")
            train_stock(directory, ranks, [*CASES, *ADAPTERS])
            _LAUNCHED[ranks] = directory
        return _LAUNCHED[ranks]

    yield folder
    _LAUNCHED.clear()


def read(folder: Path, step: int | str | None = None) -> Checkpoint:
    return open_source(folder / "saved").checkpoint(step, frozenset())


def expected_tensors(truth: dict[str, Any], case: str) -> dict[tuple[str, str], torch.Tensor]:
    tensors: dict[tuple[str, str], torch.Tensor] = truth["tensors"]
    if case not in ADAPTERS:
        return tensors
    # Saved without frozen parameters; but at ZeRO-2 DeepSpeed forgets to leave out what is tied to one.
    kept = {key: value for key, value in tensors.items() if key[1] != "frozen"}
    if ADAPTERS[case][0] == 2:
        kept["head.weight", "frozen"] = tensors["embed.weight", "frozen"]
    return kept


@pytest.mark.parametrize(("ranks", "case"), EVERY)
def test_every_tensor_is_the_engines(launched: Any, ranks: int, case: str) -> None:
    truth = torch.load(launched(ranks) / case / "truth.pt", weights_only=False)
    checkpoint, expected = read(launched(ranks) / case), expected_tensors(truth, case)
    found = read_tensors(checkpoint)
    assert found.keys() == expected.keys()
    wrong = [key for key, tensor in expected.items() if not same_bits(tensor, found[key])]
    assert wrong == []


@pytest.mark.parametrize(("ranks", "case"), EVERY)
def test_param_groups_and_the_rest_of_the_state_are_the_engines(launched: Any, ranks: int, case: str) -> None:
    truth = torch.load(launched(ranks) / case / "truth.pt", weights_only=False)
    checkpoint = read(launched(ranks) / case)
    state = checkpoint.framework_state
    assert [group["params"] for group in state["param_groups"]] == truth["members"]
    assert [group["hyper"] for group in state["param_groups"]] == truth["groups"]
    counters = state["counters"]
    names = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
    assert tuple(counters[name] for name in names) == truth["counters"]
    assert counters["gradient_accumulation_steps"] == 2
    assert state["lr_scheduler"] == truth["scheduler"]
    if truth["scaler"] is None:
        assert state["loss_scaler"] is None
    else:
        kind, attributes = truth["scaler"]
        assert state["loss_scaler"]["class"] == kind
        kept = {name: value for name, value in attributes.items() if isinstance(value, bool | int | float)}
        assert {key: value for key, value in state["loss_scaler"].items() if key != "class"} == kept
    skipped = counters["skipped_steps"]
    trained = [fqn for group in truth["members"] for fqn in group]
    assert all(float(state["scalars"][fqn]["step"]) == 3 - skipped for fqn in trained)
    assert all(state["slots"][fqn] == ["exp_avg", "exp_avg_sq"] for fqn in trained)


@pytest.mark.parametrize(("ranks", "case"), EVERY)
def test_merged_to_itself_it_is_what_deepspeed_wrote(launched: Any, tmp_path: Path, ranks: int, case: str) -> None:
    folder = launched(ranks) / case
    result = merge(folder / "saved", tmp_path / "merged")
    checkpoint = read(folder)
    whole = case not in ADAPTERS  # those were saved without their frozen parameters
    assert (result.tag, result.certificate.as_found, result.certificate.save) == ("global_step3", whole, "global_step3")
    original = tmp_path / "original"
    shutil.copytree(folder / "saved", original, ignore=shutil.ignore_patterns("global_step2"))
    found = [line for line in directory_differences(original, result.out) if not known(line, case)]
    assert found == []
    assert engine_facts(checkpoint.facts).has_layout
    assert (result.out / CERTIFICATE).exists()


def known(line: str, case: str) -> bool:
    """What is written otherwise on purpose: a checkpoint without its frozen parameters lists none of them, and has
    nothing that is tied to them."""
    return case in ADAPTERS and any(name in line for name in ("frozen_param_", "shared_params", "['head.weight']"))


@pytest.mark.parametrize("ranks", WORLDS)
def test_what_the_awkward_model_has(launched: Any, ranks: int) -> None:
    for case in CASES:
        checkpoint = read(launched(ranks) / case)
        tensors = checkpoint.tensors
        assert tensors["embed.weight"].aliases == ("head.weight",) and "head.weight" not in tensors
        assert {fqn for fqn, tensor in tensors.items() if tensor.kind == "buffer"} == {
            "scale", "blocks.0.seen", "blocks.1.seen", "blocks.2.seen",
        }  # fmt: skip
        assert all(
            tensors[fqn].kind == "frozen" for fqn in tensors if fqn.startswith("blocks.1.") and "seen" not in fqn
        )
        assert ("nothing" in tensors) == (CASES[case][0] < 3)
        assert checkpoint.client_state == {"mine": {"list": [1, 2.5, "three"]}}
        layers = [(layer.name, layer.block) for layer in checkpoint.layers]
        assert layers == [
            ("(root)", False), ("embed", False), ("blocks.0", True), ("blocks.1", True), ("blocks.2", True),
        ]  # fmt: skip
        units = {(unit.layer, unit.slot): unit.moving for unit in checkpoint.certificate.units}
        assert units["blocks.0", "exp_avg"] and not units["blocks.1", "frozen"] and not units["(root)", "buffer"]


@pytest.mark.parametrize("case", ["zero1-bf16", "zero3-bf16-sub-groups"])
def test_steps_and_tags(launched: Any, case: str) -> None:
    root = launched(2) / case / "saved"
    source = open_source(root)
    assert source.steps() == (3, 2)
    for name in (2, "2", "global_step2"):
        assert source.checkpoint(name, frozenset()).step == 2
    with pytest.raises(MergeError, match="no checkpoint 7; there are: global_step2, global_step3"):
        source.checkpoint(7, frozenset())
    alone = open_source(root / "global_step2")
    assert alone.steps() == (2,)
    assert alone.checkpoint(None, frozenset()).step == 2
    with pytest.raises(MergeError, match="is one checkpoint, and not 3"):
        alone.checkpoint(3, frozenset())
