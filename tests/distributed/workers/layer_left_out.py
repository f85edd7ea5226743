"""Two ranks train a DeepSpeed model of which some steps leave out a layer; or resume step SAVED of that, and train on.

Usage: layer_left_out.py SPEC.json, with ``resume`` in the spec.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from resume_jobs import ZERO, Results, leave, rank, start_group
from torch import nn

import monitor
from store.catalog import open_catalog
from store.storage.local import LocalFiles

SAVED, LAST = 4, 7
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}

# ZeRO stage with its settings, and the steps that leave out the branch
CASES: dict[str, tuple[int, dict[str, Any], set[int]]] = {
    "zero3": (3, {}, {2, 4, 6}),
    "zero3-offload": (3, OFFLOADED, {2, 4, 6}),
    "zero2-offload": (2, OFFLOADED, {2, 4, 6}),
    "zero2": (2, {}, {2, 4, 6}),
    "zero3-used": (3, {}, set()),
    "zero3-left-out-after": (3, {}, {4, 6}),
    "zero3-journal": (3, {}, {2, 4, 6}),
}


class Branched(nn.Module):
    """``spare`` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.spare, self.last = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + self.branch(x) if branch else x).square().mean()  # type: ignore[no-any-return]


def run(name: str, folder: Path, results: Results, *, resume: bool) -> None:
    import deepspeed

    stage, zero, left_out = CASES[name]
    torch.manual_seed(7 if resume else 1)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **ZERO, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": 1 << 30,
    }
    model = Branched()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    journal = name.endswith("journal")  # one save at step 2, and records
    config = {"store": str(folder / name), "every": 2 if journal else 1, "metrics": {"enabled": False}}
    config["journal"] = {"enabled": journal}
    ckpt = monitor.attach(engine, config)
    start, losses = ckpt.resume(), []
    exact = ckpt.certificate is None or ckpt.certificate.exact
    for step in range(start, LAST):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank()))
        loss = engine(x, step not in left_out)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
        if resume or step < SAVED - journal:
            ckpt.step()
            ckpt.flush()
    problems = [] if ckpt.certificate is None else list(ckpt.certificate.problems)
    end = losses[SAVED - start :]
    results.tell("ran", scenario=name, start=start, exact=exact, problems=problems, losses=end)
    if resume:
        catalog = open_catalog(LocalFiles(folder / name))
        results.tell("later", scenario=name, differs=list(catalog.manifest(catalog.saves()[0]).differs))
    ckpt.close(save=False)
    engine.destroy()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    results = Results(spec["results"])
    start_group(zero=True)
    for name in CASES:
        run(name, Path(spec["directory"]), results, resume=spec["resume"])
    leave()


if __name__ == "__main__":
    main()
