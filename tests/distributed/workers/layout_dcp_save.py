"""Under torchrun: trains each case, saves it into a store, and writes its whole state to ``CASE.pt``.

Usage: layout_dcp_save.py DIRECTORY — ``CASE.pt``: {fqn: {slot: tensor}}, buffers under slot ``buffer``;
``CASE-store``; and, with DeepSpeed, ``CASE-engine``, its own checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from layout_dcp_cases import DEEPSPEED, STEPS, plain, sharded, train_plain
from merge_cases import build, leave, train, whole_state
from merge_store import StoreWriter
from torch.distributed.tensor import DTensor

from monitor.adapters import adapter_for


def keep(directory: Path, case: str, state: dict[str, dict[str, torch.Tensor]], module: Any) -> None:
    for name, buffer in module.named_buffers():
        state[name] = {"buffer": buffer.detach().clone()}
    if dist.get_rank() == 0:
        torch.save(state, directory / f"{case}.pt")


def without_engine(directory: Path, case: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    train_plain(model, optimizer)
    StoreWriter(directory / f"{case}-store", adapter_for((model, optimizer))).save(STEPS)
    state = {}
    for name, parameter in model.named_parameters():
        kept = {"fp32": parameter.detach(), **optimizer.state.get(parameter, {})}
        state[name] = {slot: whole(value).clone() for slot, value in kept.items()}
    keep(directory, case, state, model)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(directory: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    without_engine(directory, "plain", *plain(0))
    without_engine(directory, "fsdp2", *sharded(0))
    for case in DEEPSPEED:
        engine = build(case, 0)
        train(engine, range(STEPS))
        StoreWriter(directory / f"{case}-store", adapter_for(engine)).save(STEPS)
        engine.save_checkpoint(str(directory / f"{case}-engine"), client_state={"mine": [1, 2]})
        keep(directory, case, whole_state(engine), engine.module)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
