"""Under torchrun: a job under FSDP2 saves what stock programs save of it, or resumes from what was imported of that.

Usage: source_torch.py SPEC.json. ``role`` ``save``: writes ``nested``, ``flattened`` and ``sharded`` (Accelerate's own
code), all of one state, and ``columns``, the same cut along its last dimension; the whole state to ``state.pt``.
``resume``: from each of ``stores``. ``torchtitan-save`` and ``torchtitan-load``: the same by torchtitan's own
checkpoint manager, into or from ``folder``. ``torchtitan-train``: torchtitan's loop with Driftpoint's manager.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from adapter_model import batches
from layout_dcp_cases import STEPS, sharded
from resume_jobs import Results, leave, rank, start_group
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import IterableDataset

import monitor

LAST = 6


def train(model: Any, optimizer: Any, steps: range) -> list[str]:
    """The losses, to the last bit; random states are a function of the step."""
    losses = []
    for step in steps:
        torch.manual_seed(10 * step + rank())
        for tokens in batches(step, rank()):
            loss = model(tokens)
            loss.backward()
            losses.append(loss.item().hex())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(model: Any, optimizers: list[torch.optim.Optimizer]) -> dict[str, dict[str, Any]]:
    """Every tensor of the job, gathered: {fqn: {slot: tensor}}, buffers under slot ``buffer``."""
    out = {name: {"buffer": buffer.detach().clone()} for name, buffer in model.named_buffers() if name != "cache"}
    for name, parameter in model.named_parameters():
        kept = {"fp32": parameter.detach()}
        for optimizer in optimizers:
            kept |= optimizer.state.get(parameter, {})
        out[name] = {
            slot: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for slot, value in kept.items()
        }
    return out


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The (fqn, slot) in which two states differ in a bit."""
    found = [] if one.keys() == other.keys() else ["names"]
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        found += [] if a.keys() == b.keys() else [f"{name}: {sorted(a)} {sorted(b)}"]
        found += [f"{name}/{slot}" for slot in a.keys() & b.keys() if not torch.equal(a[slot], b[slot])]
    return found


def hyper(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    return [[group["lr"], group["weight_decay"]] for one in optimizers for group in one.param_groups]


def keep(spec: Mapping[str, Any], results: Results, model: Any, optimizers: list[Any], step_with: Any) -> None:
    state = whole(model, optimizers)
    if rank() == 0:
        torch.save(state, Path(spec["directory"]) / "state.pt")
    results.tell("saved", hyper=hyper(optimizers), losses=train(model, step_with, range(STEPS, LAST)))


def save(spec: Mapping[str, Any], results: Results) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    directory = Path(spec["directory"])
    model, optimizer = sharded(0)
    train(model, optimizer, range(STEPS))
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=directory / "nested")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    found, optim = get_state_dict(model, optimizer, options=flat)
    dcp.save({**found, "optimizer": optim, "train_state": {"step": STEPS}}, checkpoint_id=directory / "flattened")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True)
    save_fsdp_model(plugin, accelerator, model, str(directory / "sharded"))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(directory / "sharded"))

    def by_columns(value: Any) -> Any:
        if not isinstance(value, DTensor) or value.ndim < 2:
            return value.full_tensor() if isinstance(value, DTensor) else value
        return distribute_tensor(value.full_tensor(), value.device_mesh, [Shard(1)])

    columns = {"model": {name: by_columns(value) for name, value in state["model"].items()}}
    kept = {name: {key: by_columns(one) for key, one in own.items()} for name, own in state["optim"]["state"].items()}
    columns["optim"] = {"state": kept, "param_groups": state["optim"]["param_groups"]}
    dcp.save(columns, checkpoint_id=directory / "columns")
    keep(spec, results, model, [optimizer], optimizer)


def resume(spec: Mapping[str, Any], results: Results) -> None:
    expected = torch.load(spec["state"], weights_only=True)
    for name, store in spec["stores"].items():
        model, optimizer = sharded(1)
        config = {"store": store, "metrics": {"enabled": False}}
        objects = dict.fromkeys(spec.get("drop", ()))
        with monitor.attach((model, optimizer), config, state=objects) as ckpt:
            step = ckpt.resume()
            told = {
                "step": step,
                "differences": differences(expected, whole(model, [optimizer])),
                "hyper": hyper([optimizer]),
                "as_found": ckpt.certificate is not None and ckpt.certificate.as_found,
            }
            results.tell("resumed", name=name, **told, losses=train(model, optimizer, range(STEPS, LAST)))


def titan(spec: Mapping[str, Any], config: Any = None, loader: Any = None) -> tuple[Any, Any, Any, Any]:
    """(model, optimizers, checkpoint manager, train state) as torchtitan's trainer builds them."""
    from torch.distributed.checkpoint.stateful import Stateful
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    class TrainState(Stateful):
        step, ntokens_seen = 0, 0

        def state_dict(self) -> dict[str, Any]:
            return {"step": self.step, "ntokens_seen": self.ntokens_seen}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]

    model, _ = sharded(spec["seed"])
    groups = [(r"(embed|up|down)\.weight$", 0.1, 1e-2), (".*", 0.0, 3e-3)]
    optimizing = OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={"lr": rate, "weight_decay": decay}
            )
            for pattern, decay, rate in groups
        ],
        implementation="for-loop",
    )
    optimizers = OptimizersContainer(optimizing, model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=0).build(optimizers=optimizers, training_steps=1000)
    state = TrainState()
    own = CheckpointManager.Config(
        enable=True, folder=spec["folder"], interval=1, keep_latest_k=0, exclude_from_loading=["dataloader"]
    )
    manager = (config or own).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=None,
    )
    return model, Both(optimizers, schedulers), manager, state


@dataclass(frozen=True)
class Both:
    """torchtitan's optimizers and schedules, stepped as its trainer does."""

    optimizers: Any
    schedulers: Any

    def step(self) -> None:
        self.optimizers.step()
        self.schedulers.step()

    def zero_grad(self) -> None:
        self.optimizers.zero_grad()


def titan_save(spec: Mapping[str, Any], results: Results) -> None:
    model, both, manager, state = titan(spec)
    train(model, both, range(STEPS))
    state.step = STEPS
    manager.save(STEPS)
    keep(spec, results, model, list(both.optimizers), both)


def titan_load(spec: Mapping[str, Any], results: Results) -> None:
    model, both, manager, state = titan(spec)
    assert manager.load()
    expected = torch.load(spec["state"], weights_only=True)
    found = differences(expected, whole(model, list(both.optimizers)))
    last_epoch = both.schedulers.state_dict()["last_epoch"]
    losses = train(model, both, range(STEPS, LAST))
    results.tell("loaded", step=state.step, differences=found, last_epoch=last_epoch, losses=losses)


class Numbers(IterableDataset[int]):
    """Steps, one after the other, with a place of its own."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def titan_train(spec: Mapping[str, Any], results: Results) -> None:
    """The loop of torchtitan's trainer. ``dies``: the step in which rank 1 is killed."""
    from torchtitan.components.dataloader import ParallelAwareDataloader

    loader = ParallelAwareDataloader(Numbers(), rank(), dist.get_world_size(), batch_size=1)
    config = monitor.TorchtitanCheckpointManager.Config(enable=spec["enable"], folder=spec["folder"], interval=2)
    model, both, manager, state = titan(spec, config, loader)
    resumed = manager.load(step=-1)
    results.tell("began", step=state.step, resumed=resumed)
    numbers = iter(loader)
    while state.step < spec["steps"]:
        state.step += 1
        for tokens in batches(int(next(numbers)), rank()):
            loss = model(tokens) * (1 + 0.1 * torch.rand(()))
            loss.backward()
            results.tell("loss", step=state.step, loss=loss.item().hex())
        if state.step in (spec.get("dies", 0) - 2, spec.get("dies")):  # a save is put off while the last one is written
            manager.checkpointer.flush()
            dist.barrier()  # rank 0 has committed
        if state.step == spec.get("dies") and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        manager.maybe_wait_for_staging()
        both.step()
        both.zero_grad()
        manager.save(state.step, last_step=state.step == spec["steps"])
    manager.close()
    results.tell("done", step=state.step, rate=both.schedulers.state_dict()["last_epoch"])


def main(spec: Mapping[str, Any]) -> None:
    sys.path.extend(spec.get("path", ()))
    start_group(zero=False)
    titan_roles = {"torchtitan-save": titan_save, "torchtitan-load": titan_load, "torchtitan-train": titan_train}
    role = {"save": save, "resume": resume, **titan_roles}[spec["role"]]
    role(spec, Results(spec["results"]))
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
