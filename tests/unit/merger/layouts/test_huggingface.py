"""The hf layout: names, ties, dtypes, shards and the files beside the weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from merger.checkpoint import Checkpoint
from merger.layouts.base import LayoutResult, Target, model_names, strip_wrappers
from merger.layouts.huggingface import hf_layout, hf_weights
from merger.merge import merge
from merger.recipe.parse import read_recipe
from merger.sources.certificates import units_of_one_step
from merger.writers.safetensors import SafetensorsFile
from store.certificate import Certificate
from store.errors import MergeError, UnsupportedError, UsageError
from store.fragments import FragmentIndex
from tests.support.described import described, tensor
from tests.support.plain_stores import PlainStore
from tests.support.planned import Tensor, planned
from tests.support.stores import How

TIED = {"embed.weight": tensor(50, 4, aliases=("head.weight",)), "up.weight": tensor(4, 4, aliases=("down.weight",))}
NAMES = ["embed.weight", "up.weight", "down.weight", "head.weight"]


def folder(tmp_path: Path, **config: Any) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def laid(tensors: Any, target: Target | None = None, **given: Any) -> LayoutResult:
    return hf_layout(described(tensors, **given), target or Target("hf"))


def weights(found: LayoutResult) -> dict[str, torch.dtype]:
    return {
        name: stored.dtype
        for file in found.files
        if isinstance(file.container, SafetensorsFile)
        for name, stored in file.container.tensors_by_name.items()
    }


def content(found: LayoutResult, name: str) -> Any:
    (file,) = (file for file in found.files if file.path == name)
    return json.loads(file.container.data)  # type: ignore[attr-defined]


def test_an_output_of_a_real_store_loads(store: PlainStore, tmp_path: Path) -> None:
    store.save(10)
    result = merge(store.root, tmp_path / "out", target=Target("hf", shard_bytes=300))
    index = json.loads((result.out / "model.safetensors.index.json").read_text())
    found = {}
    for name in sorted(set(index["weight_map"].values())):
        found.update(load_file(result.out / name))
    expected = store.expected(10)
    assert found.keys() == expected.keys() == index["weight_map"].keys()
    assert all(found[fqn].numpy().tobytes() == expected[fqn]["fp32"].tobytes() for fqn in found)
    assert index["metadata"]["total_size"] == 4 * index["metadata"]["total_parameters"]
    assert sorted(path.name for path in result.out.glob("*.safetensors")) == sorted(set(index["weight_map"].values()))
    assert "there is no config.json" in result.notes[0]


def test_shards_are_filled_up_to_their_size() -> None:
    found = laid({f"p{i}": tensor(100) for i in range(5)}, Target("hf", shard_bytes=400))
    assert [file.path for file in found.files] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    assert list(content(found, "model.safetensors.index.json")["weight_map"]) == ["p0", "p1", "p2", "p3", "p4"]


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"tie_word_embeddings": True, "vocab_size": 50}, ["embed.weight", "up.weight", "down.weight"]),
        (
            {"text_config": {"tie_word_embeddings": True, "vocab_size": 50}},
            ["embed.weight", "up.weight", "down.weight"],
        ),
        ({"tie_word_embeddings": False, "vocab_size": 50}, NAMES),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}, "vocab_size": 50}, NAMES),
        ({"vocab_size": 50}, NAMES),
    ],
)
def test_a_name_is_left_out_only_where_transformers_ties_it_again(
    tmp_path: Path, config: dict[str, Any], kept: list[str]
) -> None:
    found = laid(TIED, files=folder(tmp_path, **config), facts={"state_dict_names": NAMES})
    assert list(weights(found)) == kept


def test_where_the_configuration_is_silent_the_weights_that_were_there_speak(tmp_path: Path) -> None:
    files = folder(tmp_path)
    save_file({"embed.weight": torch.zeros(1), "up.weight": torch.zeros(1)}, files / "model.safetensors")
    assert list(weights(laid(TIED, files=files))) == ["embed.weight", "up.weight"]
    save_file({"transformer.embed.weight": torch.zeros(1)}, files / "model.safetensors")  # of another model
    assert sorted(weights(laid(TIED, files=files))) == sorted(NAMES)


def test_without_a_configuration_every_name_is_written() -> None:
    assert sorted(weights(laid(TIED))) == sorted(NAMES)


def test_dtypes_are_those_of_training_or_the_one_asked_for(tmp_path: Path) -> None:
    tensors = {
        "w": tensor(9, 9),
        "gate": tensor(3, dtype="F32"),
        "frozen": tensor(3, kind="frozen"),
        "mean": tensor(3, dtype="F32", kind="buffer"),
        "count": tensor(dtype="I64", kind="buffer"),
    }
    files = folder(tmp_path, dtype="float32", text_config={"torch_dtype": "float32"})
    own = laid(tensors, files=files)
    half, single, whole = torch.bfloat16, torch.float32, torch.int64
    assert list(weights(own).values()) == [half, single, half, single, whole]
    assert content(own, "config.json") == {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}}
    asked = laid(tensors, Target("hf", dtype="F16"), files=files)
    assert list(weights(asked).values()) == [torch.float16] * 3 + [single, whole]
    assert content(asked, "config.json")["dtype"] == "float16"


def test_a_configuration_without_a_dtype_gets_one(tmp_path: Path) -> None:
    found = laid({"w": tensor(2)}, files=folder(tmp_path, model_type="x"))
    assert content(found, "config.json") == {"model_type": "x", "torch_dtype": "bfloat16"}


@pytest.mark.parametrize(("dtype", "error"), [("I64", UsageError), ("BF17", UnsupportedError)])
def test_a_dtype_that_is_none_for_weights(dtype: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=dtype):
        laid({"w": tensor(2)}, Target("hf", dtype=dtype))


def test_the_files_of_a_model_come_along_and_those_of_a_training_do_not(tmp_path: Path) -> None:
    files = folder(tmp_path, architectures=["LlamaForCausalLM"])
    taken = ["generation_config.json", "tokenizer.json", "tokenizer.model", "vocab.txt", "merges.txt",
             "chat_template.jinja", "preprocessor_config.json", "modeling_own.py", "LICENSE"]  # fmt: skip
    left = ["trainer_state.json", "optimizer.pt", "training_args.bin", "zero_to_fp32.py", "latest", "rng_state_0.pth",
            "pytorch_model.bin", "pytorch_model.bin.index.json", "old.safetensors", ".hidden.json"]  # fmt: skip
    for name in (*taken, *left):
        (files / name).write_text(name)
    (files / "additional_chat_templates").mkdir()
    (files / "additional_chat_templates" / "tools.jinja").write_text("tools")
    (files / "global_step3").mkdir()
    found = laid({"w": tensor(2)}, files=files)
    expected = {*taken, "config.json", "model.safetensors", "additional_chat_templates/tools.jinja"}
    assert {file.path for file in found.files} == expected
    assert found.load == ("model = transformers.LlamaForCausalLM.from_pretrained({out!r}, dtype='auto')",)
    assert found.notes == ()


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"not a directory.*--files"):
        laid({"w": tensor(2)}, files=tmp_path / "file")


def test_a_configuration_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(MergeError, match=r"config\.json is not JSON"):
        laid({"w": tensor(2)}, files=tmp_path)


@pytest.mark.parametrize(
    ("names", "bare"),
    [
        (["module.a", "module.b.module.c"], ["a", "b.module.c"]),
        (["module.a", "b"], ["module.a", "b"]),
        (["_orig_mod.module.a", "_orig_mod.module.b"], ["a", "b"]),
        (["layers.0._orig_mod.w"], ["layers.0.w"]),
        (["my_orig_mod.w"], ["my_orig_mod.w"]),
        ([], []),
    ],
)
def test_wrappers_leave_the_names(names: list[str], bare: list[str]) -> None:
    assert strip_wrappers(names) == bare


def test_two_tensors_never_share_a_name() -> None:
    checkpoint = described({"a._orig_mod.w": tensor(1), "a.w": tensor(1)})
    with pytest.raises(MergeError, match=r"the name a\.w"):
        model_names(checkpoint)


def test_adapters_come_along_and_are_told(tmp_path: Path) -> None:
    names = ["base_model.model.q.base_layer.weight", "base_model.model.q.lora_A.default.weight"]
    found = laid({name: tensor(2, 2) for name in names}, files=folder(tmp_path))
    assert list(weights(found)) == names
    assert "wrapped by peft" in found.notes[0]


class Large(PlainStore):
    """A store with one value that float16 does not hold, and one that was infinite all along."""

    def values(self, unit: Any, step: int) -> Any:
        found = super().values(unit, step).copy()
        if unit.slot == "fp32" and unit.layer == self.layers[1].name:
            found.reshape(-1)[:2] = -70000.0, float("-inf")
        return found


def test_weights_that_a_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    store = Large(tmp_path / "store")
    store.save(10)
    fqn = store.layers[1].fqn
    refusal = rf"^{fqn} holds -70000, which float16 cannot hold .*: name --dtype bfloat16 or float32"
    with pytest.raises(UsageError, match=refusal):
        merge(store.root, tmp_path / "out", target=Target("hf", dtype="F16"))
    assert not (tmp_path / "out").exists()
    result = merge(store.root, tmp_path / "out", target=Target("hf", dtype="BF16"))
    found = load_file(result.out / "model.safetensors")[fqn].reshape(-1)
    assert found[:2].tolist() == [torch.tensor(-70000.0).bfloat16().item(), float("-inf")]


def test_a_training_state_keeps_what_the_run_itself_made_infinite() -> None:
    checkpoint = described({"w": tensor(4, dtype="F16")})
    assert all(stored.stays_finite for stored in hf_weights(checkpoint, Target("hf")).values())
    assert not any(stored.stays_finite for stored in hf_weights(checkpoint, Target("trainer")).values())


@pytest.mark.parametrize(("dtype", "name"), [("F16", "float16"), ("BF16", "bfloat16")])
def test_what_a_cast_rounds_is_not_called_exact(store: PlainStore, tmp_path: Path, dtype: str, name: str) -> None:
    store.save(10)
    result = merge(store.root, tmp_path / "out", target=Target("hf", dtype=dtype))
    certificate = result.certificate
    assert not certificate.exact and certificate.lossy == (name,) and certificate.max_error is None
    assert {(unit.slot, unit.encoding, unit.error) for unit in certificate.units} == {("fp32", name, None)}
    document = json.loads((result.out / "driftpoint-certificate.json").read_text())
    assert (document["exact"], document["max_error"]) == (False, None)
    layers = [layer.name for layer in store.layers]
    assert document["written"] == [{"held": "float32", "written": name, "working": False, "layers": layers}]
    (note,) = (note for note in result.notes if "rounds" in note)
    assert f"float32 are written in {name}" in note and "not exact" in note and note in document["notes"]


def test_the_dtype_of_a_recipe_is_the_same_cast(store: PlainStore, tmp_path: Path) -> None:
    store.save(10)
    (tmp_path / "recipe.yaml").write_text(f"sources: {{all: {store.root}}}\nrest: all\ndtype: float16\n")
    recipe = read_recipe(tmp_path / "recipe.yaml")
    result = merge(None, tmp_path / "out", recipe=recipe, target=Target("hf"))
    assert not result.certificate.exact and result.certificate.lossy == ("float16",)


def bf16_run() -> Checkpoint:
    """Master weights in float32 of a model in bfloat16, and frozen weights in bfloat16."""
    run = planned({"a.w": Tensor((4,)), "b.w": Tensor((4,)), "head.w": Tensor((2,), kind="frozen")}, [["a.w", "b.w"]])
    tensors = {fqn: record.replace(dtype="BF16") for fqn, record in run.tensors.items()}
    extents = (
        replace(extent, dtype="BF16" if slot == "frozen" else "F32")
        for (_, slot), found in run.index.names().items()
        for extent in found
    )
    home = {fqn: record.layer for fqn, record in tensors.items()}
    units = units_of_one_step(Path("global_step10"), 10, home, run.index)
    made = Certificate("", "global_step10", 10, exact=False, units=units, problems=(), as_found=True, unvouched=9)
    return replace(run, tensors=tensors, index=FragmentIndex(extents), certificate=made)


def test_working_weights_are_told_from_master_weights() -> None:
    run = bf16_run()
    own = hf_layout(run, Target("hf"))
    assert own.certificate is not None and own.certificate.as_found
    told = own.certificate.as_json()["written"]
    assert told == ({"held": "float32", "written": "bfloat16", "working": True, "layers": ("a", "b")},)
    (note,) = (note for note in own.notes if "working weights" in note)
    assert "--dtype float32 writes the master weights" in note
    masters = hf_layout(run, Target("hf", dtype="F32"))  # frozen ones are only widened
    assert masters.certificate is not None and masters.certificate.as_found
    assert masters.certificate.as_json()["written"] == ()
    assert not any("working weights" in note or "rounds" in note for note in masters.notes)
    half = hf_layout(run, Target("hf", dtype="F16"))
    assert half.certificate is not None and not half.certificate.whole
    assert {(one["held"], one["layers"]) for one in half.certificate.as_json()["written"]} == {
        ("float32", ("a", "b")),
        ("bfloat16", ("head",)),
    }


def test_only_what_is_written_is_certified(store: PlainStore, tmp_path: Path) -> None:
    """Moments that were rounded, or are old, make the weights no less exact; weights that were do."""
    store.save(10, how={"exp_avg": How("int8-block")})
    store.save(20, slots=("fp32",))
    exact = merge(store.root, tmp_path / "exact", target=Target("hf")).certificate
    assert {unit.slot for unit in exact.units} == {"fp32"} and exact.exact and exact.max_staleness == 0
    assert not merge(store.root, tmp_path / "state").certificate.exact
    store.save(30, slots=("fp32",), how={"fp32": How("bf16")})
    rounded = merge(store.root, tmp_path / "rounded", target=Target("hf")).certificate
    assert not rounded.exact and rounded.lossy == ("bf16",)
    store.save(40, slots=("fp32",), layers=("norm",))
    assert not merge(store.root, tmp_path / "old", target=Target("hf")).certificate.exact


@pytest.mark.parametrize("own", [True, False])
def test_what_leaves_a_foreign_checkpoint_in_doubt_leaves_its_weights_in_doubt(own: bool) -> None:
    run = bf16_run()
    doubted = replace(run.certificate, as_found=False, units=run.certificate.units if own else ())
    found = hf_layout(replace(run, certificate=doubted), Target("hf")).certificate
    assert found is not None and not found.whole
