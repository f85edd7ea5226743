"""Layers from names alone: the same as the module tree gives, for the models that people train."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from merger.layers import group_layers
from monitor.observe.layers import find_layers

transformers = pytest.importorskip("transformers")


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_embd=8, n_layer=2, n_head=2))  # type: ignore[no-any-return]


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12
    )
    return transformers.BertForMaskedLM(config)  # type: ignore[no-any-return]


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=12, num_layers=3, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, image_size=8, patch_size=4
    )
    return transformers.ViTForImageClassification(config)  # type: ignore[no-any-return]


def qwen_moe() -> nn.Module:
    config = transformers.Qwen2MoeConfig(
        vocab_size=32, hidden_size=8, intermediate_size=12, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config)  # type: ignore[no-any-return]


def one_layer() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, projected: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        if projected:
            self.shortcut = nn.Conv2d(4, 4, 1)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.stage1 = nn.Sequential(Residual(True), Residual(False))
        self.stage2 = nn.Sequential(Residual(True), Residual(False), Residual(False))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(4, 2)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron()


MODELS = (llama, gpt2, bert, t5, vit, qwen_moe, one_layer, Convolutional, Perceptron, Wrapped)


@pytest.mark.parametrize("make", MODELS)
def test_the_same_layers_as_from_the_module_tree(make: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = make()
    kept = model.state_dict().keys()
    named = [*model.named_parameters(), *((name, one) for name, one in model.named_buffers() if name in kept)]
    shapes = {name: tuple(tensor.shape) for name, tensor in named}
    found = [(layer.name, layer.block, layer.fqns) for layer in group_layers(shapes)]
    expected = [(layer.name, layer.block, layer.fqns) for layer in find_layers(model, list(shapes))]
    assert found == expected


def test_names_without_any_module() -> None:
    assert [(layer.name, layer.fqns) for layer in group_layers({"w": (2,), "b": (2,)})] == [("(root)", ("w", "b"))]
    assert group_layers({}) == ()


def test_thousands_of_layers_take_no_time() -> None:
    shapes = {f"model.layers.{i}.{part}.weight": (4,) for i in range(5000) for part in ("attn.q", "attn.k", "mlp.up")}
    found = group_layers({**shapes, "lm_head.weight": (4,)})
    assert len(found) == 5001
    assert found[4999].name == "model.layers.4999" and not found[5000].block
