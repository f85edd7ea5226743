"""What a closed job leaves with a model and an optimizer that go on: nothing that takes memory or that acts."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import monitor
from store.errors import ConfigError
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
    until = time.monotonic() + 60  # its threads end beside
    while gc.collect() >= 0 and any(ref() is not None for ref in kept):
        assert time.monotonic() < until
        time.sleep(0.05)
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


@pytest.mark.parametrize("staging", ["lazy", "auto"])
def test_a_save_that_is_copied_after_the_end_holds_the_state_of_its_step(tmp_path: Path, staging: str) -> None:
    """Storage hangs, so close() gives up the save. What changes the state next copies it first."""
    one = job()
    settings = {"every": 100, "staging": staging, "timeouts": {"close": 1}, "self_check": False}
    ckpt = trained(one, tmp_path / "s", **settings)
    hanging = threading.Event()
    saver_of(ckpt)._writer.submit(lambda: hanging.wait(60) and None)
    assert ckpt.save().skipped is None
    saved = copy.deepcopy(one[0].state_dict())
    ckpt.close(save=False)
    for weight in one[0].parameters():
        weight.register_hook(lambda grad: grad * 2)
    update(one)
    one[0].load_state_dict({name: value * 3 for name, value in saved.items()})
    hanging.set()
    until = time.monotonic() + 60
    while not list((tmp_path / "s" / "manifests").glob("*.json")):
        assert time.monotonic() < until
        time.sleep(0.01)
    other = job()
    again = monitor.attach(other, {"store": str(tmp_path / "s"), "metrics": {"enabled": False}})
    assert again.resume() == 2
    assert all(torch.equal(value, saved[name]) for name, value in other[0].state_dict().items())
    again.close(save=False)


class Keeping(torch.optim.SGD):
    """Its copies keep its hooks, which torch's do not."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def test_a_copy_of_an_optimizer_with_its_hooks_steps_and_loads(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 1)
    one = model, Keeping(model.parameters(), lr=0.1)
    ckpt = trained(one, tmp_path / "s")
    copied = copy.deepcopy(one[1])
    copied.step()
    copied.load_state_dict(one[1].state_dict())
    ckpt.close()


def test_a_model_is_copied_and_pickled_without_its_checkpointer(tmp_path: Path) -> None:
    one = job()
    ckpt = trained(one, tmp_path / "s")
    copied, unpickled = copy.deepcopy(one[0]), pickle.loads(pickle.dumps(one[0]))
    for model in (copied, unpickled):
        model.load_state_dict(one[0].state_dict())
        hooks = model._load_state_dict_pre_hooks.values()
        assert hooks and not any("monitor" in type(hook.hook).__module__ for hook in hooks)
    ckpt.close()


def test_a_closed_checkpointer_refuses_calls(tmp_path: Path) -> None:
    ckpt = trained(job(), tmp_path / "s")
    ckpt.close()
    for call in (ckpt.step, ckpt.save, ckpt.resume, ckpt.commit_last_step):
        with pytest.raises(ConfigError, match="this checkpointer is closed"):
            call()
    ckpt.close()
