"""Under torchrun: trains the sources of this world size into stores, and notes what engines of every stage look like.

Usage: layout_train.py SPEC — in its directory, per source ``SOURCE/store``, ``SOURCE/own`` (DeepSpeed's own
checkpoint) and ``SOURCE/state.pt``; ``facts-WORLD.json``, ``cases-WORLD.json``; per target of this world size
``TARGET/losses-RANK.json`` and ``TARGET/trained.pt``: how training goes on from the same state, put in place by
driftpoint's own resume.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from adapter_state import leave, put, take
from layout_cases import FAMILIES, LAST, SAVED, SOURCES, TARGETS, Source, engine_of, settings
from layout_state import collect
from merge_cases import CASES, build, train
from merge_store import StoreWriter

from monitor.adapters import adapter_for


def write(source: Source, directory: Path) -> None:
    folder = directory / source.name
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    built = engine_of(source.family, 0, settings(source.family, source.stage))
    train(built, range(SAVED))
    adapter = adapter_for(built)
    StoreWriter(folder / "store", adapter).save(SAVED)
    if source.stage:
        built.save_checkpoint(str(folder / "own"))
    state, saved = collect(built), take(adapter)
    if dist.get_rank() == 0:
        torch.save(state, folder / "state.pt")
        torch.save(saved, folder / "saved.pt")
    dist.barrier()


def go_on(name: str, directory: Path) -> None:
    target, folder = TARGETS[name], directory / name
    saved = torch.load(directory / target.source.name / "saved.pt", weights_only=False)
    built = engine_of(target.source.family, 1, settings(target.source.family, target.stage))
    assert put(adapter_for(built), saved) == []
    losses = train(built, range(SAVED, LAST))
    state = collect(built)
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        torch.save(state, folder / "trained.pt")
    dist.barrier()
    (folder / f"losses-{dist.get_rank()}.json").write_text(json.dumps(losses))


def noted(built: Any) -> dict[str, Any]:
    adapter = adapter_for(built)
    tensors = {
        fqn: {"shape": info.shape, "dtype": info.dtype, "kind": info.kind, "aliases": info.aliases}
        for fqn, info in adapter.tensors().items()
    }
    groups = [group["params"] for group in adapter.run_state()["param_groups"]]
    return {"facts": adapter.layout_facts(), "tensors": tensors, "groups": groups}


def main(directory: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    world = dist.get_world_size()
    for source in SOURCES.values():
        if source.world == world:
            write(source, directory)
    facts = {
        family: {stage: noted(engine_of(family, 0, settings(family, stage))) for stage in (1, 2, 3)}
        for family in FAMILIES
    }
    cases = {case: noted(build(case, 0)) for case in CASES}
    if dist.get_rank() == 0:
        (directory / f"facts-{world}.json").write_text(json.dumps(facts))
        (directory / f"cases-{world}.json").write_text(json.dumps(cases))
    for name, target in TARGETS.items():
        if target.world == world and (directory / target.source.name / "saved.pt").exists():
            go_on(name, directory)
    leave()


if __name__ == "__main__":
    main(Path(json.loads(Path(sys.argv[1]).read_text())["directory"]))
