"""Under torchrun, where nothing of driftpoint can be imported: stock FSDP2 loads what was merged.

Usage: layout_dcp_load.py DIRECTORY — per case: reads ``CASE-dcp``; writes ``CASE-loaded-WORLD.pt`` (the state dicts,
whole) and, on one rank, ``CASE-own``, DCP's own checkpoint of the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

import barred
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from adapter_model import batches
from layout_dcp_cases import CASES, sharded
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


def run(directory: Path, case: str) -> None:
    model, optimizer = sharded(1)
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=str(directory / f"{case}-dcp"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    loaded = get_state_dict(model, optimizer, options=whole)
    if dist.get_rank() == 0:
        torch.save(loaded, directory / f"{case}-loaded-{dist.get_world_size()}.pt")
    if dist.get_world_size() == 1:
        dcp.save(state, checkpoint_id=str(directory / f"{case}-own"))
    model(batches(9, dist.get_rank())[0]).backward()
    optimizer.step()
    assert all(torch.isfinite(parameter.to_local()).all() for parameter in model.parameters())


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    for case in CASES:
        run(directory, case)
    barred.require_barred()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
