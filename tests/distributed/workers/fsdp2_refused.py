"""What FSDP2's adapter refuses, each built for real on 4 ranks: by name, on every rank, and with what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from adapter_state import report
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from monitor.adapters import adapter_for
from store.errors import UnsupportedError

Target = tuple[nn.Module, torch.optim.Optimizer]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


def with_adamw(module: nn.Module) -> Target:
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def columns() -> Target:
    placement: Any = lambda parameter: Shard(1) if parameter.ndim > 1 else Shard(0)  # noqa: E731
    return with_adamw(fully_shard(net(), shard_placement_fn=placement))


def tensor_parallel() -> Target:
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return with_adamw(parallelize_module(net(), init_device_mesh("cpu", (4,)), plan))


def both() -> Target:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    module = parallelize_module(net(), mesh["tensor"], {"0": ColwiseParallel()})
    return with_adamw(fully_shard(module, mesh=mesh["data"]))


def a_part_of_the_ranks() -> Target:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    return with_adamw(fully_shard(net(), mesh=mesh["data"]))


def ranks_in_another_order() -> Target:
    """fully_shard cuts by the order of ranks in the process group, which is ascending, and not by the mesh's."""
    return with_adamw(fully_shard(net(), mesh=DeviceMesh("cpu", [2, 0, 3, 1])))


def partial() -> Target:
    module = net()
    weight = DTensor.from_local(torch.zeros(16, 8), init_device_mesh("cpu", (4,)), [Partial()])
    module[0].weight = nn.Parameter(weight)
    return with_adamw(module)


def cut_otherwise() -> Target:
    module, rank = net(), dist.get_rank()
    rows = torch.zeros(13 if rank == 0 else 1, 8)
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.zeros(16, 8)
    weight = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    module[0].weight = nn.Parameter(weight)
    return with_adamw(module)


def on_meta() -> Target:
    with torch.device("meta"):
        module = net()
    return with_adamw(fully_shard(module, mesh=init_device_mesh("cpu", (4,))))


def optimizer_first() -> Target:
    module, optimizer = with_adamw(net())
    return fully_shard(module), optimizer


def one_added() -> Target:
    module = fully_shard(net())
    return module, torch.optim.AdamW([*module.parameters(), nn.Parameter(torch.zeros(3))], lr=1e-2)


def fsdp1() -> Target:
    return with_adamw(FullyShardedDataParallel(net(), device_id=torch.device("cpu")))


def local_state() -> Target:
    module, optimizer = with_adamw(fully_shard(net()))
    for parameter in module.parameters():
        optimizer.state[parameter]["mine"] = torch.zeros(parameter.to_local().shape)
    return module, optimizer


def cut_state() -> Target:
    module, optimizer = with_adamw(fully_shard(net()))
    parameter = module[0].weight
    optimizer.state[parameter]["rows"] = distribute_tensor(torch.zeros(16), parameter.device_mesh, [Shard(0)])
    optimizer.state[parameter]["columns"] = distribute_tensor(torch.zeros(8), parameter.device_mesh, [Replicate()])
    return module, optimizer


REFUSED: dict[str, tuple[Callable[[], Target], str]] = {
    "columns": (columns, r"0\.weight \(fp32\) is placed as Shard\(dim=1\).*leave shard_placement_fn out"),
    "tensor parallel": (tensor_parallel, r"1\.weight \(fp32\) is placed as Shard\(dim=1\).*no tensor parallelism"),
    "both": (both, r"0\.weight \(fp32\) is placed as _StridedShard.*over a tensor-parallel model"),
    "a part of the ranks": (a_part_of_the_ranks, r"0\.weight \(fp32\) is on 2 of 4 ranks"),
    "ranks in another order": (
        ranks_in_another_order,
        r"0\.weight \(fp32\) is on a mesh whose ranks do not ascend, \[2, 0, 3, 1\]",
    ),
    "partial": (partial, r"0\.weight \(fp32\) is placed as Partial"),
    "cut otherwise": (cut_otherwise, r"0\.weight \(fp32\) has \d+ elements on this rank.*makes \d+"),
    "on meta": (on_meta, r"0\.weight \(fp32\) is on the meta device.*to_empty"),
    "optimizer first": (optimizer_first, "create the optimizer after fully_shard"),
    "one added": (one_added, r"param group 0 of AdamW holds a parameter of shape \(3,\) that is not in the model"),
    "fsdp1": (fsdp1, r"FSDP1\) is not supported: use fully_shard"),
    "local state": (local_state, r"AdamW keeps 'mine' of 0\.weight, .* as a plain tensor beside a sharded parameter"),
    "cut state": (cut_state, r"AdamW keeps 'rows' of 0\.weight, of shape \(16,\), sharded over the ranks"),
}


def refused() -> None:
    for name, (build, message) in REFUSED.items():
        report(name, "refused", _problem(build, message))


def _problem(build: Callable[[], Target], message: str) -> str:
    target = build()
    try:
        adapter_for(target).owned()
    except UnsupportedError as error:
        return "" if re.search(message, str(error), re.DOTALL) else f"refused with {error}"
    return "not refused"
