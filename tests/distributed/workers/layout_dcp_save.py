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
from layout_dcp_cases import DEEPSPEED, STEPS, plain, train_plain
from merge_cases import build, leave, train, whole_state
from merge_store import StoreWriter

from monitor.adapters.plain import PlainAdapter
from monitor.adapters.select import adapter_for


def keep(directory: Path, case: str, state: dict[str, dict[str, torch.Tensor]], module: Any) -> None:
    for name, buffer in module.named_buffers():
        state[name] = {"buffer": buffer.detach().clone()}
    if dist.get_rank() == 0:
        torch.save(state, directory / f"{case}.pt")


def main(directory: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    model, optimizer = plain(0)
    train_plain(model, optimizer)
    StoreWriter(directory / "plain-store", PlainAdapter(model, optimizer)).save(STEPS)
    state = {}
    for name, parameter in model.named_parameters():
        kept = optimizer.state.get(parameter, {})
        state[name] = {"fp32": parameter.detach().clone(), **{k: v.clone() for k, v in kept.items()}}
    keep(directory, "plain", state, model)
    for case in DEEPSPEED:
        engine = build(case, 0)
        train(engine, range(STEPS))
        StoreWriter(directory / f"{case}-store", adapter_for(engine)).save(STEPS)
        engine.save_checkpoint(str(directory / f"{case}-engine"), client_state={"mine": [1, 2]})
        keep(directory, case, whole_state(engine), engine.module)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
