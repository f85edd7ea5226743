"""Whether two checkpoints hold one model's state: every way in which they may not, told by parameter and source."""

from __future__ import annotations

import pytest

from merger.recipe.certificate import Part
from merger.recipe.compose import model_differences, optimizer_differences
from store.schema import TensorRecord
from tests.support.recipe_checkpoints import checkpoint, record, small_model

HERE = Part(name="here", lineage="", checkpoint=checkpoint("run A", small_model()))


def told(tensors: dict[str, TensorRecord], **given: object) -> list[str]:
    return [
        str(error)
        for error in model_differences(
            HERE, Part(name="there", lineage="", checkpoint=checkpoint("run B", tensors, **given))
        )
    ]  # type: ignore[arg-type]


def missing(weights_only: bool = False, **given: object) -> list[str]:
    other = Part(name="there", lineage="", checkpoint=checkpoint("run B", small_model(), **given))  # type: ignore[arg-type]
    return [str(error) for error in optimizer_differences(HERE, other, small_model(), weights_only=weights_only)]


def test_equal_models() -> None:
    assert told(small_model()) == []
    assert missing() == []
    shuffled = dict(reversed(small_model().items()))
    assert told(shuffled) == []


def test_other_tensors() -> None:
    model = small_model()
    del model["layers.1.norm.weight"]
    model["extra.bias"] = record("extra", (4,))
    lines = told(model)
    assert lines[0].startswith(
        "layers.1.norm.weight: in 'here' (run A), but not in 'there' (run B); take checkpoints of one model"
    )
    assert lines[1].startswith("extra.bias: in 'there' (run B), but not in 'here' (run A)")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (8, 2)}, "shape [4, 4] in 'here' (run A) and [8, 2] in 'there' (run B)"),
        ({"dtype": "F16"}, "dtype BF16 in 'here' (run A) and F16 in 'there' (run B)"),
        ({"kind": "frozen"}, "kind trainable in 'here' (run A) and frozen in 'there' (run B)"),
        ({"aliases": ("up",)}, "tied names [] in 'here' (run A) and ['up'] in 'there' (run B)"),
    ],
)
def test_other_records(change: dict[str, object], message: str) -> None:
    model = small_model()
    model["layers.0.up.weight"] = model["layers.0.up.weight"].replace(**change)
    assert told(model, groups=[[fqn for fqn in model if fqn != "head.weight"]])[0].startswith(
        f"layers.0.up.weight: {message}"
    )


def test_other_param_groups() -> None:
    moving = [fqn for fqn in small_model() if fqn != "head.weight"]
    (line,) = told(small_model(), groups=[moving[:2], moving[2:]])
    assert line.startswith(
        f"{moving[0]} and {moving[2]}: in one param group in 'here' (run A), in two in 'there' (run B); take"
    )
    split = Part(
        name="split", lineage="", checkpoint=checkpoint("run C", small_model(), groups=[moving[:2], moving[2:]])
    )
    (error,) = model_differences(split, HERE)
    assert "in one param group in 'here' (run A), in two in 'split' (run C)" in str(error)
    swapped = Part(
        name="swapped", lineage="", checkpoint=checkpoint("run D", small_model(), groups=[moving[2:], moving[:2]])
    )
    assert list(model_differences(split, swapped)) == []  # numbers of groups do not matter, members do
    (line,) = told(small_model(), groups=[moving[:-1]])
    assert line.startswith(f"{moving[-1]}: in a param group of the optimizer in 'here' (run A), but in none in 'there'")


def test_no_optimizer_state() -> None:
    lines = missing(slots=())
    assert len(lines) == 2
    assert lines[0].startswith(
        "embed.weight, layers.0.up.weight, layers.0.norm.weight and 2 more: 'there' (run B) holds no exp_avg of it, "
        "which the optimizer of 'here' (run A) keeps; take it from a source that has its optimizer state"
    )
    assert missing(slots=(), weights_only=True) == []


def test_another_optimizer() -> None:
    (line,) = missing(slots=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
    assert "the optimizer keeps the slots ['exp_avg', 'exp_avg_sq'] in 'here'" in line
    (line,) = missing(scalars=("step", "mu"))
    assert "the optimizer keeps the scalars ['step'] in 'here' (run A) and ['mu', 'step'] in 'there'" in line
    bare = Part(name="bare", lineage="", checkpoint=checkpoint("weights", small_model(), slots=(), scalars=()))
    lines = [str(error) for error in optimizer_differences(bare, HERE, ["embed.weight"], weights_only=False)]
    assert any("but 'bare' (weights), the source of the run state, has none" in line for line in lines)


def test_another_precision() -> None:
    lines = missing(slot_dtype="BF16")
    assert any("exp_avg is F32 in 'here' (run A) and BF16 in 'there' (run B)" in line for line in lines)
    assert any("frozen is F32 in" in line and line.startswith("head.weight: ") for line in lines)
