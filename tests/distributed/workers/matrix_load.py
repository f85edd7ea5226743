"""Under torchrun, where nothing of driftpoint can be imported: stock DeepSpeed loads every cell of its world size.

Usage: matrix_load.py DIRECTORY — writes ``loaded-WORLD-RANK.json``: per merged directory, what differs from the state
that was saved, and the losses of the steps that follow: all of them for the source's own engine, which has to have the
same, and those of one step, of two micro-batches, for any other, which has the same before an update only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import barred
import deepspeed
import torch
import torch.distributed as dist
from adapter_model import Tiny, config, param_groups
from layout_state import collect
from matrix_cases import LAST, LINEAR, SAVED, SOURCES, Cell, build, targets, universal_stage
from merge_cases import leave, train


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two states differ, to the last bit."""
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        same = same and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        return [] if same else [f"{where}: {one.dtype} {tuple(one.shape)}, {other.dtype} {tuple(other.shape)}"]
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            return [f"{where}: keys {sorted(one.keys() ^ other.keys())}"]
        return [found for key in one for found in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{where}: lengths"]
        return [
            found for i, pair in enumerate(zip(one, other, strict=True)) for found in differences(*pair, f"{where}/{i}")
        ]
    return [] if one == other else [f"{where}: {one!r} is not {other!r}"]


def load(cell: Cell, path: Path, expected: Mapping[str, Any], last: int) -> dict[str, Any]:
    built = build(cell, 1)
    assert built.load_checkpoint(str(path))[0] is not None, path
    return compared(built, expected, last)


def load_universal(cell: Cell, lines: Sequence[str], expected: Mapping[str, Any]) -> dict[str, Any]:
    """By the very lines that the merge said."""
    torch.manual_seed(1)
    model = Tiny()
    names: dict[str, Any] = {"torch": torch, "model": model}
    position = next(i for i, line in enumerate(lines) if line.startswith("engine."))
    exec("\n".join(lines[:position]), names)
    settings = {**config(cell.stage, cell.precision, **LINEAR), "checkpoint": {"load_universal": True}}
    names["engine"], *_ = deepspeed.initialize(model=model, model_parameters=param_groups(model), config=settings)
    exec("\n".join(lines[position:]), names)
    return compared(names["engine"], expected, SAVED + 1)


def compared(built: Any, expected: Mapping[str, Any], last: int) -> dict[str, Any]:
    found = differences(expected, collect(built))
    return {"differences": found, "losses": train(built, range(SAVED, last))}


def main(directory: Path) -> None:
    barred.require_barred()
    deepspeed.init_distributed(dist_backend="gloo")
    world, told = dist.get_world_size(), {}
    for source in SOURCES:
        folder = directory / source.name
        expected = torch.load(folder / "state.pt", weights_only=False)
        for cell in targets(source):
            if cell.world == world:
                last = LAST if cell == source else SAVED + 1
                told[f"{source.name}/{cell.name}"] = load(cell, folder / cell.name, expected, last)
        universal = Cell(universal_stage(source, world), world, source.precision)
        lines = json.loads((folder / "universal.json").read_text())
        told[f"{source.name}/universal"] = load_universal(universal, lines, expected)
    (directory / f"loaded-{world}-{dist.get_rank()}.json").write_text(json.dumps(told))
    barred.require_barred()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
