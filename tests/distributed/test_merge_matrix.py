"""Every stage, world size and precision of DeepSpeed's own checkpoints, merged into every other, loaded by stock code.

A launch for each world size trains and saves with DeepSpeed alone; the merges run here; a launch for each world size,
in which driftpoint cannot be imported, loads what was written and compares it with the state that was saved: weights,
working weights, both moments, steps, hyperparameters, schedule and counters, to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from merger.layouts.base import Target
from merger.merge import merge
from tests.support.launch import WORKERS, launcher, python
from tests.support.mounts import shared_memory

pytest.importorskip("deepspeed")
from matrix_cases import SOURCES, WORLDS, Cell, targets

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
BEFORE_AN_UPDATE = 2
"""Micro-batches of the first step: their losses depend on the weights loaded and on the rank only."""


def launch(script: str, world: int, directory: Path) -> None:
    """Run a worker under torchrun, away from our packages."""
    done = python([*launcher(world), WORKERS / script, directory], directory, timeout=1800, PYTHONPATH="")
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module")
def matrix() -> Iterator[Path]:
    """Everything trained, merged and loaded. In memory: no power is lost, so that syncing would only take time."""
    with shared_memory("driftpoint-matrix-") as directory:
        for world in WORLDS:
            launch("matrix_train.py", world, directory)
        for source in SOURCES:
            write(source, directory / source.name)
        for world in WORLDS:
            launch("matrix_load.py", world, directory)
        yield directory


def write(source: Cell, folder: Path) -> None:
    for cell in targets(source):
        target = Target("deepspeed", zero_stage=cell.stage, world_size=cell.world)
        result = merge(folder / "own", folder / cell.name, target=target)
        assert result.certificate.as_found and not result.problems
    for layout in ("universal", "hf", "dcp"):
        result = merge(folder / "own", folder / layout, target=Target(layout))
        (folder / f"{layout}.json").write_text(json.dumps(result.load))


@cache
def loaded(directory: Path, world: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / f"loaded-{world}-{rank}.json").read_text())
    return found


def losses(directory: Path, source: Cell, rank: int) -> list[str]:
    found: list[str] = json.loads((directory / source.name / f"losses-{rank}.json").read_text())
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_stock_deepspeed_has_the_same_state_and_goes_on(matrix: Path, source: Cell, world: int) -> None:
    for rank in range(world):
        for cell in (cell for cell in targets(source) if cell.world == world):
            found = loaded(matrix, world, rank)[f"{source.name}/{cell.name}"]
            assert found["differences"] == [], cell.name
            if rank < source.world:
                same = None if cell == source else BEFORE_AN_UPDATE
                assert found["losses"][:same] == losses(matrix, source, rank)[:same], cell.name


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_universal_at_every_world_size(matrix: Path, source: Cell) -> None:
    for world in WORLDS:
        for rank in range(world):
            found = loaded(matrix, world, rank)[f"{source.name}/universal"]
            assert found["differences"] == [], world
            if rank < source.world:
                expected = losses(matrix, source, rank)
                assert found["losses"][:BEFORE_AN_UPDATE] == expected[:BEFORE_AN_UPDATE]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_weights_for_transformers(matrix: Path, source: Cell) -> None:
    expected = torch.load(matrix / source.name / "state.pt", weights_only=False)
    found = load_file(matrix / source.name / "hf" / "model.safetensors")
    working = expected["working"]
    assert set(working) <= set(found)
    for name, tensor in working.items():
        assert bits_equal(found[name], tensor), name


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_torch_distributed_checkpoint(matrix: Path, source: Cell) -> None:
    expected = torch.load(matrix / source.name / "state.pt", weights_only=False)["trained"]
    names = {"fp32": "model.{}", "exp_avg": "optim.state.{}.exp_avg", "exp_avg_sq": "optim.state.{}.exp_avg_sq"}
    wanted = {
        names[slot].format(fqn): torch.full_like(tensor, float("nan"), dtype=torch.float32)
        for fqn, state in expected.items()
        for slot, tensor in state.items()
    }
    dcp.load(wanted, checkpoint_id=matrix / source.name / "dcp")
    for fqn, state in expected.items():
        for slot, tensor in state.items():
            assert bits_equal(wanted[names[slot].format(fqn)], tensor), (fqn, slot)


def bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
