"""The engine that the benchmarks of saving and of merging share: a Llama in bf16 with random weights."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 16000


def llama_engine(stage: int, layers: int) -> Any:
    """A DeepSpeed engine at a ZeRO stage; 12 layers make 110 million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        max_position_embeddings=256,
    )
    engine, *_ = deepspeed.initialize(
        model=LlamaForCausalLM(config),
        config={
            "train_batch_size": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        },
    )
    return engine


def train_step(engine: Any, length: int) -> None:
    """One optimizer step on random tokens, one sequence of ``length`` a rank."""
    tokens = torch.randint(0, VOCABULARY, (1, length), device=engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
