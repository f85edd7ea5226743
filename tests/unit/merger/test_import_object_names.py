"""Objects in ``state=`` that have names keep them through a merge and an import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import monitor
from merger.import_checkpoint import import_checkpoint, plan_import
from merger.layouts.base import Target
from merger.merge import merge


class Sampler:
    """One of several of the same class."""

    def __init__(self, split: str) -> None:
        self.split = split

    def state_dict(self) -> dict[str, str]:
        return {"split": self.split}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.split = state["split"]


def job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.named_parameters())


def settings(store: Path) -> dict[str, Any]:
    return {"store": str(store), "metrics": {"enabled": False}}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layout", ["dcp", "universal"])
def test_each_gets_its_own_state_in_another_order(tmp_path: Path, layout: str) -> None:
    one = job()
    state = {"train": Sampler("train"), "val": Sampler("val")}
    with monitor.attach(one, settings(tmp_path / "store"), state=state) as ckpt:
        ckpt.resume()
        one[0](torch.ones(2, 4)).sum().backward()
        one[1].step()
        ckpt.step()
    merge(tmp_path / "store", tmp_path / "merged", target=Target(layout))
    import_checkpoint(plan_import(tmp_path / "merged"), tmp_path / "again")
    found = {"val": Sampler(""), "train": Sampler("")}
    with monitor.attach(job(), settings(tmp_path / "again"), state=found) as ckpt:
        assert ckpt.resume() == 1
        ckpt.close(save=False)
    assert (found["train"].split, found["val"].split) == ("train", "val")
