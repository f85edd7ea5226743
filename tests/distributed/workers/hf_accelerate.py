"""Every case of its spec in a loop of Accelerate's: without interruption; until the process is killed; resumed.

Usage: hf_accelerate.py SPEC.json, under torchrun — ``cases``: name, zero (0: none).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState
from resume_jobs import Results, leave, start_group
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import monitor

EPOCHS, ACCUMULATION = 3, 2


class Seen:
    """Registered for checkpointing by the script."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.samples = state["samples"]


class Killed(Exception):
    pass


def train(case: Mapping[str, Any], seed: int, attach: Callable[[Any], Any], kill_at: int | None) -> list[Any]:
    """(step, loss, samples seen) of every micro-batch."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATION,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),
        deepspeed_plugin=_plugin(case["zero"]) if case["zero"] else None,
    )
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    generator = torch.Generator().manual_seed(3)
    loader: Any = DataLoader(TensorDataset(_inputs()), batch_size=2, shuffle=True, generator=generator)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    torch.manual_seed(100 * seed + accelerator.process_index)
    told = []
    ckpt = attach(accelerator)
    step = 0 if ckpt is None else ckpt.resume()
    first, skipped = divmod(step * ACCUMULATION, len(loader))
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, skipped) if epoch == first and skipped else loader
        for (x,) in batches:
            with accelerator.accumulate(model):
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seen.samples += len(x)
            told.append((step, float(loss.detach()).hex(), seen.samples, schedule.get_last_lr()))
            step += accelerator.sync_gradients
            if ckpt is not None:
                ckpt.flush()
                ckpt.step()
            if step == kill_at:
                ckpt.flush()
                raise Killed
    if ckpt is not None:
        ckpt.close()
    return told


def _inputs() -> torch.Tensor:
    return torch.randn(40, 6, generator=torch.Generator().manual_seed(1))


def _plugin(stage: int) -> DeepSpeedPlugin:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1 << 14, "allgather_bucket_size": 1 << 14},
    }
    return DeepSpeedPlugin(hf_ds_config=config)


def main(spec: Mapping[str, Any]) -> None:
    directory, results = Path(spec["directory"]), Results(spec["results"])
    start_group(zero=True)

    def attach(case: Mapping[str, Any]) -> Callable[[Any], Any]:
        settings = {"store": str(directory / case["name"]), "every": 3, "metrics": {"enabled": False}}
        return lambda accelerator: monitor.attach(accelerator, settings)

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        for case in spec["cases"]:
            results.tell("straight", case=case["name"], told=train(case, 1, lambda _: None, None))
        for case in spec["cases"]:
            try:
                train(case, 1, attach(case), kill_at=8)
            except Killed:
                results.tell("killed", case=case["name"])
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    for case in spec["cases"]:
        results.tell("resumed", case=case["name"], told=train(case, 2, attach(case), None))
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
