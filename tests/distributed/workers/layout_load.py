"""Under torchrun, where nothing of driftpoint can be imported: stock DeepSpeed loads what was written for it.

Usage: layout_load.py SPEC — in its directory, per target of this world size: reads ``TARGET/merged``, with the
configuration that its files carry; writes ``TARGET/found.pt`` (the state as loaded), ``TARGET/again`` (DeepSpeed's
own checkpoint of it), and how training goes on; the same with the universal checkpoint of the target's source.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import barred
import deepspeed
import torch
import torch.distributed as dist
from layout_cases import LAST, SAVED, TARGETS, engine_of, loads_universally, universal_settings
from layout_state import collect
from merge_cases import leave, train


def run(name: str, directory: Path) -> None:
    target, folder = TARGETS[name], directory / name
    model_file = sorted((folder / "merged").glob("global_step*/*model_states.pt"))[0]
    configuration = torch.load(model_file, weights_only=False)["ds_config"]
    built = engine_of(target.source.family, 1, configuration)
    assert built.zero_optimization_stage() == target.stage
    path, client = built.load_checkpoint(str(folder / "merged"))
    assert path is not None and built.global_steps == SAVED
    state = collect(built)
    built.save_checkpoint(str(folder / "again"))
    losses = train(built, range(SAVED, LAST))
    trained = collect(built)
    if dist.get_rank() == 0:
        torch.save(state, folder / "found.pt")
        torch.save(trained, folder / "trained-on.pt")
    own = sorted(client["driftpoint"]["ranks"])
    (folder / f"after-{dist.get_rank()}.json").write_text(json.dumps({"losses": losses, "ranks": own}))


def run_universal(name: str, directory: Path) -> None:
    """The lines that the merge printed, run as they are: those up to the model's before the engine is built."""
    target, folder = TARGETS[name], directory / name
    lines = json.loads((directory / target.source.name / "load.json").read_text())
    cut = 1 + next(i for i, line in enumerate(lines) if line.startswith("model."))
    names: dict[str, Any] = {"torch": torch}

    def prepare(model: torch.nn.Module) -> None:
        names["model"] = model
        exec("\n".join(lines[:cut]), names)

    configuration = universal_settings(target.source.family, target.stage)
    names["engine"] = built = engine_of(target.source.family, 1, configuration, prepare)
    exec("\n".join(lines[cut:]), names)
    state = collect(built)
    losses = train(built, range(SAVED, LAST))
    trained = collect(built)
    if dist.get_rank() == 0:
        torch.save(state, folder / "found-universal.pt")
        torch.save(trained, folder / "trained-universal.pt")
    (folder / f"universal-{dist.get_rank()}.json").write_text(json.dumps(losses))


def main(directory: Path) -> None:
    barred.require_barred()
    deepspeed.init_distributed(dist_backend="gloo")
    for name, target in TARGETS.items():
        if target.world == dist.get_world_size() and (directory / name / "merged").exists():
            run(name, directory)
            if loads_universally(target):
                run_universal(name, directory)
    barred.require_barred()
    leave()


if __name__ == "__main__":
    main(Path(json.loads(Path(sys.argv[1]).read_text())["directory"]))
