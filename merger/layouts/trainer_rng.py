"""``rng_state*.pth`` of a Trainer: from the run state where that has every rank's, else the folder's own files.

It knows neither steps nor schedulers. Files that are copied are not unpickled.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from merger.checkpoint import Checkpoint
from merger.containers.base import OutFile
from merger.containers.verbatim import Verbatim


def rng_files(
    checkpoint: Checkpoint, folder: Path, world_size: int, *, same_step: bool, distributed: bool
) -> tuple[Sequence[OutFile], str | None]:
    """(a file per rank, why there are none).

    same_step: whether the folder is of the checkpoint's step. distributed: whether one rank alone counts as a
    distributed run, in which the Trainer keeps the generators of all devices.
    """
    names = ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    states = [checkpoint.run_states[rank].rng for rank in range(world_size) if rank in checkpoint.run_states]
    if len(checkpoint.run_states) == len(states) == world_size and all(_is_complete(state) for state in states):
        every_device = distributed or world_size > 1
        return [
            OutFile(name, Verbatim(_saved(_as_trainer(state, every_device=every_device))))
            for name, state in zip(names, states, strict=True)
        ], None
    found = [folder / name for name in names]
    there = len(list(folder.glob("rng_state*.pth")))
    if same_step and there == world_size and all(path.is_file() for path in found):
        return [OutFile(path.name, Verbatim(path.read_bytes())) for path in found], None
    return (), (
        f"there are no random-number states of this step for {world_size} rank(s): dropout, and shuffling that is not "
        "seeded by itself, will draw other numbers than the run would have"
    )


def _is_complete(state: Any) -> bool:
    return isinstance(state, Mapping) and {"torch", "numpy", "python"} <= state.keys()


def _as_trainer(state: Mapping[str, Any], *, every_device: bool) -> dict[str, Any]:
    kind, words, *rest = state["numpy"]
    out = {
        "python": state["python"],
        "numpy": (kind, np.asarray(words, dtype=np.uint32), *rest),
        "cpu": state["torch"],
    }
    devices = list(state.get("cuda") or ())
    if devices:
        out["cuda"] = devices if every_device else devices[0]
    return out


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
