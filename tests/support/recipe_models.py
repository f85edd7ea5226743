"""Models as recipes see them: names and shapes, no values."""

from __future__ import annotations

from merger.recipe.compose import SourceChoice
from merger.recipe.model import Model
from store.schema import LayerRecord, TensorRecord


def llama(blocks: int = 4, tied: bool = False, experts: int = 0) -> Model:
    """embed_tokens, blocks of two matrices and a norm (and experts as layers of their own), norm, head."""
    tensors = {"model.embed_tokens.weight": ("model.embed_tokens", (50, 8))}
    for i in range(blocks):
        block = f"model.layers.{i}"
        tensors |= {
            f"{block}.self_attn.q_proj.weight": (block, (8, 8)),
            f"{block}.mlp.up_proj.weight": (block, (8, 8)),
            f"{block}.input_layernorm.weight": (block, (8,)),
        }
        for expert in range(experts):
            name = f"{block}.mlp.experts.{expert}"
            tensors[f"{name}.weight"] = (name, (8, 8))
    tensors["model.norm.weight"] = ("model.norm", (8,))
    if not tied:
        tensors["lm_head.weight"] = ("lm_head", (50, 8))
    records = {
        fqn: TensorRecord(layer=layer, shape=shape, dtype="BF16", kind="trainable")
        for fqn, (layer, shape) in tensors.items()
    }
    if tied:
        first = "model.embed_tokens.weight"
        records[first] = records[first].replace(aliases=("lm_head.weight",))
    names = dict.fromkeys(record.layer for record in records.values())
    layers = tuple(LayerRecord(name=name, block=name.startswith("model.layers.")) for name in names)
    return Model(records, layers)


def layers_of(choice: SourceChoice, source: str, model: Model | None = None) -> list[str]:
    """Layers of which every tensor comes from a source."""
    assert choice.errors == ()
    known = model or llama()
    return [name for name, fqns in known.members.items() if all(choice.source_of[fqn] == source for fqn in fqns)]
