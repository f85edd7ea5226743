"""MergeKit's files, taken as they are; and what in them would change a state, refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from merger.recipe.compose import choose_sources
from merger.recipe.model import Recipe, SourceRef
from merger.recipe.parse import recipe_from
from store.config_file import parse_yaml
from store.errors import ConfigError, DriftpointError, UnsupportedError
from tests.support.recipe_models import layers_of, llama

SLICES = """
slices:
  - sources: [{model: run/checkpoint-100, layer_range: [0, 2]}]
  - sources: [{model: run/checkpoint-200, layer_range: [2, 4]}]
"""
OLD, NEW = "run/checkpoint-100", "run/checkpoint-200"
THE_OLD, THE_NEW = "checkpoint-100", "checkpoint-200"
"""What these sources are called."""


def recipe(text: str) -> Recipe:
    return recipe_from(parse_yaml(text, "r.yaml"))


def test_slices_alone_and_where_the_rest_comes_from() -> None:
    found = recipe(SLICES + "merge_method: passthrough\ndtype: bfloat16\n")
    assert found.sources == {THE_OLD: SourceRef(Path(OLD)), THE_NEW: SourceRef(Path(NEW))}
    choice = choose_sources(found, llama())
    assert layers_of(choice, THE_OLD) == ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    assert layers_of(choice, THE_NEW) == ["model.layers.2", "model.layers.3", "model.norm", "lm_head"]
    assert (found.run_state, found.files, found.dtype) == (None, None, "BF16")


PUBLISHED = f"""
slices:
  - sources:
      - model: {OLD}
        layer_range: [0, 0]
  - sources:
      - model: {OLD}
        layer_range: [0, 2]
  - sources:
      - model: {NEW}
        layer_range: [2, 4]
  - sources:
      - model: {NEW}
        layer_range: [5, 5]
  - sources:
      - model: {OLD}
        layer_range: [6, 6]


post_weights:
  - name: lm_head.weight
    model: {NEW}
  - name: model.embed_tokens.weight
    model: {OLD}

pre_weights:
  - name: model.norm.weight
    model: {OLD}

merge_method: passthrough
dtype: bfloat16
"""
"""The shape of LLMTailor's example files: slices without a block stand for norm, head and embeddings."""


def test_the_published_shape_is_taken_as_it_is() -> None:
    choice = choose_sources(recipe(PUBLISHED), llama())
    assert layers_of(choice, THE_OLD) == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    assert layers_of(choice, THE_NEW) == ["model.layers.2", "model.layers.3", "lm_head"]


@pytest.mark.parametrize(("number", "what"), [(0, "norm"), (5, "lm_head or embed"), (6, "embed")])
def test_a_slice_without_a_block_must_not_contradict_the_weights_outside(number: int, what: str) -> None:
    text = PUBLISHED.replace(f"layer_range: [{number}, {number}]", f"layer_range: [{number}, {number}] # here")
    lines = text.splitlines()
    place = next(i for i, line in enumerate(lines) if line.endswith("# here"))
    lines[place - 1] = "      - model: run/checkpoint-300"
    with pytest.raises(ConfigError, match=f"means {what} of run/checkpoint-300"):
        recipe("\n".join(lines))


def test_slices_without_any_block() -> None:
    with pytest.raises(ConfigError, match="no slice takes a block"):
        recipe("slices: [{sources: [{model: x, layer_range: [0, 0]}]}]")


@pytest.mark.parametrize(
    "given",
    [
        (
            f"pre_weights:\n- {{name: embed_tokens, model: {NEW}}}\npost_weights:\n"
            f"- {{name: norm, model: {OLD}}}\n- {{name: lm_head, model: {NEW}}}"
        ),
        (
            f"pre_weights:\n- {{name: model.embed_tokens.weight, source: {NEW}, is_embed: true}}\npost_weights:\n"
            f"- {{name: model.norm.weight, source: {OLD}}}\n- {{name: lm_head.weight, source: {NEW}}}"
        ),
        f"pre_weights: {{embed_tokens: {NEW}}}\npost_weights: {{norm: {OLD}, lm_head: {{model: {NEW}}}}}",
        (
            f"pre_weights:\n- {{layer: embed_tokens, sources: [{{model: {NEW}}}]}}\npost_weights:\n"
            f"- {{weight: norm.weight, model: {{path: {OLD}}}}}\n- {{name: lm_head, model: {NEW}}}"
        ),
    ],
)
def test_weights_outside_the_blocks(given: str) -> None:
    choice = choose_sources(recipe(SLICES + given), llama())
    assert layers_of(choice, THE_NEW) == ["model.embed_tokens", "model.layers.2", "model.layers.3", "lm_head"]
    assert layers_of(choice, THE_OLD) == ["model.layers.0", "model.layers.1", "model.norm"]


def test_all_weights_before_or_after_from_one_model() -> None:
    for given in (f"pre_weights: {NEW}\npost_weights: {OLD}", f"pre_weights: {{model: {NEW}}}\npost_weights: {OLD}"):
        choice = choose_sources(recipe(SLICES + given), llama())
        assert layers_of(choice, THE_NEW) == ["model.embed_tokens", "model.layers.2", "model.layers.3"]


def test_a_tied_head_comes_with_the_embeddings() -> None:
    model = llama(tied=True)
    assert choose_sources(recipe(SLICES), model).errors == ()
    both = f"pre_weights: {{embed_tokens: {OLD}}}\npost_weights: {{norm: {NEW}, lm_head.weight: {OLD}}}"
    assert choose_sources(recipe(SLICES + both), model).errors == ()
    (error,) = choose_sources(
        recipe(SLICES + both.replace(f"lm_head.weight: {OLD}", f"lm_head.weight: {NEW}")), model
    ).errors
    assert "is tied to lm_head.weight" in str(error)


def test_weights_that_are_left_out_are_left_open() -> None:
    (error,) = choose_sources(recipe(SLICES + f"post_weights: {{norm: {NEW}}}"), llama()).errors
    assert "r.yaml: no rule names lm_head.weight" in str(error)


def test_slices_that_end_too_early_or_too_late() -> None:
    (error,) = choose_sources(recipe(SLICES), llama(5)).errors
    assert "no rule names model.layers.4.self_attn.q_proj.weight" in str(error)
    errors = choose_sources(recipe(SLICES), llama(3)).errors
    assert "slices[1] (r.yaml:4): blocks 2-3 do not exist: the model has blocks 0 to 2" in str(errors[0])


def test_one_slice_without_a_range_is_everything() -> None:
    found = recipe("slices: [{sources: [{model: here}]}]")
    assert layers_of(choose_sources(found, llama()), "here") == [layer.name for layer in llama().layers]
    assert (found.run_state, found.notes) == ("here", ())


def test_run_state_files_and_tokenizer() -> None:
    assert recipe(SLICES + f"base_model: {OLD}").run_state == THE_OLD
    assert recipe(SLICES + f"base_model: {OLD}").files == THE_OLD
    assert recipe(SLICES + f"base_model: {OLD}\nrun_state: {NEW}").run_state == THE_NEW
    elsewhere = recipe(SLICES + "base_model: other/model\ntokenizer_source: base")
    assert (elsewhere.run_state, elsewhere.files) == (None, Path("other/model"))
    assert recipe(SLICES + f"tokenizer_source: {NEW}").files == THE_NEW
    assert recipe(SLICES + f"tokenizer_source: {NEW}\nfiles: here").files == Path("here")


def test_steps_behind_an_at_sign(tmp_path: Path) -> None:
    text = "slices: [{sources: [{model: '%s', layer_range: [0, 4]}]}]"
    assert recipe(text % "run/store@120").sources == {"store@120": SourceRef(Path("run/store"), 120)}
    assert recipe(text % "run/store@<= 120").sources["store@<= 120"].step == "<= 120"
    (tmp_path / "a@1").mkdir()
    assert recipe(text % (tmp_path / "a@1")).sources["a@1"] == SourceRef(tmp_path / "a@1")


def test_names_of_sources_that_end_alike() -> None:
    found = recipe(SLICES.replace("run/checkpoint-200", "again/checkpoint-100/"))
    assert list(found.sources) == ["run/checkpoint-100", "again/checkpoint-100/"]


def test_what_changes_no_number_is_let_through() -> None:
    recipe(SLICES + "parameters: {int8_mask: true, normalize: true, weight: 1.0}\nname: mine\nout_dtype: float32\n")
    recipe("slices: [{sources: [{model: x, layer_range: [0, 4], parameters: {scale: 1}}], parameters: {}}]")


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        (SLICES + "merge_method: slerp", UnsupportedError, "r.yaml:5: merge_method 'slerp' changes weights"),
        ("merge_method: linear\nmodels: [{model: x}]", UnsupportedError, "merge_method 'linear' changes weights"),
        ("merge_method: passthrough\nmodels: [{model: x}]", UnsupportedError, "'models' is not supported"),
        (SLICES + "parameters: {weight: 0.5}", UnsupportedError, "parameter 'weight' (0.5) changes weights"),
        (SLICES + "parameters: {t: [0, 1]}", UnsupportedError, "parameter 't' ([0, 1]) changes weights"),
        (
            SLICES.replace("[2, 4]}", "[2, 4], parameters: {scale: [{filter: o_proj, value: 0}]}}"),
            UnsupportedError,
            "r.yaml:4: parameter 'scale'",
        ),
        (
            SLICES.replace("[2, 4]}", "[2, 4]}, {model: x, layer_range: [2, 4]}"),
            UnsupportedError,
            "r.yaml:4: slices[1] has 2 sources; a passthrough has one",
        ),
        (
            SLICES.replace("[2, 4]", "[1, 4]"),
            UnsupportedError,
            "r.yaml:4: slices[1] begins at block 1, and the slices before end at block 2: every block must",
        ),
        (SLICES.replace("[2, 4]", "[0, 2]"), UnsupportedError, "begins at block 0"),
        (SLICES.replace("[0, 2]", "[2, 4]"), ConfigError, "blocks 0 to 1 are in no slice; every block is needed once"),
        (SLICES.replace("[2, 4]", "[3, 4]"), ConfigError, "blocks 2 to 2 are in no slice"),
        (SLICES.replace("[2, 4]", "[4, 2]"), ConfigError, "layer_range: must be two numbers"),
        (SLICES.replace("[2, 4]", "2-4"), ConfigError, "such as [0, 8], not '2-4'"),
        (SLICES.replace(", layer_range: [2, 4]", ""), ConfigError, "slices[1] needs a `layer_range`, such as [0, 8]"),
        (SLICES.replace("model: run/checkpoint-200, ", ""), ConfigError, "r.yaml:4: slices.1.sources.0.model is"),
        (SLICES.replace("layer_range: [2", "layer_rang: [2"), ConfigError, "unknown key 'layer_rang': did you mean"),
        (SLICES + "modules: {}", UnsupportedError, "'modules' is not supported"),
        (SLICES + "tokenizer: {source: union}", UnsupportedError, "'tokenizer' is not supported"),
        (SLICES + "tokenizer_source: union", UnsupportedError, "a union of tokenizers changes rows"),
        (SLICES + "chat_template: auto", UnsupportedError, "'chat_template' is not supported"),
        (SLICES + "slcies: 3", ConfigError, "r.yaml:5: unknown key 'slcies': did you mean 'slices'?"),
        (SLICES + "dtype: int8", ConfigError, "r.yaml:5: dtype 'int8' is not supported"),
        (SLICES + "pre_weights:\n- {model: x}", ConfigError, "r.yaml:6: pre_weights.0.name is missing"),
        (SLICES + "post_weights: 3", ConfigError, "post_weights: input should be a valid tuple (it is 3)"),
        (SLICES + "run_state: [a, b]", ConfigError, "run_state: must name one `model`, a directory, not ['a', 'b']"),
        ("slices: []", ConfigError, "slices: tuple should have at least 1 item"),
        ("slices: [3]", ConfigError, "slices.0: input should be a valid mapping"),
        ("merge_method: passthrough", ConfigError, "slices is missing"),
        ("slices: [{sources: [{model: 'x@>3', layer_range: [0, 1]}]}]", ConfigError, "'>3' is not a bound on a step"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, kind: type[DriftpointError], told: str) -> None:
    with pytest.raises(kind) as raised:
        recipe(text)
    assert told in str(raised.value)
