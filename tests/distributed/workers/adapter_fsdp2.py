"""Under torchrun, 4 ranks: FSDP2 in all its ways through its adapter. Prints one RESULT line a check.

Usage: adapter_fsdp2.py [CASE ...], by default all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from adapter_model import ACCUMULATION, CLIP, Tiny, batches, param_groups
from adapter_state import all_owned, coverage, held_is_live, leave, report, round_trip, take, unequal
from fsdp2_jobs import mesh_of, shard
from fsdp2_refused import refused
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from monitor.adapters import adapter_for
from monitor.adapters.base import Adapter

WIDE = 151
"""Wide enough that the replicas of hybrid sharding share out matrices in slices."""
CASES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "hybrid": {"hybrid": 2, "width": WIDE},
    "bf16": {"bf16": True},
    "offload": {"offload": True, "optimizer": "sgd"},
    "gathered": {"reshard": False, "looked": True},
    "half-gathered": {"reshard": 2, "looked": True},
    "checkpointed": {"checkpointed": True, "bf16": True},
    "compiled": {"compiled": True},
    "mixed": {"ignored": ["gain"]},
    "factored": {"optimizer": "factored"},
}
SLOTS: dict[str, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class Factored(torch.optim.Optimizer):
    """Keeps one number a column, on every rank: state of a shape of its own, as factored optimizers have it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])

    def _update(self, parameter: torch.Tensor, lr: float) -> None:
        grad, state = parameter.grad, self.state[parameter]
        assert isinstance(grad, DTensor)
        columns = grad.square().sum(0).redistribute(placements=[Replicate()] * grad.device_mesh.ndim)
        if not state:
            state |= {"step": torch.tensor(0.0), "columns": torch.zeros_like(columns)}
        state["step"] += 1
        state["columns"].lerp_(columns, 0.1)
        parameter.sub_(grad / (state["columns"].sqrt() + 1e-3), alpha=lr)


def optimizer_of(model: nn.Module, case: Mapping[str, Any]) -> torch.optim.Optimizer:
    groups = param_groups(model)
    kind = case.get("optimizer", "adamw")
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    if kind == "factored":
        return Factored(groups, {"lr": 1e-2})
    return torch.optim.AdamW(groups, lr=1e-2, foreach=True)


def build(case: Mapping[str, Any], seed: int) -> tuple[Adapter, Callable[[range], list[float]]]:
    torch.manual_seed(seed)
    model: Any = shard(Tiny(case["width"]) if "width" in case else Tiny(), case)
    optimizer = optimizer_of(model, case)

    def train(steps: range) -> list[float]:
        losses = []
        for step in steps:
            for number, tokens in enumerate(batches(step, dist.get_rank())):
                model.set_requires_gradient_sync(number == ACCUMULATION - 1)
                loss = model(tokens)
                (loss / ACCUMULATION).backward()
                losses.append(loss.item())
            for name in case.get("ignored", ()):
                dist.all_reduce(getattr(model, name).grad)
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if isinstance(p, DTensor)], CLIP)
            optimizer.step()
            optimizer.zero_grad()
        if case.get("looked"):  # leaves what was gathered registered in place of the shards
            with torch.no_grad():
                model(batches(99, 0)[0])
        return losses

    if case.get("looked"):
        train(range(0))
    return adapter_for((model, optimizer)), train


def shares_and_facts(name: str) -> None:
    """Every rank writes about as much. What rank 0 alone stores, any rank could."""
    adapter, train = build(CASES[name], 0)
    train(range(1))
    mine = sum(piece.tensor.numel() for piece in adapter.owned())
    facts = adapter.layout_facts()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (mine, facts, adapter.run_state(), dict(adapter.tensors())))
    numels = [one[0] for one in every]
    report(name, "shares", f"ranks write {numels} elements" if max(numels) > 1.1 * min(numels) else "")
    unlike = [found for one in every for found in unequal(list(one[1:]), list(every[0][1:]), "what is told")]
    report(name, "facts", *unlike, *unequal(json.loads(json.dumps(facts)), facts, "facts"))


def dtensors() -> None:
    """A model of DTensors that no fully_shard made, with a plain one among them."""
    mesh = mesh_of({})
    model = nn.ModuleDict({"cut": nn.Linear(5, 7), "whole": nn.Linear(5, 7), "plain": nn.Linear(5, 7)})
    for name, placement in (("cut", Shard(0)), ("whole", Replicate())):
        for key, parameter in list(model[name].named_parameters()):
            setattr(model[name], key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement])))
    adapter = adapter_for((model, torch.optim.SGD(model.parameters(), lr=1e-2)))
    whole = take(adapter).tensors
    wrong = [
        fqn
        for fqn, parameter in model.named_parameters()
        if not torch.equal(whole[fqn, "fp32"], full(parameter.detach()).view(-1))
    ]
    report("dtensors", "cover", *coverage(adapter, all_owned(adapter), ()), *held_is_live(adapter), *wrong)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def accelerated() -> None:
    """What Accelerate prepares with ``fsdp_version: 2``. On the CPU it has to be told to: there it never shards."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
        activation_checkpointing=True,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    model = Tiny()
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()] if name != "cache"]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(param_groups(model), lr=1e-2))
    for step in range(2):
        accelerator.backward(model(batches(step, dist.get_rank())[0]))
        optimizer.step()
        optimizer.zero_grad()
    adapter = adapter_for((model, optimizer))
    framework = unequal([adapter.framework, list(adapter.tensors())], ["fsdp2", names], "framework, names")
    report("accelerate", "cover", *coverage(adapter, all_owned(adapter), SLOTS["adamw"]), *framework)


def main() -> None:
    dist.init_process_group("gloo")
    for name in [one for one in sys.argv[1:] or CASES if one in CASES]:
        case = CASES[name]
        slots = SLOTS.get(case.get("optimizer", "adamw"))
        round_trip(name, lambda seed, case=case: build(case, seed), slots)  # type: ignore[misc]
    if not sys.argv[1:] or sys.argv[1:] == ["refused"]:
        refused()
        shares_and_facts("hybrid")
        dtensors()
        accelerated()
    leave()


if __name__ == "__main__":
    main()
