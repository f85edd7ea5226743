"""A commit that holds neither random states nor the user's objects, as imports of other people's checkpoints make it:
a job resumes from it, keeps its own, and says so."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import monitor
from merger.import_checkpoint import ImportPlan, import_checkpoint, plan_import
from merger.tensors import to_leaf
from store.state_tree import encode


class Position:
    """An object of the user's."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def job(
    store: Path, seed: int, position: Position
) -> tuple[torch.nn.Module, torch.optim.Optimizer, monitor.Checkpointer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ckpt = monitor.attach(
        (model, optimizer), {"store": str(store), "every": 1, "metrics": {"enabled": False}}, state=[position]
    )
    return model, optimizer, ckpt


@pytest.fixture
def plan(tmp_path: Path) -> ImportPlan:
    """Of a commit at step 1 whose object is at 7."""
    model, optimizer, ckpt = job(tmp_path / "own", 1, Position(7))
    with ckpt:
        ckpt.resume()
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        ckpt.step()
    return plan_import(tmp_path / "own")


def without(plan: ImportPlan, *names: str) -> ImportPlan:
    framework = plan.checkpoint.framework_state
    state = {"framework": framework, "rng": plan.checkpoint.run_states[0].rng, "user": [{"at": 7}]}
    return replace(plan, run_states=(encode({**state, **dict.fromkeys(names)}, to_leaf),))


@pytest.mark.parametrize("names", [(), ("rng",), ("user",), ("rng", "user")], ids="-".join)
def test_what_is_not_there_starts_afresh_and_is_told(
    plan: ImportPlan, tmp_path: Path, caplog: pytest.LogCaptureFixture, names: tuple[str, ...]
) -> None:
    import_checkpoint(without(plan, *names), tmp_path / "store")
    position = Position(3)
    with caplog.at_level(logging.WARNING, "driftpoint"):
        model, _, ckpt = job(tmp_path / "store", 2, position)
        with ckpt:
            before, weights = torch.get_rng_state(), model.weight.detach().clone()
            assert ckpt.resume() == 1
            assert ckpt.certificate is not None and ckpt.certificate.exact
    assert not torch.equal(model.weight, weights)
    assert torch.equal(torch.get_rng_state(), before) == ("rng" in names)
    assert position.at == (3 if "user" in names else 7)
    assert ("has no random states" in caplog.text) == ("rng" in names)
    assert ("no state for the 1 objects in state=" in caplog.text) == ("user" in names)


def test_a_resume_does_not_call_exact_what_was_imported_as_found(
    plan: ImportPlan, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    certificate = replace(plan.checkpoint.certificate, exact=False, as_found=True)
    import_checkpoint(replace(plan, checkpoint=replace(plan.checkpoint, certificate=certificate)), tmp_path / "store")
    _, _, ckpt = job(tmp_path / "store", 2, Position(3))
    with ckpt:
        assert ckpt.resume() == 1
        assert ckpt.certificate is not None and (ckpt.certificate.exact, ckpt.certificate.as_found) == (False, True)
    assert "(as found: imported, and no hash proves that all files were of one save)" in capfd.readouterr().err
