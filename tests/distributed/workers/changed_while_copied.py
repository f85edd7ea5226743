"""DeepSpeed engines whose state is changed by DeepSpeed's own calls while the copies of a save, and of a version in
memory, have not begun. What the script hashed at the decision is compared with what is committed and kept.

Usage: changed_while_copied.py SPEC.json
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
from deepspeed.utils import (
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from resume_jobs import Results, build, leave, rank, start_group
from staging_consistency import Hashes, Late, own, stored

import monitor
from store.memory.index import scan_node
from store.memory.layout import Tier
from store.names import SaveId
from store.segment import read_part

Change = Callable[[Any], None]


def parameter(engine: Any) -> Any:
    return next(one for name, one in engine.module.named_parameters() if name == "blocks.0.up.weight")


def full(engine: Any) -> torch.Tensor:
    one = parameter(engine)
    return torch.full(getattr(one, "ds_shape", one.shape), 7.0)


def local(engine: Any) -> torch.Tensor:
    return torch.full((parameter(engine).ds_tensor.numel(),), 7.0)


def changes(stage: int, saved: str) -> dict[str, Change]:
    """In this order: DeepSpeed has no moments by parameter once it has loaded a checkpoint."""
    found: dict[str, Change] = {
        "full_state": lambda engine: safe_set_full_optimizer_state(parameter(engine), full(engine), "exp_avg")
    }
    if stage == 3:
        found["local_param"] = lambda engine: safe_set_local_fp32_param(parameter(engine), local(engine))
        found["local_state"] = lambda engine: safe_set_local_optimizer_state(
            parameter(engine), local(engine), "exp_avg_sq"
        )
    found["load_checkpoint"] = lambda engine: engine.load_checkpoint(saved)
    found["load_module_only"] = lambda engine: engine.load_checkpoint(saved, load_module_only=True)
    found["full_param"] = lambda engine: safe_set_full_fp32_param(parameter(engine), full(engine))
    return found


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=True)
    results = Results(spec["results"])
    directory = Path(spec["directory"])
    for case in spec["cases"]:
        run(case, directory / f"{case['stage']}-{case['precision']}", spec["shared"], results)
    leave()


def run(case: Mapping[str, Any], directory: Path, shared: str, results: Results) -> None:
    trainee = build(case, seed=1)
    engine = trainee.target
    saved = str(directory / "deepspeed")
    trainee.step()
    engine.save_checkpoint(saved)
    settings = {
        "store": str(directory / "store"),
        "every": 1000,
        "metrics": {"enabled": False},
        "memory": {"enabled": True, "every": 1, "path": shared},
    }
    ckpt = monitor.attach(engine, settings, state=trainee.state)
    ckpt.resume()
    opened, memory, late = ckpt._opened, ckpt._memory, Late()
    assert opened is not None and memory is not None
    tier = Tier(Path(shared), opened.catalog.store_id)

    def changed(name: str, change: Change) -> Hashes:
        """Hashes of the decision; the copies begin after the change."""
        decided = own(engine)
        change(engine)
        late.let()
        memory._writer.join(180)
        ckpt.flush()
        dist.barrier()
        results.tell("changed", change=name, stage=case["stage"], differs=own(engine) != decided)
        return decided

    def settled() -> None:
        memory._writer.join(180)
        dist.barrier()

    for name, change in changes(case["stage"], saved).items():
        same = {"change": name, "stage": case["stage"]}
        trainee.step()
        ckpt.step()
        settled()
        late.hold()
        report = ckpt.save()
        save = SaveId(engine.global_steps, opened.epoch)
        decided = changed(name, change)
        committed = report.skipped is None and (directory / "store" / "manifests" / f"{save}.json").exists()
        found = stored(read_part(opened.files, opened.catalog.store_id, save, rank()).entries) if committed else {}
        results.tell("commit", **same, committed=committed, equal=found == decided)
        for _ in range(2):  # the first decision after the load finds that frozen weights were written
            trainee.step()
            ckpt.step()
            settled()
            ckpt.save(wait=True)
        trainee.step()
        late.hold()
        ckpt.step()
        save = SaveId(engine.global_steps, opened.epoch)
        decided = changed(name, change)
        held = scan_node(tier).versions.get(save, {}).get(rank())
        kept = None if held is None else stored(held.record.part.entries) == decided
        results.tell("kept", **same, equal=kept)
    ckpt.close()
    engine.destroy()
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
