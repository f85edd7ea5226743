"""A small job of plain PyTorch: tied embeddings, a buffer, a frozen parameter, two param groups, a schedule."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

STEPS, LAST = 3, 5


class Tied(nn.Module):
    """Tied embeddings, a buffer, a frozen parameter outside the optimizer, two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.shift = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embed(tokens) + self.shift
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Job:
    def __init__(self, seed: int, *, named: bool = True, kind: Any = torch.optim.AdamW, **hyper: Any) -> None:
        torch.manual_seed(seed)
        self.model = Tied()
        trained = [(name, one) for name, one in self.model.named_parameters() if one.requires_grad]
        groups = [trained[:1], trained[1:]]
        given = groups if named else [[one for _, one in group] for group in groups]
        settings = {"lr": 1e-2, **hyper}
        self.optimizer = kind([{"params": one, "weight_decay": i / 10} for i, one in enumerate(given)], **settings)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.names = [[name for name, _ in group] for group in groups]

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            loss = self.model(torch.randint(11, (4, 5), generator=generator))
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
