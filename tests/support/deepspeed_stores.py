"""Stores as DeepSpeed runs write them, and DeepSpeed's own files made of them, as DeepSpeed leaves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from merger.io.output_dir import CERTIFICATE
from merger.layouts.base import Target
from merger.merge import merge
from store.names import Unit
from store.schema import ManifestRecord
from tests.support.plain_stores import PlainStore
from tests.support.planned import Tensor, planned
from tests.support.stores import FakeLayer

LAYERS = (FakeLayer("one", 1021), FakeLayer("two", 64), FakeLayer("three", 333))


class DeepSpeedStore(PlainStore):
    """As a bf16 run on three ranks at stage 1 writes it, two param groups, masters in fp32."""

    def __init__(self, root: Path, values_of: PlainStore | None = None) -> None:
        self.values_of = values_of
        tensors = {layer.fqn: Tensor((layer.numel,)) for layer in LAYERS}
        self.run = planned(tensors, [[LAYERS[0].fqn, LAYERS[2].fqn], [LAYERS[1].fqn]], stage=1, world=3)
        super().__init__(root, layers=LAYERS, world_size=3, framework="deepspeed")

    @property
    def facts(self) -> dict[str, Any]:
        return {**self.run.facts, "dtype": "bf16"}

    def run_state(self, step: int, rank: int) -> dict[str, Any]:
        return {**super().run_state(step, rank), "framework": self.run.framework_state}

    def values(self, unit: Unit, step: int) -> np.ndarray:
        """Those that another store gives back."""
        return super().values(unit, step) if self.values_of is None else self.values_of.decoded(unit, step)

    def _manifest(self, *given: Any) -> ManifestRecord:
        manifest = super()._manifest(*given)
        half = {fqn: record.replace(dtype="BF16") for fqn, record in manifest.tensors.items()}
        return manifest.replace(tensors=half)


def deepspeed_files(folder: Path, stage: int, world: int, step: int = 10) -> Path:
    """A directory in which nothing says that Driftpoint wrote it. Returns its root."""
    made = DeepSpeedStore(folder / f"store-{stage}-{world}-{step}")
    made.save(step)
    root = merge(made.root, folder / "saved", target=Target("deepspeed", zero_stage=stage, world_size=world)).out
    (root / CERTIFICATE).unlink()
    for path in root.glob("*/*model_states.pt"):
        change_pt(path, lambda tree: tree.pop("driftpoint"))
    return root


def change_pt(path: Path, change: Callable[[Any], object]) -> None:
    """Change what a file of torch's holds, in place; the name of its archive becomes that of the file."""
    tree = torch.load(path, map_location="cpu", weights_only=False)
    change(tree)
    torch.save(tree, path)


def optim_file(root: Path, rank: int) -> Path:
    """The optimizer states of a rank in the only tag of a directory."""
    (found,) = root.glob(f"*/*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return found
