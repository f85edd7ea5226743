"""What FSDP2's adapter refuses, each built for real on 4 ranks: by name, on every rank, and with what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from adapter_state import report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from monitor.adapters import adapter_for
from monitor.distributed import current_group
from store.errors import UnsupportedError

Target = tuple[nn.Module, torch.optim.Optimizer]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


def with_adamw(module: nn.Module) -> Target:
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


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


def renumbered_stages() -> Target:
    """Each stage counts its layers from 0: one name, two tensors."""
    torch.manual_seed(dist.get_rank() // 2)
    return with_adamw(net()[: 1 + dist.get_rank() // 2])


def stages_of_other_shapes() -> Target:
    return with_adamw(nn.Sequential(nn.Linear(8, 16 - dist.get_rank() // 2)))


def two_groups_of_replicas() -> Target:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = nn.parallel.DistributedDataParallel(net(), process_group=groups[dist.get_rank() // 2])
    return model, torch.optim.AdamW(model.parameters())


REFUSED: dict[str, tuple[Callable[[], Target], str]] = {
    "partial": (partial, r"0\.weight \(fp32\) is placed as Partial"),
    "cut otherwise": (cut_otherwise, r"0\.weight \(fp32\) has \d+ elements on this rank.*makes \d+"),
    "on meta": (on_meta, r"0\.weight \(fp32\) is on the meta device.*to_empty"),
    "optimizer first": (optimizer_first, "create the optimizer after fully_shard"),
    "one added": (one_added, r"param group 0 of AdamW holds a parameter of shape \(3,\) that is not in the model"),
    "fsdp1": (fsdp1, r"FSDP1\) is not supported: use fully_shard"),
    "local state": (local_state, r"AdamW keeps 'mine' of 0\.weight, .* as a plain tensor beside a sharded parameter"),
    "cut state": (cut_state, r"AdamW keeps 'rows' of 0\.weight, of shape \(16,\), sharded over the ranks"),
    "renumbered stages": (renumbered_stages, r"0\.weight has different values on the ranks .* as in the whole model"),
    "stages of other shapes": (
        stages_of_other_shapes,
        r"0\.weight is .*\(16, 8\).* on rank 0, and on rank 2 .*\(15, 8\)",
    ),
    "two groups of replicas": (
        two_groups_of_replicas,
        r"0\.weight is .* and on rank 2 .*, held as replicas of \[2, 3\]",
    ),
}


def refused() -> None:
    for name, (build, message) in REFUSED.items():
        report(name, "refused", _problem(build, message))


def _problem(build: Callable[[], Target], message: str) -> str:
    target = build()
    try:
        adapter: Any = adapter_for(target)
        adapter.agree(current_group())
        adapter.owned()
    except UnsupportedError as error:
        return "" if re.search(message, str(error), re.DOTALL) else f"refused with {error}"
    return "not refused"
