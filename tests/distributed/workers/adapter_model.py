"""What the adapter checks train: a small model with everything awkward in it, and the ways to build it.

Odd sizes, dropout, tied embeddings, a persistent and a non-persistent buffer, a frozen block, a parameter
with fewer elements than there are ranks, and two param groups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH = 37, 13
CLIP, ACCUMULATION, BATCH = 0.05, 2, 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 2)
        self.down = nn.Linear(3 * width + 2, width, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Tiny(nn.Module):
    def __init__(self, width: int = WIDTH, frozen: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((width,), 1.5))
        self.register_buffer("cache", torch.zeros(7), persistent=False)
        self.blocks[1].requires_grad_(not frozen)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        x = (self.embed(tokens) * self.scale).to(self.embed.weight.dtype)  # DeepSpeed keeps buffers in fp32
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) * self.gain
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY).float(), tokens[:, 1:].reshape(-1))


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without and at another rate; frozen parameters are left in."""
    named = list(model.named_parameters())
    decayed = [p for _, p in named if p.ndim > 1 or getattr(p, "ds_shape", p.shape) == ()]
    rest = [p for _, p in named if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]


def batches(step: int, rank: int) -> list[torch.Tensor]:
    """The micro-batches of an optimizer step: a function of step and rank only."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randint(VOCABULARY, (BATCH, 9), generator=generator) for _ in range(ACCUMULATION)]


def config(stage: int, precision: str, **zero: Any) -> dict[str, Any]:
    """A DeepSpeed configuration: AdamW of torch, warm-up, clipping, accumulation."""
    data_types = zero.pop("data_types", None)
    accumulation = zero.pop("accumulation", ACCUMULATION)
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": [1e-4, 2e-4], "warmup_max_lr": [1e-2, 3e-3], "warmup_num_steps": 9},
        },
        "steps_per_print": 1 << 30,
    }
    if precision == "bf16":
        out["bf16"] = {"enabled": True}
    if data_types:
        out["data_types"] = data_types
    return out


def engine(seed: int, stage: int, precision: str, **zero: Any) -> Any:
    """A fresh engine; other seeds give other weights."""
    import deepspeed

    torch.manual_seed(seed)
    model = Tiny()
    built, *_ = deepspeed.initialize(
        model=model, model_parameters=param_groups(model), config=config(stage, precision, **zero)
    )
    return built
