"""Layers of real model classes, built small and without any download."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from monitor.observe.layers import Layer, find_layers
from store.errors import ConfigError

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def names_of(module: nn.Module) -> list[str]:
    """Parameters and persistent buffers in model order, tied ones once."""
    seen: set[int] = set()
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    found = []
    for name in module.state_dict():
        if id(tensors[name]) not in seen:
            seen.add(id(tensors[name]))
            found.append(name)
    return found


def layers_of(module: nn.Module, **options: object) -> dict[str, Layer]:
    """find_layers, with what must hold of every result checked."""
    fqns = names_of(module)
    layers = find_layers(module, fqns, **options)  # type: ignore[arg-type]
    landed = [fqn for layer in layers for fqn in layer.fqns]
    assert sorted(landed) == sorted(fqns)
    assert len({layer.name for layer in layers}) == len(layers)
    assert [layer.position for layer in layers] == list(range(len(layers)))
    firsts = [fqns.index(layer.fqns[0]) for layer in layers]
    assert firsts == sorted(firsts)
    assert all(list(layer.fqns) == sorted(layer.fqns, key=fqns.index) for layer in layers)
    return {layer.name: layer for layer in layers}


def blocks_of(layers: dict[str, Layer]) -> list[str]:
    return [name for name, layer in layers.items() if layer.block]


def llama(**options: object) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | HEADS | options))


def qwen2(**options: object) -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL | HEADS | options))


def mixtral(**options: object) -> nn.Module:
    config = transformers.MixtralConfig(**SMALL | HEADS | {"num_local_experts": 4} | options)
    return transformers.MixtralForCausalLM(config)


def t5(layers: int = 2) -> nn.Module:
    config = transformers.T5Config(vocab_size=64, d_model=16, d_ff=32, num_layers=layers, num_heads=2, d_kv=8)
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("build", [llama, qwen2])
def test_decoder_with_its_own_head(build: Callable[..., nn.Module]) -> None:
    layers = layers_of(build(tie_word_embeddings=False))
    blocks = [f"model.layers.{i}" for i in range(3)]
    assert list(layers) == ["model.embed_tokens", *blocks, "model.norm", "lm_head"]
    assert blocks_of(layers) == blocks
    assert "model.layers.1.mlp.down_proj.weight" in layers["model.layers.1"].fqns


@pytest.mark.parametrize("build", [llama, qwen2])
def test_a_tied_head_is_not_a_layer(build: Callable[..., nn.Module]) -> None:
    layers = layers_of(build(tie_word_embeddings=True))
    assert list(layers) == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "model.norm"]


def test_a_single_block_is_named_as_in_the_deeper_model() -> None:
    layers = layers_of(llama(num_hidden_layers=1))
    assert list(layers) == ["model.embed_tokens", "model.layers.0", "model.norm", "lm_head"]
    assert blocks_of(layers) == ["model.layers.0"]


def test_gpt2() -> None:
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    layers = layers_of(transformers.GPT2LMHeadModel(config))
    assert list(layers) == [
        "transformer.wte",
        "transformer.wpe",
        "transformer.h.0",
        "transformer.h.1",
        "transformer.ln_f",
    ]
    assert blocks_of(layers) == ["transformer.h.0", "transformer.h.1"]


def test_bert_keeps_its_embeddings_together() -> None:
    config = transformers.BertConfig(**SMALL | {"num_attention_heads": 2})
    layers = layers_of(transformers.BertForMaskedLM(config))
    blocks = [f"bert.encoder.layer.{i}" for i in range(3)]
    assert list(layers) == ["bert.embeddings", *blocks, "cls.predictions"]
    assert blocks_of(layers) == blocks
    assert len(layers["bert.embeddings"].fqns) == 5


def test_t5_has_two_stacks_and_an_odd_first_block() -> None:
    layers = layers_of(t5())
    encoder, decoder = (tuple(f"{side}.block.{i}" for i in range(2)) for side in ("encoder", "decoder"))
    assert list(layers) == ["shared", *encoder, "encoder.final_layer_norm", *decoder, "decoder.final_layer_norm"]
    assert blocks_of(layers) == [*encoder, *decoder]
    odd = [fqn for fqn in layers["encoder.block.0"].fqns if "relative_attention_bias" in fqn]
    assert len(odd) == 1
    assert list(layers_of(t5(1), experts=True))[:2] == ["shared", "encoder.block.0"]


def test_experts_belong_to_their_block_by_default() -> None:
    layers = layers_of(mixtral())
    assert list(layers) == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "model.norm", "lm_head"]


def test_a_fused_expert_bank_is_one_separate_layer() -> None:
    layers = layers_of(mixtral(), experts=True)
    assert list(layers)[1:3] == ["model.layers.0", "model.layers.0.mlp.experts"]
    assert layers["model.layers.2.mlp.experts"].fqns == (
        "model.layers.2.mlp.experts.gate_up_proj",
        "model.layers.2.mlp.experts.down_proj",
    )
    assert "model.layers.2.mlp.gate.weight" in layers["model.layers.2"].fqns


def test_qwen2_moe_keeps_the_shared_expert_with_the_block() -> None:
    config = transformers.Qwen2MoeConfig(
        **SMALL | HEADS, num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8
    )
    layers = layers_of(transformers.Qwen2MoeForCausalLM(config), experts=True)
    assert "model.layers.1.mlp.experts" in layers
    assert "model.layers.1.mlp.shared_expert.up_proj.weight" in layers["model.layers.1"].fqns


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)


class SparseBlock(nn.Module):
    """A block whose experts are modules of their own, as older model code and DeepSpeed-MoE have it."""

    def __init__(self, container: type[nn.Module]) -> None:
        super().__init__()
        self.attention = nn.Linear(8, 8)
        self.mlp = nn.Module()
        self.mlp.gate = nn.Linear(8, 4)
        experts = [Expert() for _ in range(4)]
        named = {f"expert_{i}": expert for i, expert in enumerate(experts)}
        self.mlp.experts = nn.ModuleDict(named) if container is nn.ModuleDict else nn.ModuleList(experts)
        self.adapter = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


class SparseModel(nn.Module):
    def __init__(self, container: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(SparseBlock(container) for _ in range(2))


@pytest.mark.parametrize(
    ("container", "names"), [(nn.ModuleList, ["0", "1", "2", "3"]), (nn.ModuleDict, [f"expert_{i}" for i in range(4)])]
)
def test_each_expert_module_is_a_layer_with_experts_true(container: type[nn.Module], names: list[str]) -> None:
    model = SparseModel(container)
    assert list(layers_of(model)) == ["embed", "layers.0", "layers.1"]
    layers = layers_of(model, experts=True)
    expected = ["embed"]
    for i in range(2):
        expected += [f"layers.{i}", *(f"layers.{i}.mlp.experts.{name}" for name in names)]
    assert list(layers) == expected
    assert len(layers[f"layers.1.mlp.experts.{names[3]}"].fqns) == 4
    assert "layers.1.adapter.2.weight" in layers["layers.1"].fqns


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3), nn.BatchNorm2d(outside)
        if inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1), nn.BatchNorm2d(outside))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 7), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 8), Residual(8, 8))
        self.fc = nn.Linear(8, 10)


def test_residual_net_with_buffers_and_projections() -> None:
    layers = layers_of(ConvNet())
    blocks = ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]
    assert list(layers) == ["conv1", "bn1", *blocks, "fc"]
    assert blocks_of(layers) == blocks
    assert "layer2.0.downsample.1.running_mean" in layers["layer2.0"].fqns
    assert "bn1.num_batches_tracked" in layers["bn1"].fqns


def test_torch_transformer_encoder() -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16), 2, norm=nn.LayerNorm(8), enable_nested_tensor=False
    )
    layers = layers_of(encoder)
    assert list(layers) == ["layers.0", "layers.1", "norm"]
    assert blocks_of(layers) == ["layers.0", "layers.1"]


def test_bare_containers_of_bare_containers() -> None:
    def stage(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 8), nn.LayerNorm(8), nn.GELU())

    layers = layers_of(nn.Sequential(nn.Embedding(5, 4), stage(4), stage(8), nn.Linear(8, 5)))
    assert list(layers) == ["0", "1", "2", "3"]
    assert blocks_of(layers) == ["1", "2"]


def test_plain_stack_of_equal_linears() -> None:
    layers = layers_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    assert list(layers) == blocks_of(layers) == ["0", "2", "4"]


def test_no_repetition_at_all() -> None:
    layers = layers_of(nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 6)))
    assert list(layers) == ["0", "2"]
    assert blocks_of(layers) == []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.fc2 = nn.Linear(8, 8)
        self.fc3 = nn.Linear(8, 2)


def test_attributes_are_layers_however_deeply_the_model_is_wrapped() -> None:
    assert list(layers_of(Net())) == ["fc1", "fc2", "fc3"]
    wrapped = nn.Module()
    wrapped.inner = nn.Module()
    wrapped.inner.net = Net()
    assert list(layers_of(wrapped)) == ["inner.net.fc1", "inner.net.fc2", "inner.net.fc3"]


def test_single_linear_and_tensors_of_the_root() -> None:
    assert list(layers_of(nn.Linear(3, 2))) == ["(root)"]
    model = Net()
    model.position = nn.Parameter(torch.zeros(4))
    layers = layers_of(model)
    assert layers["(root)"].fqns == ("position",)
    assert list(layers) == ["(root)", "fc1", "fc2", "fc3"]


def test_hybrid_stack_with_one_odd_block() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.LayerNorm(3)

    layers = layers_of(nn.ModuleList([Net(), Other(), Net()]))
    assert list(layers) == blocks_of(layers) == ["0", "1", "2"]


def test_checkpoint_wrappers_do_not_change_layers() -> None:
    model = llama()
    plain = [layer for layer in find_layers(model, names_of(model)) if layer.block]
    clean = names_of(model)
    for i, block in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(block)
    assert [layer for layer in find_layers(model, clean) if layer.block] == plain
    inserted = [name for name, _ in model.named_parameters()]
    assert any("_checkpoint_wrapped_module" in name for name in inserted)
    assert [layer.name for layer in find_layers(model, inserted) if layer.block] == [x.name for x in plain]


def test_shapes_of_partitioned_parameters_come_from_ds_shape() -> None:
    model = mixtral()
    whole = list(layers_of(model, experts=True))
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert list(layers_of(model, experts=True)) == whole


def every_model() -> Iterator[nn.Module]:
    yield from (llama(), qwen2(), mixtral(), t5(), ConvNet(), SparseModel(nn.ModuleList), Net())


def test_a_subset_of_names_is_grouped_as_in_the_whole() -> None:
    for model in every_model():
        whole = {fqn: layer.name for layer in find_layers(model, names_of(model)) for fqn in layer.fqns}
        some = [fqn for fqn in whole if fqn.endswith("weight")]
        for layer in find_layers(model, some):
            assert {whole[fqn] for fqn in layer.fqns} == {layer.name}


def test_patterns_override_structure() -> None:
    layers = layers_of(llama(), patterns={"attention": r"model\.layers\.\d+\.self_attn\..*"})
    assert len(layers["attention"].fqns) == 3 * 4
    assert not layers["attention"].block
    assert layers["model.layers.0"].block
    assert not any("self_attn" in fqn for fqn in layers["model.layers.0"].fqns)


def test_a_pattern_may_add_to_a_detected_layer() -> None:
    layers = layers_of(llama(), patterns={"lm_head": r"model\.norm\.weight"})
    assert layers["lm_head"].fqns == ("model.norm.weight", "lm_head.weight")
    assert "model.norm" not in layers


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ({"a": r".*q_proj.*", "b": r".*layers\.0.*"}, ["'a'", "'b'", "model.layers.0.self_attn.q_proj.weight"]),
        ({"a": r"model\.layer"}, ["'a'", "matches no tensor"]),
        ({"a": r"("}, ["'a'", "not a regular expression"]),
    ],
)
def test_bad_patterns_are_refused(patterns: dict[str, str], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        layers_of(llama(), patterns=patterns)
    assert all(words in str(caught.value) for words in said)


@pytest.mark.parametrize("fqns", [["fc1.weight", "fc1.weight"], ["fc9.weight"], ["fc1.scale"], ["fc1"]])
def test_names_that_are_not_in_the_model_are_refused(fqns: list[str]) -> None:
    with pytest.raises(ConfigError, match=fqns[0]):
        find_layers(Net(), fqns)
