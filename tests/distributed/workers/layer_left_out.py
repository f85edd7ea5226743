"""Two ranks train a DeepSpeed model of which some steps leave out a layer; or resume step SAVED of that, and train on.

Usage: layer_left_out.py SPEC.json, with ``resume`` in the spec.
"""

from __future__ import annotations

import json
import sys
from functools import partial
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

SOME = {2, 4, 6}
"""Steps that leave out the branch."""

# ZeRO stage with its settings, and what is special
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "zero3": (3, {}, {"left_out": SOME}),
    "zero3-offload": (3, OFFLOADED, {"left_out": SOME}),
    "zero2-offload": (2, OFFLOADED, {"left_out": SOME}),
    "zero2": (2, {}, {"left_out": SOME}),
    "zero3-used": (3, {}, {}),
    "zero3-left-out-after": (3, {}, {"left_out": {4, 6}}),
    "zero3-journal": (3, {}, {"left_out": SOME}),
    "zero3-stateless": (3, {}, {"left_out": SOME, "optimizer": torch.optim.SGD}),
    "zero3-second-batch": (3, {}, {"second": True}),
    "zero2-offload-second-batch": (2, OFFLOADED, {"second": True}),
    "zero1-offload-second-batch": (1, OFFLOADED, {"second": True}),
    "zero2-offload-frozen": (2, OFFLOADED, {"frozen": range(2, 9)}),
    "zero3-frozen": (3, {}, {"frozen": range(2, 9)}),
    "zero3-unfrozen": (3, {}, {"frozen": range(-1, 1), "left_out": SOME}),
    "zero3-decay": (3, {}, {"optimizer": partial(torch.optim.Adam, weight_decay=0.1)}),
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

    stage, zero, case = CASES[name]
    left_out, second, frozen = case.get("left_out", ()), case.get("second", False), case.get("frozen", ())
    torch.manual_seed(7 if resume else 1)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1 + second,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **ZERO, **zero},
        "steps_per_print": 1 << 30,
    }
    model = Branched()
    optimizer = case.get("optimizer", torch.optim.AdamW)(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    model.branch.requires_grad_(-1 not in frozen)
    journal = name.endswith("journal")  # one save at step 2, and records
    config = {"store": str(folder / name), "every": 2 if journal else 1, "metrics": {"enabled": False}}
    config["journal"] = {"enabled": journal}
    ckpt = monitor.attach(engine, config)
    start, losses = ckpt.resume(), []
    exact = ckpt.certificate is None or ckpt.certificate.exact
    for step in range(start, LAST):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank()))
        model.branch.requires_grad_(step not in frozen)
        for batch in range(1 + second):
            loss = engine(x, step not in left_out and batch == second)
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
