"""Writes the golden store of boxes: two pipeline stages, each under tensor parallelism, after one step of AdamW.

python -m torch.distributed.run --standalone --nproc_per_node=4 tests/golden/make_format_1_boxes.py NEW_DIRECTORY
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import monitor

SHAPES = {"first": (6, 4), "second": (4, 6)}


def main(root: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tensor"))
    number = mesh.get_local_rank("stage")
    name, plan = (("first", RowwiseParallel()), ("second", ColwiseParallel()))[number]
    model = nn.ModuleDict({name: nn.Linear(*SHAPES[name][::-1])})
    for parameter in model.parameters():
        parameter.data = torch.arange(1.0, parameter.numel() + 1).view(parameter.shape) / (3 + number)
    parallelize_module(model, mesh["tensor"], {name: plan})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    with monitor.attach((model, optimizer), {"store": str(root), "every": 1, "metrics": {"enabled": False}}) as ckpt:
        for parameter in model.parameters():
            parameter.grad = parameter.detach() / 7
        optimizer.step()
        ckpt.step()
    expected: dict[str, Any] = {}
    for fqn, parameter in model.named_parameters():
        for slot, value in {"fp32": parameter, **optimizer.state[parameter]}.items():
            if slot != "step":
                expected[f"{fqn}/{slot}"] = value.full_tensor().reshape(-1).tolist()
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, expected)
    if dist.get_rank() == 0:
        text = json.dumps(every[0] | every[2], indent=1) + "\n"
        root.with_name(f"{root.name}.expected.json").write_text(text)
        root.with_name(f"{root.name}.trace.jsonl").unlink()
    dist.barrier()


if __name__ == "__main__":
    socket.gethostname = lambda: "golden"
    main(Path(sys.argv[1]))
