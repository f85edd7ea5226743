"""Which parameters a recipe's rules name in a model, and what is said where they leave some open or name some twice."""

from __future__ import annotations

import pytest

from merger.recipe.compose import SourceChoice, choose_sources
from merger.recipe.model import Model
from merger.recipe.parse import recipe_from
from store.config_file import parse_yaml
from store.schema import LayerRecord, TensorRecord
from tests.support.recipe_models import layers_of, llama

SOURCES = "sources: {a: x, b: y, c: z}\nrun_state: a\n"


def chosen(text: str, model: Model | None = None) -> SourceChoice:
    return choose_sources(recipe_from(parse_yaml(SOURCES + text, "r.yaml")), model or llama())


def told(text: str, model: Model | None = None) -> str:
    (error,) = chosen(text, model).errors
    return str(error)


def test_layers_by_range_name_and_glob() -> None:
    choice = chosen("take: [{layers: [model.layers.0-1, model.norm], from: b}]\nrest: a")
    assert layers_of(choice, "b") == ["model.layers.0", "model.layers.1", "model.norm"]
    assert layers_of(choice, "a") == ["model.embed_tokens", "model.layers.2", "model.layers.3", "lm_head"]
    assert layers_of(chosen("take: [{layers: '*.[13]', from: b}]\nrest: a"), "b") == [
        "model.layers.1",
        "model.layers.3",
    ]
    assert list(choice.source_of) == list(llama().tensors)


def test_blocks_by_position() -> None:
    assert layers_of(chosen("take: [{blocks: [0, 2-3], from: b}]\nrest: a"), "b") == [
        "model.layers.0",
        "model.layers.2",
        "model.layers.3",
    ]


def test_a_block_is_named_with_the_experts_inside_it() -> None:
    model = llama(2, experts=2)
    inside = ["model.layers.1", "model.layers.1.mlp.experts.0", "model.layers.1.mlp.experts.1"]
    for what in ("layers: model.layers.1", "blocks: 1", "layers: model.layers.1-1"):
        assert layers_of(chosen(f"take: [{{{what}, from: b}}]\nrest: a", model), "b", model) == inside
    assert layers_of(chosen("parity: [a, b]\nauxiliary: a", model), "b", model) == inside
    one = chosen("take: [{layers: model.layers.1.mlp.experts.0, from: b}]\nrest: a", model)
    assert layers_of(one, "b", model) == inside[1:2]


def test_parity_over_three() -> None:
    choice = chosen("parity: [a, b, c]\nauxiliary: c")
    assert [choice.source_of[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(4)] == ["a", "b", "c", "a"]
    assert layers_of(choice, "c") == ["model.embed_tokens", "model.layers.2", "model.norm", "lm_head"]


def test_parameters_by_glob_and_regex_and_except() -> None:
    choice = chosen(
        """
take:
  - {parameters: "*.mlp.*", from: b}
  - {regex: 'model\\.layers\\.\\d+\\.self_attn\\..*', from: c}
rest: a"""
    )
    assert choice.errors == ()
    assert choice.source_of["model.layers.3.mlp.up_proj.weight"] == "b"
    assert choice.source_of["model.layers.3.self_attn.q_proj.weight"] == "c"
    assert choice.source_of["model.layers.3.input_layernorm.weight"] == "a"
    less = chosen("take: [{layers: model.layers.0-3, except: '*layernorm*', from: b}]\nrest: a")
    assert less.source_of["model.layers.0.input_layernorm.weight"] == "a"
    assert less.source_of["model.layers.0.mlp.up_proj.weight"] == "b"


def test_a_mistake_that_many_rules_share_is_told_once() -> None:
    names = ", ".join("abc"[i % 3] + str(i) for i in range(40))
    sources = "sources: {" + ", ".join(f"{name}: x" for name in names.split(", ")) + "}\nrun_state: a0\n"
    text = f"{sources}parity: [{names}]\nauxiliary: a0"
    errors = choose_sources(recipe_from(parse_yaml(text, "r.yaml")), llama()).errors
    assert [str(error).partition(":")[0] for error in errors] == ["parity (r.yaml", "r.yaml"]
    assert sum("parity over 40 sources needs 40 blocks; the model has 4" in str(error) for error in errors) == 1


def test_the_mistakes_of_one_entry_are_one_line() -> None:
    blocks = ", ".join(str(i) for i in range(10, 130))
    first, left = map(str, chosen(f"take: [{{blocks: [0, {blocks}], from: b}}]").errors)
    assert first.startswith("take[0] (r.yaml:3): blocks 10-10 do not exist: the model has blocks 0 to 3; blocks 11-11")
    assert first.endswith("; and 118 more") and len(first) < 200
    assert "r.yaml: apart from rules with mistakes, no rule names" in left


def test_auxiliary_layers_by_what_they_are() -> None:
    choice = chosen("auxiliary: {embeddings: a, norm: b, head: c}\ntake: [{layers: 'model.layers.*', from: a}]")
    assert layers_of(choice, "b") == ["model.norm"]
    assert layers_of(choice, "c") == ["lm_head"]
    by_name = chosen("auxiliary: {embed_tokens: a, model.norm: b, lm_head: c}\nparity: [a, b]")
    assert layers_of(by_name, "c") == ["lm_head"]


def test_a_norm_before_the_blocks_and_several_embeddings() -> None:
    names = {"wte": (9, 4), "wpe": (9, 4), "final_layer_norm": (4,), "h.0": (4, 4), "h.1": (4, 4), "out": (4, 9)}
    records = {
        f"{name}.weight": TensorRecord(layer=name, shape=shape, dtype="F32", kind="trainable")
        for name, shape in names.items()
    }
    model = Model(records, tuple(LayerRecord(name=name, block=name.startswith("h.")) for name in names))
    assert model.role == {"wte": "embeddings", "wpe": "embeddings", "final_layer_norm": "norm", "out": "head"}


def test_a_tied_tensor_has_both_names() -> None:
    model = llama(tied=True)
    both = chosen("auxiliary: {embed_tokens: b, lm_head: b, norm: a}\nparity: [a, b]", model)
    assert layers_of(both, "b", model)[0] == "model.embed_tokens"
    assert layers_of(chosen("take: [{parameters: lm_head.weight, from: b}]\nrest: a", model), "b", model) == [
        "model.embed_tokens"
    ]
    apart = told("auxiliary: {embed_tokens: a, lm_head: b, norm: a}\nparity: [a, b]", model)
    assert "model.embed_tokens.weight is named twice (model.embed_tokens.weight is tied to lm_head.weight" in apart
    assert "by auxiliary.embed_tokens (r.yaml:3) from 'a' and by auxiliary.lm_head (r.yaml:3) from 'b'" in apart


def test_what_is_left_open() -> None:
    assert told("take: [{layers: model.layers.0-2, from: b}]\nauxiliary: a") == (
        "r.yaml: no rule names model.layers.3.self_attn.q_proj.weight, model.layers.3.mlp.up_proj.weight, "
        "model.layers.3.input_layernorm.weight (3 of 15 tensors, of model.layers.3); add a rule, or `rest:` with a "
        "source for everything that is not named"
    )
    assert "model.norm.weight (1 of 15" in told("parity: [a, b]\nauxiliary: {embeddings: a, head: a}")
    assert "and 12 more (15 of 15 tensors" in told("")


def test_what_is_named_twice() -> None:
    text = "take:\n- {layers: model.layers.0-3, from: a}\n- {parameters: '*.mlp.*', from: b}\nauxiliary: a"
    assert told(text) == (
        "r.yaml: model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight, "
        "model.layers.2.mlp.up_proj.weight and 1 more are named twice: by take[0] (r.yaml:4) from 'a' and by take[1] "
        "(r.yaml:5) from 'b'; narrow one of the two, with `except:` for instance"
    )
    assert "named twice" in told(text.replace("from: b", "from: a"))


def test_every_mistake_is_told() -> None:
    text = (
        "take:\n- {layers: nope, from: a}\n- {parameters: 'x*', from: b}\n- {blocks: 0-1, from: b}\n"
        "- {blocks: 1, from: a}"
    )
    errors = [str(error) for error in chosen(text).errors]
    assert len(errors) == 4
    assert errors[0].startswith("take[0] (r.yaml:4): the model has no layer 'nope'")
    assert errors[1] == "take[1] (r.yaml:5): 'x*' matches no parameter"
    assert errors[2].startswith("r.yaml: model.layers.1.")
    assert errors[3].startswith("r.yaml: apart from rules with mistakes, no rule names model.embed_tokens")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "take: [{layers: model.layers.2-6, from: a}]\nrest: b",
            ("'model.layers.2-6' (inclusive) names model.layers.4, model.layers.5, model.layers.6, which "
            "the model lacks; its layers: model.embed_tokens, model.layers.0 … model.layers.3, model.norm, lm_head"),
        ),
        ("take: [{layers: model.layers.0-99999999999, from: a}]\nrest: b", "names model.layers.4, model.layers.5"),
        ("take: [{layers: model.layers.3-1, from: a}]\nrest: b", "ends before it begins"),
        ("take: [{layers: model.nrm, from: a}]\nrest: b", "no layer 'model.nrm' (did you mean 'model.norm'?)"),
        (
            "take: [{layers: model.layers.0.mlp, from: a}]\nrest: b",
            ("'model.layers.0.mlp' is a part of the layer model.layers.0: name it with "
            '`parameters: "model.layers.0.mlp.*"`'),
        ),
        ("take: [{blocks: 2-4, from: a}]\nrest: b", "blocks 2-4 do not exist: the model has blocks 0 to 3"),
        (
            "take: [{parameters: model.nrm.weight, from: a}]\nrest: b",
            "'model.nrm.weight' matches no parameter (did you mean 'model.norm.weight'?)",
        ),
        (
            "take: [{layers: model.norm, except: '*.bias', from: a}]\nrest: b",
            "except '*.bias' matches no parameter of its rule",
        ),
        (
            "auxiliary: {pooler: a}\nrest: b",
            ("the model has no 'pooler'; its auxiliary layers: model.embed_tokens (embeddings), model.norm "
            "(norm), lm_head (head)"),
        ),
    ],
)  # fmt: skip
def test_what_the_model_has_not(text: str, message: str) -> None:
    assert message in told(text)


def test_a_head_that_is_tied_is_none() -> None:
    assert "lm_head.weight is tied to model.embed_tokens.weight" in told(
        "auxiliary: {head: a}\nrest: b", llama(tied=True)
    )


def test_parity_over_more_sources_than_blocks() -> None:
    errors = chosen("parity: [a, b, c]\nrest: a", llama(2)).errors
    assert "parity over 3 sources needs 3 blocks; the model has 2" in str(errors[0])
