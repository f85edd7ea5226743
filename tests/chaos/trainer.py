"""What the random kills fall on: the awkward little model of the resume tests, deterministic to the bit, in plain
PyTorch or under a framework. Every step it writes down what it was told, in a file that outlives it.

Usage: trainer.py SPEC.json (under torchrun, or alone; with the workers of the distributed tests on the import path)
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from resume_jobs import Trainee, build, leave, rank, start_group
from torch.distributed.tensor import DTensor

import monitor
from monitor.adapters.module_tensors import as_bytes
from tests.chaos.diary import Diary
from tests.support.internals import memory_of


def digest(trainee: Trainee) -> str:
    """Of all that a resume must bring back, read by the framework's own means and not by an adapter of ours."""
    state = xxhash.xxh3_128()
    _feed(state, _engine(trainee.target) if hasattr(trainee.target, "module") else _torch(*trainee.target))
    _feed(state, [one.state_dict() for one in trainee.state])
    _feed(state, [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)])
    return state.hexdigest()


def _torch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [model.state_dict(), optimizer.state_dict()]


def _engine(engine: Any) -> list[Any]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = [engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps]
    found += [dict(engine.module.named_buffers()), engine.lr_scheduler.state_dict(), engine.get_lr()]
    zero, parameters = engine.optimizer, list(engine.module.parameters())
    if engine.zero_optimization_stage() < 3:
        flat = zero.single_partition_of_fp32_groups
        return [*found, parameters, flat, [zero.optimizer.state[one] for one in flat]]
    found += [safe_get_full_fp32_param(one) for one in parameters]  # its own flat tensors end in what was in memory
    return found + [
        safe_get_full_optimizer_state(one, slot) for one in parameters for slot in ("exp_avg", "exp_avg_sq")
    ]


def _feed(state: xxhash.xxh3_128, value: Any) -> None:
    """Hash a tree, its types and its numbers to the bit."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        state.update(f"{value.dtype} {tuple(value.shape)}".encode())
        state.update(as_bytes(value.detach().reshape(-1)))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            state.update(f"{key}:".encode())
            _feed(state, value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            _feed(state, one)
    else:
        state.update(repr(value).encode())


def reference(trainee: Trainee, diary: Diary, steps: int) -> None:
    """Train without a checkpointer, as if it were not installed."""
    for step in range(1, steps + 1):
        losses = trainee.step()
        diary.put("reference", step=step, losses=losses, digest=digest(trainee))


def train(trainee: Trainee, diary: Diary, spec: dict[str, Any]) -> None:
    """From where the job before was killed, to the end."""
    if spec["nodes"]:  # as on several machines: each rank sees its own memory only
        memory = spec["settings"]["memory"]
        memory["path"] += f"/node{rank()}"
        Path(memory["path"]).mkdir(exist_ok=True)
    ckpt = monitor.attach(trainee.target, spec["settings"], state=trainee.state)
    step = ckpt.resume()
    found = ckpt.certificate
    diary.put(
        "resumed",
        step=step,
        digest=digest(trainee) if step else None,  # before the first step there are no moments
        exact=found is None or found.exact,
        sources=sorted({unit.source for unit in found.units}) if found else [],
        problems=found.problems if found else [],
    )
    while step < spec["steps"]:
        losses = trainee.step()
        ckpt.step()
        step += 1
        time.sleep(spec["pause"])
        tier = memory_of(ckpt)
        replicated = None if tier is None else tier._replication.replicated
        diary.put(
            "step",
            step=step,
            losses=losses,
            newest=tier.newest.step if tier is not None and tier.newest is not None else 0,
            replicated=replicated.step if replicated is not None else 0,
            committed=int(ckpt.metrics.registry.get_sample_value("driftpoint_last_commit_step") or 0),
        )
    ckpt.save(wait=True)
    ckpt.close()
    diary.put("end", step=step, digest=digest(trainee))


def main(spec: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(True)
    if "WORLD_SIZE" in os.environ:
        start_group(spec["case"]["kind"] == "zero")
    logging.basicConfig(level=logging.INFO)
    trainee, diary = build(spec["case"], seed=1), Diary(spec["diary"])
    if spec["reference"]:
        reference(trainee, diary, spec["steps"])
    else:
        train(trainee, diary, spec)
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
