"""Recipes over stores and over checkpoints of stock DeepSpeed: each tensor is of the run and step that was named, and
stock DeepSpeed loads the composite and trains on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from merger.layouts.base import Target
from merger.merge import MergeResult, merge
from merger.recipe.parse import recipe_from
from store.config_file import parse_yaml
from tests.support.launch import ROOT, WORKERS, launcher, python

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ONE, THREE = "zero1-bf16", "zero3-bf16-sub-groups"
Origin = tuple[str, int]
"""A run and a step."""

RECIPES: dict[str, tuple[str, str, dict[str, Origin], Target]] = {
    # Recipe; case that loads it; where layers come from, "" for all others; target.
    "parity": (
        ("sources: {early: {path: HERE/zero1-bf16/own, step: 2}, late: {path: HERE/zero1-bf16/own, step: 4}}\n"
        "parity: [early, late]\nauxiliary: late\nrun_state: late"),
        ONE,
        {"blocks.0": (ONE, 2), "blocks.2": (ONE, 2), "": (ONE, 4)},
        Target(),
    ),
    "store-and-own": (
        ("sources:\n  ours: {path: HERE/zero3-bf16-sub-groups/store, step: '< 4'}\n"
        "  stock: HERE/zero3-bf16-sub-groups/own\ntake: [{parameters: 'blocks.2.*', from: ours}]\n"
        "rest: stock\nrun_state: stock"),
        THREE,
        {"blocks.2": (THREE, 2), "": (THREE, 4)},
        Target(),
    ),
    "two-runs": (
        ("sources: {one: {path: HERE/zero1-bf16/own, step: global_step4}, three: HERE/zero3-bf16-sub-groups/store}\n"
        "take: [{layers: blocks.0-1, from: one}, {layers: blocks.2, from: three}]\nrest: one\nrun_state: three"),
        THREE,
        {"blocks.2": (THREE, 4), "": (ONE, 4)},
        Target(),
    ),
    "other-stage": (
        ("sources: {one: HERE/zero1-bf16/store, three: HERE/zero3-bf16-sub-groups/own}\n"
        "take: [{layers: embed, from: three}]\nrest: one\nrun_state: three"),
        ONE,
        {"embed": (THREE, 4), "": (ONE, 4)},
        Target("deepspeed", zero_stage=1),
    ),
    "slices": (
        ("slices:\n- sources: [{model: HERE/zero1-bf16/own/global_step2, layer_range: [0, 1]}]\n"
        "- sources: [{model: HERE/zero1-bf16/own/global_step4, layer_range: [1, 3]}]\n"
        "pre_weights: {embed: HERE/zero1-bf16/own/global_step4}\n"
        "post_weights: {norm: HERE/zero1-bf16/own/global_step2}\nmerge_method: passthrough\ndtype: bfloat16"),
        ONE,
        {"blocks.0": (ONE, 2), "(root)": (ONE, 2), "": (ONE, 4)},
        Target(),
    ),
}  # fmt: skip


def launch(script: str, directory: Path, *arguments: str, path: str) -> None:
    done = python([*launcher(2), WORKERS / script, directory, *arguments], directory, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, MergeResult]]:
    """Both runs trained, all recipes carried out, and all outputs loaded by stock DeepSpeed."""
    directory = tmp_path_factory.mktemp("recipes")
    launch("recipe_train.py", directory, path=str(ROOT))
    results = {}
    for name, (text, _, _, target) in RECIPES.items():
        recipe = recipe_from(parse_yaml(text.replace("HERE", str(directory)), f"{name}.yaml"))
        results[name] = merge(None, directory / name, recipe=recipe, target=target)
    outputs = [f"{name}={case}" for name, (_, case, _, _) in RECIPES.items()]
    launch("recipe_load.py", directory, *outputs, path="")
    return directory, results


def loaded(directory: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(directory / f"{name}.pt", weights_only=False)
    return found


def layer_of(fqn: str) -> str:
    parts = fqn.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0] if len(parts) > 1 else "(root)"


@pytest.mark.parametrize("name", RECIPES)
def test_each_tensor_is_of_the_run_and_step_named(merged: tuple[Path, Any], name: str) -> None:
    directory, _ = merged
    origins = RECIPES[name][2]
    states = {case: torch.load(directory / case / "states.pt", weights_only=False) for case in (ONE, THREE)}
    others = [(case, step) for case in (ONE, THREE) for step in (2, 4)]
    tensors = loaded(directory, name)["tensors"]
    assert tensors.keys() == states[ONE][4].keys()
    for fqn, slots in tensors.items():
        run, at = origins.get(layer_of(fqn), origins[""])
        for slot, tensor in slots.items():
            truth = states[run][at][fqn][slot]
            assert torch.equal(tensor, truth), (fqn, slot)
            if tensor.numel() > 1:  # one number can be the same in two runs
                assert sum(torch.equal(tensor, states[case][step][fqn][slot]) for case, step in others) == 1, fqn


@pytest.mark.parametrize("name", RECIPES)
def test_what_the_certificate_says(merged: tuple[Path, Any], name: str) -> None:
    directory, results = merged
    result, origins = results[name], RECIPES[name][2]
    certificate = result.certificate
    assert not certificate.exact and certificate.step == 4
    for unit in certificate.units:
        if unit.moving and unit.slot != "buffer":
            assert unit.step == origins.get(unit.layer, origins[""])[1], unit
            assert unit.staleness == 4 - unit.step
    assert {unit.source for unit in certificate.units} == {source.name for source in result.sources}
    told = loaded(directory, name)
    assert told["global_steps"] == 4
    # One for each flat partition: the one of the run that goes on. ZeRO-3 cuts the parameters into many.
    assert max(told["steps"]) == 4.0 and (RECIPES[name][1] == THREE or told["steps"] == {4.0})
    mixed = {step for _, step in origins.values()} == {2, 4}
    assert any("DeepSpeed keeps one optimizer step" in note for note in result.notes) == mixed
    steps = json.loads((result.out / "driftpoint-certificate.json").read_text())["optimizer_steps"]
    assert {step["chosen"] for step in steps} == told["steps"]
    assert any(had["step"] != step["chosen"] for step in steps for had in step["had"]) == mixed
