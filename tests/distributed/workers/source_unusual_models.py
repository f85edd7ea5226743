"""Under torchrun: small runs of stock DeepSpeed with what a plain model has not, saved at steps 2 and 4.

Usage: source_unusual_models.py DIRECTORY — per case a folder ``saved``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from merge_cases import leave
from torch import nn

CASES: dict[str, tuple[int, str, str]] = {
    "adam1": (1, "adam", ""),
    "adam3": (3, "adam", ""),
    "sgd1": (1, "sgd", ""),
    "sgd3": (3, "sgd", ""),
    "conjugated": (1, "adam", "conjugated"),
    "extra": (2, "adam", "extra"),
    "reused1": (1, "adam", "reused"),
    "reused3": (3, "adam", "reused"),
    "left-out1": (1, "adam", "frozen"),
    "left-out3": (3, "adam", "frozen"),
    "by-rank3": (3, "adam", "by-rank"),
}
"""ZeRO stage, optimizer and what is odd about the model."""


class Extra(nn.Module):
    """A module with a state of its own that is neither parameter nor buffer."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([3, 1, 4], dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert state.tolist() == [3, 1, 4]


class Odd(nn.Module):
    def __init__(self, odd: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        if odd == "conjugated":
            self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)).conj())
        if odd == "extra":
            self.extra = Extra()
        if odd == "reused":
            self.blocks[2] = self.blocks[0]
        if odd == "frozen":
            self.blocks[1].requires_grad_(False)
        if odd == "by-rank":
            self.register_buffer("mine", torch.tensor([float(dist.get_rank())]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.mse_loss(x, torch.ones_like(x))


def run(case: str, folder: Path) -> None:
    stage, kind, odd = CASES[case]
    torch.manual_seed(3)
    model = Odd(odd)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01) if kind == "adam" else torch.optim.SGD(trained, lr=0.1)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1 << 30,
    }
    if odd != "conjugated":
        settings["bf16"] = {"enabled": True}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(2, 8, generator=generator)
        engine.backward(engine(x if odd == "conjugated" else x.bfloat16()))
        engine.step()
        if step % 2:
            engine.save_checkpoint(str(folder / "saved"), exclude_frozen_parameters=odd == "frozen")


def main(directory: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    for case in CASES:
        run(case, directory / case)
        dist.barrier()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
