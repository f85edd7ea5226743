"""The training jobs that the resume tests kill and bring back: the same awkward little model under DeepSpeed, FSDP2,
DistributedDataParallel and plain PyTorch, fed by a shuffling loader that leans on every random generator.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from adapter_model import ACCUMULATION, BATCH, CLIP, VOCABULARY, WIDTH, Tiny, config, param_groups
from torch.nn.parallel import DistributedDataParallel

from examples.topk_gradients import TopK, reduce_topk

SAMPLES = 23
"""Samples of the data set: an epoch ends in the middle of a step."""

ZERO = {"reduce_bucket_size": 1 << 14, "allgather_bucket_size": 1 << 14, "memory_efficient_linear": False}
"""By default DeepSpeed maps and unmaps a gigabyte in every step; and its first ZeRO-3 engine replaces
``F.linear``, with other roundings, for every model in the process."""


class Shuffled:
    """A loader: every epoch in another order; where it stands is its state."""

    def __init__(self, seed: int) -> None:
        self._data = torch.randint(VOCABULARY, (SAMPLES, 9), generator=torch.Generator().manual_seed(5))
        self._generator = torch.Generator().manual_seed(seed)
        self._order = torch.randperm(SAMPLES, generator=self._generator)
        self._position = 0

    def batch(self) -> torch.Tensor:
        """The next samples, augmented by the global generators of python and numpy."""
        picked = []
        for _ in range(BATCH):
            if self._position == SAMPLES:
                self._order = torch.randperm(SAMPLES, generator=self._generator)
                self._position = 0
            picked.append(int(self._order[self._position]))
            self._position += 1
        turned = torch.roll(self._data[picked], random.randrange(9), dims=1)
        return (turned + int(np.random.randint(3))) % VOCABULARY

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "position": self._position, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order, self._position = state["order"], state["position"]
        self._generator.set_state(state["generator"])


@dataclass(frozen=True)
class Trainee:
    """What is attached to, what is given as state, and one optimizer step: the losses of its micro-batches."""

    target: Any
    state: list[Any]
    step: Callable[[], list[float]]


def start_group(zero: bool) -> None:
    """The process group, on gloo; through DeepSpeed where it is to train."""
    if not zero:
        dist.init_process_group("gloo")
        return
    import deepspeed

    # Its own shared-memory collectives spin while they wait: with more processes than cores they take seconds.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")


def leave() -> None:
    """End when all ranks are done, without the teardown of gloo's threads, which now and then aborts."""
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def build(case: Mapping[str, Any], seed: int) -> Trainee:
    """A fresh job; other seeds give other weights, data orders and random states."""
    torch.manual_seed(seed)
    random.seed(100 * seed + rank())
    np.random.seed(100 * seed + rank())
    trainee = _engine(case, seed) if case["kind"] == "zero" else _torch(case, seed)
    torch.manual_seed(100 * seed + rank())
    return trainee


def _engine(case: Mapping[str, Any], seed: int) -> Trainee:
    import deepspeed

    model = Tiny(case.get("width", WIDTH), case.get("frozen", True))
    settings = config(case["stage"], case["precision"], **ZERO, **case.get("zero", {}))
    for section in ("optimizer", "scheduler"):
        settings[section]["params"] |= case.get(section, {})
    if "scale" in case:  # of the loss, a power of 2; so high that gradients overflow at first
        settings |= {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": case["scale"]}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=param_groups(model), config=settings)
    loader = Shuffled(10 * seed + rank())

    def move_betas() -> None:
        """As a schedule of momentum, for three steps."""
        for group in engine.optimizer.optimizer.param_groups:
            group["betas"] = (0.83 + 0.013 * min(engine.global_steps, 3), 0.95)

    def step() -> list[float]:
        losses = []
        if case.get("momentum") == "before":
            move_betas()
        for _ in range(ACCUMULATION):
            loss = engine(loader.batch())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if case.get("momentum") == "after":
            move_betas()
        return losses

    return Trainee(engine, [loader], step)


def _torch(case: Mapping[str, Any], seed: int) -> Trainee:
    model: Any = Tiny(frozen=case.get("frozen", True))
    if case["kind"] == "ddp":
        model = DistributedDataParallel(model)
    elif case["kind"] == "fsdp2":
        from fsdp2_jobs import shard

        model = shard(model, case)
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2)
    total = case.get("total_steps", 40)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 3e-3], total_steps=total)
    loader, state = Shuffled(10 * seed + rank()), list[Any]()
    if "topk" in case:
        state.append(TopK(model, case["topk"]))
        model.register_comm_hook(state[0], reduce_topk)

    def step() -> list[float]:
        losses = []
        for number in range(ACCUMULATION):
            last = number == ACCUMULATION - 1 or "topk" not in case
            with nullcontext() if last else model.no_sync():
                loss = model(loader.batch())
                (loss / ACCUMULATION).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return losses

    return Trainee((model, optimizer), [*state, scheduler, loader], step)


class Results:
    """A file of JSON lines that all ranks append to, each line in one write."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(Path(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def tell(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "rank": rank(), **fields})
        os.write(self._descriptor, f"{line}\n".encode())
