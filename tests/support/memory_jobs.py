"""Jobs of one process with a memory tier, and what lies in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from monitor.adapters.module_tensors import torch_dtype
from store.memory.index import MemoryVersion, assemble_version, rank_share, scan_node
from store.memory.overlay import Overlay
from store.names import SaveId
from store.segment import read_leaves
from store.storage.local import LocalFiles
from tests.support.entries import read_entry
from tests.support.jobs import Job
from tests.support.kept import abandoned, memory, settled, tier_of


def kept_steps(store: Path) -> list[int]:
    """Of the versions in memory."""
    return sorted(save.step for save in scan_node(tier_of(store)).versions)


def version(store: Path, save: SaveId | None = None) -> MemoryVersion:
    """One that lies in memory; without ``save`` the newest."""
    node = scan_node(tier_of(store))
    found = save or max(node.versions)
    return assemble_version(found, [rank_share(node.versions[found])], node)


def state_in(store: Path, save: SaveId | None = None) -> dict[str, torch.Tensor]:
    """What memory holds, by name and slot, every byte checked against its hash."""
    found = version(store, save)
    files, held = Overlay(LocalFiles(store), found), {}
    for part in found.records.values():
        for entry in part.entries:
            data = bytearray(entry.nbytes)
            read_entry(files, part, entry, memoryview(data))
            shape = found.manifest.tensors[entry.fqn].shape
            held[f"{entry.fqn}/{entry.slot}"] = torch.frombuffer(data, dtype=torch_dtype(entry.dtype)).reshape(shape)
    return held


def leaves_in(store: Path) -> int:
    """Tensors of the run state in the newest version, every byte checked against its hash."""
    found = version(store)
    files = Overlay(LocalFiles(store), found)
    return sum(len(read_leaves(files, part)) for part in found.records.values())


def sources(one: Job) -> set[str]:
    """Where a resume took its units from."""
    assert one.ckpt.certificate is not None
    return {unit.source for unit in one.ckpt.certificate.units}


def run(one: Job, steps: int) -> None:
    """Take so many steps, each snapshot sealed before the next step."""
    for _ in range(steps):
        one.step()
        settled(one)


def trained(store: Path, steps: int, **settings: Any) -> Job:
    """Start a job with the memory tier, resume, and take so many steps, each snapshot sealed before the next step."""
    one = Job(store, **{"every": 4, "memory": memory(store), **settings})
    one.ckpt.resume()
    run(one, steps)
    return one


def killed_at(store: Path, steps: int, **settings: Any) -> dict[str, torch.Tensor]:
    """Return the state of a job that was killed after so many steps."""
    one = trained(store, steps, **settings)
    kept = one.weights()
    abandoned(one)
    return kept
