"""Stores as plain PyTorch writes them, for merges: with a run state and facts from which a layout can be made."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from store.commit import Expected, Group, wait_for_group
from store.names import SaveId, Unit
from store.segment import SegmentDraft, write_segment
from store.state_tree import Leaf, encode
from tests.support.stores import SLOTS, StoreBuilder


class PlainStore(StoreBuilder):
    """A store as plain PyTorch on two ranks would write it: a layout can be made of its run state."""

    def __init__(self, root: Path, **given: Any) -> None:
        super().__init__(root, **{"framework": "torch", **given})

    def write(self, save: SaveId, units: Iterable[Unit]) -> Group:
        """As in the base, with run state and facts."""
        plan, wanted = hashlib.md5(save.name.encode()).hexdigest(), frozenset(units)
        for rank in range(self.world_size):
            tree, leaves = encode(self.run_state(save.step, rank), _leaf)
            draft = SegmentDraft(
                store_id=self.store_id,
                save=save,
                rank=rank,
                world_size=self.world_size,
                plan=plan,
                fragments=self._fragments(save.step, rank, wanted),
                run_state=tree,
                run_leaves=leaves,
                facts=self.facts if rank == 0 else {},
            )
            write_segment(self.files, draft)
        return wait_for_group(self.files, Expected(self.store_id, save, self.world_size, plan), timeout=5)

    @property
    def facts(self) -> dict[str, Any]:
        return {"state_dict_names": self.fqns}

    @property
    def fqns(self) -> list[str]:
        return [layer.fqn for layer in self.layers]

    def run_state(self, step: int, rank: int) -> dict[str, Any]:
        moving = [layer.fqn for layer in self.layers if not layer.frozen]
        framework = {
            "param_groups": [{"params": moving, "hyper": {"lr": 0.5, "betas": (0.9, np.float64(0.75))}}],
            "scalars": {fqn: {"step": torch.tensor(float(step))} for fqn in moving},
            "slots": {fqn: [slot for slot in self.slots if slot != SLOTS[0]] for fqn in moving},
        }
        rng = {"torch": torch.arange(5, dtype=torch.uint8), "numpy": ("MT19937", np.arange(4, dtype=np.uint32), 3)}
        return {"framework": framework, "rng": rng, "user": [{"rank": rank, "names": {"a", "b"}}]}

    def expected(self, steps: Mapping[Unit, int] | int) -> dict[str, dict[str, np.ndarray]]:
        """What is rebuilt by fqn and slot, each unit's at its step."""
        out: dict[str, dict[str, np.ndarray]] = {}
        for unit in self.units:
            step = steps if isinstance(steps, int) else steps[unit]
            out.setdefault(f"{unit.layer}.weight", {})[unit.slot] = self.decoded(unit, step)
        return out


def _leaf(value: Any) -> Leaf | None:
    if not isinstance(value, torch.Tensor):
        return None
    names = {torch.float32: "F32", torch.uint8: "U8"}
    return Leaf(names[value.dtype], tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())


def rebuilt(out: Path) -> dict[str, dict[str, np.ndarray]]:
    """What a merge of a plain store wrote, by fqn and slot."""
    model = torch.load(out / "model.pt", weights_only=True)
    optimizer = torch.load(out / "optimizer.pt", weights_only=True)
    found = {fqn: {SLOTS[0]: tensor.numpy()} for fqn, tensor in model.items()}
    for index, state in optimizer["state"].items():
        fqn = list(model)[index]
        found[fqn] |= {slot: state[slot].numpy() for slot in SLOTS[1:] if slot in state}
    return found


def same(one: Mapping[str, Mapping[str, np.ndarray]], other: Mapping[str, Mapping[str, np.ndarray]]) -> bool:
    return one.keys() == other.keys() and all(
        one[fqn].keys() == other[fqn].keys()
        and all(one[fqn][slot].tobytes() == other[fqn][slot].tobytes() for slot in one[fqn])
        for fqn in one
    )


def digest_of(folder: Path) -> str:
    """Names, sizes, times and bytes of everything below a directory."""
    state = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        state.update(f"{path.relative_to(folder)} {path.stat().st_mtime_ns} {path.stat().st_nlink}".encode())
        if path.is_file():
            state.update(path.read_bytes())
    return state.hexdigest()
