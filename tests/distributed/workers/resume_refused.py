"""Resumes that are refused, on every ZeRO stage: what each rank is told, and what has changed by then.

Usage: resume_refused.py SPEC.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from adapter_model import BATCH, Tiny, batches, config, param_groups
from resume_jobs import ZERO, Results, leave, rank, start_group

import monitor
from monitor.adapters import adapter_for
from tests.support.fingerprint import differing, fingerprint, of_generators, of_optimizer

STEPS = 2
PRECISION = {1: "bf16", 2: "fp32", 3: "bf16"}


class Counter:
    """A user's object. ``broken``: it raises once it has loaded what was saved, on rank 1."""

    def __init__(self, start: int, broken: bool = False) -> None:
        self.count, self.tensor, self.broken = start, torch.full((3,), float(start)), broken

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "tensor": self.tensor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]
        self.tensor.copy_(state["tensor"])
        torch.randn(5)
        if self.broken and rank() == 1 and self.count == 0:
            raise KeyError("epoch")


class Schedule:
    """A scheduler of the user's, given to the engine. Loading sets the rates."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.last = optimizer, 0

    def step(self, *_: Any) -> None:
        self.last += 1

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last = state["last"]
        for group in self.optimizer.param_groups:
            group["lr"] = 9.0


class Refusing(Schedule):
    """Rank 1's does not load what was saved."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if rank() == 1 and state["last"] == STEPS:
            raise ValueError("the schedule has another length")


Groups = Callable[[torch.nn.Module], Any]


def joined(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """All in one group, though two with other rates were saved."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Job:
    """An engine of a stage, some steps old, with an object of the user's."""

    def __init__(
        self, store: Path, stage: int, seed: int, trained: int = 0, *,
        groups: Groups = param_groups, broken: bool = False, scheduler: Any = None, optimizer: str = "AdamW",
        more: bool = False,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        model = Tiny()
        settings = config(stage, PRECISION[stage], **ZERO)
        if groups is joined:
            settings["scheduler"]["params"] |= {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2}
        if optimizer == "SGD":
            settings["optimizer"] = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
            settings["zero_allow_untested_optimizer"] = True
        if scheduler is not None:
            del settings["scheduler"]
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=groups(model), config=settings, lr_scheduler=scheduler
        )
        self.counter = Counter(seed, broken)
        torch.manual_seed(10 * seed + rank())
        self.train(trained)
        values = {"store": str(store), "every": STEPS, "metrics": {"enabled": False}}
        self.ckpt = monitor.attach(
            self.engine, values, state=[self.counter, *([Counter(9)] if more and rank() == 1 else [])]
        )

    def train(self, steps: int) -> None:
        for step in range(steps):
            for tokens in batches(step, rank()):
                assert len(tokens) == BATCH
                self.engine.backward(self.engine(tokens))
                self.engine.step()

    def save(self) -> None:
        self.ckpt.resume()
        self.train(STEPS)
        self.ckpt.step()
        self.ckpt.close(save=False)

    def state(self) -> dict[str, Any]:
        """Everything that a resume may change, to the last bit."""
        engine, zero = self.engine, self.engine.optimizer
        scheduler = engine.lr_scheduler
        working = {
            name: [fingerprint(parameter.data), fingerprint(own_slice(parameter))]
            for name, parameter in engine.module.named_parameters()
        }
        return {
            "held": {str(piece.fragment): fingerprint(piece.tensor) for piece in adapter_for(engine).held()},
            "working": working,
            "optimizer": of_optimizer(zero.optimizer),
            "counters": [engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps],
            "scheduler": None if scheduler is None else fingerprint(scheduler.state_dict()),
            "scaler": fingerprint(vars(zero.loss_scaler)) if getattr(zero, "loss_scaler", None) else None,
            "counter": fingerprint(vars(self.counter)),
            "generators": of_generators(),
        }


def own_slice(parameter: Any) -> torch.Tensor | None:
    """What this rank holds of a parameter at stage 3, without padding."""
    if not hasattr(parameter, "ds_tensor"):
        return None
    part = parameter.ds_tensor.numel()
    return parameter.ds_tensor.reshape(-1)[: max(0, min(part, parameter.ds_numel - rank() * part))]


REFUSED: dict[str, dict[str, Any]] = {
    "groups": {"groups": joined},
    "object": {"broken": True},
    "objects": {"more": True},
    "optimizer": {"optimizer": "SGD"},
}


def refuse(results: Results, case: str, job: Job, **fields: Any) -> None:
    before, told = job.state(), None
    try:
        job.ckpt.resume()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is recorded
        told = error
    results.tell(
        "refused", case=case, error=type(told).__name__, text=str(told), changed=differing(before, job.state())[:5],
        slots=len(before["optimizer"]["state"]), **fields,
    )  # fmt: skip


def again(results: Results, stage: int, job: Job, saved: Mapping[str, Any]) -> None:
    """The object is mended: the same process resumes, and all is as it was saved."""
    job.counter.broken = False
    step, now = job.ckpt.resume(), job.state()
    kept = {name: now[name] for name in ("held", "working", "counters", "scheduler", "generators")}
    results.tell("again", stage=stage, step=step, count=job.counter.count, differing=differing(kept, dict(saved))[:5])


def of_stage(stage: int, results: Results, directory: Path) -> None:
    store = directory / f"zero{stage}"
    first = Job(store, stage, seed=0)
    first.save()
    saved = {name: first.state()[name] for name in ("held", "working", "counters", "scheduler", "generators")}
    for name, how in REFUSED.items():
        for trained in (0, 3):
            job = Job(store, stage, 1 + trained, trained, **how)
            refuse(results, name, job, stage=stage, trained=trained)
            if name == "object":
                again(results, stage, job, saved)
            job.ckpt.close(save=False)
            dist.barrier()
    store = directory / f"zero{stage}-scheduler"
    Job(store, stage, 0, scheduler=Schedule).save()
    for trained in (0, 3):
        job = Job(store, stage, 1 + trained, trained, scheduler=Refusing)
        refuse(results, "scheduler", job, stage=stage, trained=trained)
        job.ckpt.close(save=False)
        dist.barrier()


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=True)
    results = Results(spec["results"])
    for stage in (1, 2, 3):
        of_stage(stage, results, Path(spec["directory"]))
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
