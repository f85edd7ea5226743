"""The engine that the benchmarks of saving and of merging share: a Llama with random weights, in bf16 by default."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 16000


def llama_engine(stage: int, layers: int, hidden: int = 768, precision: str = "bf16") -> Any:
    """A DeepSpeed engine at a ZeRO stage; 12 layers make 110 million parameters. hidden: a multiple of 192."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=256,
    )
    engine, *_ = deepspeed.initialize(
        model=LlamaForCausalLM(config),
        config={
            "train_batch_size": 2,
            "bf16": {"enabled": precision == "bf16"},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        },
    )
    return engine


def train_step(engine: Any, length: int, rows: int = 1) -> None:
    """One optimizer step on random tokens, ``rows`` sequences of ``length`` a rank."""
    forward_backward(engine, length, rows)
    engine.step()


def forward_backward(engine: Any, length: int, rows: int) -> None:
    """All of a step but the optimizer's part."""
    tokens = torch.randint(0, VOCABULARY, (rows, length), device=engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
