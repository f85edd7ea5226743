"""What a closed job leaves with a model and an optimizer that go on: nothing that takes memory or that acts."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import monitor
from tests.support.internals import saver_of

Job = tuple[torch.nn.Module, torch.optim.Optimizer]


def job() -> Job:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(one: Job, store: Path, **settings: Any) -> monitor.Checkpointer:
    ckpt = monitor.attach(one, {"store": str(store), "every": 1, "metrics": {"enabled": False}, **settings})
    ckpt.resume()
    for _ in range(2):
        update(one)
        ckpt.step()
    ckpt.flush()
    return ckpt


def update(one: Job) -> None:
    model, optimizer = one
    optimizer.zero_grad()
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("settings", [{}, {"journal": {"enabled": True}}, {"staging": "lazy"}], ids=str)
def test_a_closed_checkpointer_is_freed_though_its_model_and_optimizer_live(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    one = job()
    ckpt = trained(one, tmp_path / "s", **settings)
    kept = [weakref.ref(ckpt), weakref.ref(saver_of(ckpt))]
    ckpt.close()
    del ckpt
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    update(one)


def test_hooks_of_a_closed_checkpointer_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = job()
    ckpt = trained(one, tmp_path / "s")
    called: list[str] = []
    saver = saver_of(ckpt)
    monkeypatch.setattr(saver._copies, "before_update", lambda: called.append("copies"))
    ckpt.close()
    update(one)
    one[0].load_state_dict(one[0].state_dict())
    one[1].load_state_dict(one[1].state_dict())
    assert called == []


def test_a_model_is_copied_and_pickled_without_its_checkpointer(tmp_path: Path) -> None:
    one = job()
    ckpt = trained(one, tmp_path / "s")
    copied, unpickled = copy.deepcopy(one[0]), pickle.loads(pickle.dumps(one[0]))
    for model in (copied, unpickled):
        model.load_state_dict(one[0].state_dict())
        hooks = model._load_state_dict_pre_hooks.values()
        assert hooks and not any("monitor" in type(hook.hook).__module__ for hook in hooks)
    ckpt.close()
