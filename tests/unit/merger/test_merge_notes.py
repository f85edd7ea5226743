"""What a merge says of composites, round-robin runs, folders, links, and the same doubt in many sources."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")

from merger.checkpoint import changed_steps
from merger.layouts.base import MOST_RANKS, Target
from merger.layouts.deepspeed import deepspeed_layout
from merger.layouts.trainer import trainer_layout
from merger.merge import merge
from merger.recipe.parse import recipe_from
from merger.sources import open_source
from store.config_file import parse_yaml
from store.errors import MergeError, UsageError
from tests.support.deepspeed_stores import LAYERS, DeepSpeedStore, change_pt, deepspeed_files, optim_file
from tests.support.planned import Tensor, planned


def test_a_composite_says_where_the_run_itself_would_go_on(tmp_path: Path) -> None:
    """And its certificate says the steps at which moments were stored, not that of the run state."""
    store = DeepSpeedStore(tmp_path / "store")
    store.save(8)
    assert not any("effective step" in note for note in merge(store.root, tmp_path / "whole").notes)
    store.save(10, layers=("one",))
    result = merge(store.root, tmp_path / "out")
    (note,) = (note for note in result.notes if "effective step" in note)
    assert f"effective step, {result.certificate.effective_step:.1f}" in note and "schedule of step 10" in note
    had = {layer: one.step for step in changed_steps(result.certificate) for one in step.had for layer in one.layers}
    assert had == {"one": 10.0, "two": 8.0, "three": 8.0}


def test_a_source_of_a_recipe_keeps_the_steps_of_its_moments(tmp_path: Path) -> None:
    store = DeepSpeedStore(tmp_path / "store")
    store.save(8)
    store.save(10, layers=("one",))
    text = f"sources:\n  a: {{path: {store.root}, step: 10}}\n  b: {{path: {store.root}, step: 8}}\n"
    recipe = recipe_from(
        parse_yaml(f"{text}run_state: a\nrest: a\ntake:\n  - {{layers: three, from: b}}\n", "recipe.yaml")
    )
    certificate = merge(None, tmp_path / "out", recipe=recipe).certificate
    had = {layer: one.step for step in changed_steps(certificate) for one in step.had for layer in one.layers}
    assert had["two"] == 8.0


@pytest.mark.parametrize(("stage", "told"), [(2, True), (3, False)])
def test_files_in_the_order_of_round_robin_gradients_say_so(stage: int, told: bool) -> None:
    config = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    run = planned({"a.w": Tensor((4,)), "b.w": Tensor((3,))}, [["a.w", "b.w"]], config=config)
    laid = deepspeed_layout(run, Target("deepspeed", zero_stage=stage))
    assert any("must have zero_optimization.round_robin_gradients on" in note for note in laid.notes) == told


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Trainer's folder at ZeRO-1, without ``model.safetensors``."""
    path = tmp_path / "checkpoint-10"
    deepspeed_files(tmp_path, 1, 2).rename(path)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 10, "log_history": []}))
    return path


def test_a_trainers_folder_becomes_one_again(folder: Path, tmp_path: Path) -> None:
    result = merge(folder, tmp_path / "out")
    assert result.tag == "checkpoint-10" and (result.out / "checkpoint-10" / "trainer_state.json").is_file()
    assert (result.out / "checkpoint-10" / "model.safetensors").is_file()
    assert merge(folder, tmp_path / "own", target=Target("deepspeed")).tag == "global_step10"


def test_a_folder_without_weights_says_so(folder: Path, tmp_path: Path) -> None:
    sharded = merge(folder, tmp_path / "out", target=Target("trainer", zero_stage=3))
    assert not list(sharded.out.rglob("model.safetensors"))
    assert any("model.safetensors is not written" in note for note in sharded.notes)


def test_a_tag_that_is_a_link_or_has_no_model_says_so(tmp_path: Path) -> None:
    root = deepspeed_files(tmp_path, 1, 1)
    (root / "global_step10").rename(tmp_path / "elsewhere")
    (root / "global_step10").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MergeError, match=r"symbolic link to .*elsewhere.*name that directory itself; there are: none"):
        open_source(root).checkpoint(None, frozenset())
    (root / "latest").unlink()
    with pytest.raises(MergeError, match=r"none, apart from the symbolic links global_step10"):
        open_source(root).checkpoint(None, frozenset())
    (root / "latest").write_text("global_step10")
    (root / "global_step10").unlink()
    shutil.copytree(tmp_path / "elsewhere", root / "global_step10")
    next((root / "global_step10").glob("*model_states.pt")).unlink()
    with pytest.raises(MergeError, match=r"the directory has no model states \(mp_rank_00_model_states\.pt"):
        open_source(root).checkpoint(None, frozenset())


def test_linked_shards_are_read(tmp_path: Path) -> None:
    """Deduplicated storage keeps files under their hashes."""
    root = deepspeed_files(tmp_path, 3, 2)
    plain = merge(root, tmp_path / "plain", target=Target("hf"))
    (tmp_path / "blobs").mkdir()
    for i, path in enumerate(sorted(root.glob("*/*.pt"))):
        path.rename(tmp_path / "blobs" / str(i))
        path.symlink_to(tmp_path / "blobs" / str(i))
    linked = merge(root, tmp_path / "linked", target=Target("hf"))
    assert linked.problems == ()
    one, other = ((result.out / "model.safetensors").read_bytes() for result in (plain, linked))
    assert one == other


def test_a_huge_world_is_refused_before_it_is_planned() -> None:
    with pytest.raises(UsageError, match=rf"{MOST_RANKS} at most"):
        Target("deepspeed", world_size=MOST_RANKS + 1)


def test_the_same_doubt_of_many_sources_is_one_line(tmp_path: Path) -> None:
    original = deepspeed_files(tmp_path, 3, 2)
    for rank in range(2):

        def restarted(tree: object) -> None:
            for state in tree["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():  # type: ignore[index]
                state["step"] = torch.tensor(4.0)

        change_pt(optim_file(original, rank), restarted)
    text = "sources:\n"
    for i in range(5):
        shutil.copytree(original, tmp_path / f"s{i}")
        text += f"  s{i}: {{path: {tmp_path / f's{i}'}}}\n"
    rules = "".join(f"  - {{layers: {layer.name}, from: s{i}}}\n" for i, layer in enumerate(LAYERS, 1))
    text += f"run_state: s0\nrest: s4\ntake:\n{rules}"
    recipe = recipe_from(parse_yaml(text, "recipe.yaml"))
    (problem,) = merge(None, tmp_path / "out", recipe=recipe).problems
    assert problem.startswith("s0, s1, s2") and "the optimizer counts 4 steps" in problem


def test_the_trainers_weights_are_left_out_where_frozen_ones_are_missing(folder: Path) -> None:
    checkpoint = open_source(folder).checkpoint(None, frozenset())
    lacking = type(checkpoint)(**{**vars(checkpoint), "facts": {**checkpoint.facts, "frozen_left_out": ["base"]}})
    laid = trainer_layout(deepspeed_layout, lacking, Target("trainer"))
    assert any("lacks the frozen parameters" in note for note in laid.notes)
    assert not any(file.path.endswith("model.safetensors") for file in laid.files)
