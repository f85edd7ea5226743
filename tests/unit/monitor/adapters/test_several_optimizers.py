"""Several optimizers of a model, and several models: saved as one job, by name, and resumed bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import monitor
from merger.merge import merge
from store.catalog import open_catalog
from store.errors import ModelMismatchError, UnsupportedError
from store.storage.local import LocalFiles

CONFIG = {"every": 1, "metrics": {"enabled": False}}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))


class Pair:
    """A generator with two optimizers, and a critic that has a module of the generator and trains at odd steps."""

    def __init__(self, store: Path, seed: int, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.models = {"generator": net(), "critic": net()}
        matrices = [p for p in self.models["generator"].parameters() if p.ndim == 2]
        vectors = [p for p in self.models["generator"].parameters() if p.ndim != 2]
        self.first = [SGD(matrices, lr=0.02, momentum=0.9), AdamW(vectors, lr=0.01)]
        self.second = AdamW(self.models["critic"].parameters(), lr=0.03)
        target = {"generator": (self.models["generator"], self.first), "critic": (self.models["critic"], self.second)}
        self.ckpt = monitor.attach(target, {**CONFIG, "store": str(store), **settings})

    def steps(self, steps: range, *, saved: bool = True) -> list[float]:
        losses = []
        for step in steps:
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            loss = self.models["critic"](self.models["generator"](x)).square().mean()
            loss.backward()
            for optimizer in [*self.first, self.second]:
                if optimizer is not self.second or step % 2:
                    optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if saved:
                self.ckpt.step()
                self.ckpt.flush()
        return losses

    def state(self) -> list[torch.Tensor]:
        states = [state for one in [*self.first, self.second] for state in one.state.values()]
        kept = [value for state in states for _, value in sorted(state.items())]
        return [p.clone() for model in self.models.values() for p in model.parameters()] + [v.clone() for v in kept]


@pytest.mark.parametrize("settings", [{}, {"policy": {"name": "threshold", "threshold": 0.0}}])
def test_a_generator_and_a_critic_go_on_bit_for_bit(tmp_path: Path, settings: Any) -> None:
    one = Pair(tmp_path / "store", 0, **settings)
    one.steps(range(3))
    one.ckpt.close()
    saved, losses, end = one.state(), one.steps(range(3, 8), saved=False), one.state()
    two = Pair(tmp_path / "store", 1, **settings)
    assert two.ckpt.resume() == 3
    assert two.ckpt.certificate is not None and two.ckpt.certificate.exact
    assert all(torch.equal(a, b) for a, b in zip(two.state(), saved, strict=True))
    assert two.steps(range(3, 8)) == losses
    assert all(torch.equal(a, b) for a, b in zip(two.state(), end, strict=True))
    two.ckpt.close()
    catalog = open_catalog(LocalFiles(tmp_path / "store"))
    manifest = catalog.manifest(catalog.saves()[0])
    assert {"generator.0.weight", "critic.2.bias"} <= manifest.tensors.keys()
    assert not manifest.differs


class Split:
    """A model whose parameters ``split`` deals out to optimizers, by index."""

    def __init__(self, store: Path, split: dict[int, list[int]], kinds: list[Any]) -> None:
        torch.manual_seed(0)
        self.model = net()
        parameters = list(self.model.parameters())
        hyper = {SGD: {"momentum": 0.9}, AdamW: {}}
        self.optimizers = [
            kinds[number]([parameters[i] for i in held], lr=0.01, **hyper[kinds[number]])
            for number, held in split.items()
        ]
        self.ckpt = monitor.attach((self.model, self.optimizers), {**CONFIG, "store": str(store)})

    def step(self) -> None:
        self.model(torch.ones(2, 4)).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.ckpt.step()
        self.ckpt.flush()

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        states = {id(p): state for one in self.optimizers for p, state in one.state.items()}
        return {name: states[id(p)] for name, p in self.model.named_parameters()}


def test_a_parameter_that_went_to_another_optimizer_is_refused(tmp_path: Path) -> None:
    one = Split(tmp_path / "store", {0: [0, 2], 1: [1, 3]}, [SGD, AdamW])
    one.step()
    one.ckpt.close()
    two = Split(tmp_path / "store", {0: [0], 1: [1, 2, 3]}, [SGD, AdamW])
    with pytest.raises(ModelMismatchError, match=r"2\.weight: updated by SGD in the run that was saved, and by AdamW"):
        two.ckpt.resume()
    two.ckpt.close(save=False)
    alone = Split(tmp_path / "store", {0: [0, 1, 2, 3]}, [AdamW])
    with pytest.raises(ModelMismatchError, match=r"0\.weight, 2\.weight: updated by SGD"):
        alone.ckpt.resume()


def test_state_that_stays_with_the_optimizer_before_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = Split(tmp_path / "store", {0: [0, 2], 1: [1, 3]}, [SGD, AdamW])
    one.step()
    groups = [optimizer.param_groups[0]["params"] for optimizer in one.optimizers]
    moved = groups[0].pop()
    groups[1].append(moved)
    one.step()
    assert "SGD has state of a parameter that AdamW holds" in caplog.text
    assert len(open_catalog(LocalFiles(tmp_path / "store")).saves()) == 1
    del one.optimizers[0].state[moved]
    one.step()
    one.ckpt.close()
    two = Split(tmp_path / "store", {0: [0], 1: [1, 3, 2]}, [SGD, AdamW])
    assert two.ckpt.resume() == 3
    assert two.moments().keys() == one.moments().keys()
    for name, state in one.moments().items():
        assert all(torch.equal(value, two.moments()[name][key]) for key, value in state.items())


@pytest.mark.parametrize("split", [{0: [0, 1, 2], 1: [3]}, {0: [0, 1, 2, 3]}, {0: [3], 1: [1, 0, 2]}])
def test_among_optimizers_of_one_class_state_goes_by_name(tmp_path: Path, split: dict[int, list[int]]) -> None:
    one = Split(tmp_path / "store", {0: [0, 2], 1: [1, 3]}, [AdamW, AdamW])
    one.step()
    one.ckpt.close()
    two = Split(tmp_path / "store", split, [AdamW, AdamW])
    assert two.ckpt.resume() == 1
    assert two.ckpt.certificate is not None and two.ckpt.certificate.exact
    for name, state in one.moments().items():
        assert all(torch.equal(value, two.moments()[name][key]) for key, value in state.items())


def test_optimizers_are_merged_into_files_of_their_own(tmp_path: Path) -> None:
    one = Split(tmp_path / "store", {0: [0, 2], 1: [1, 3]}, [SGD, AdamW])
    one.step()
    one.ckpt.close()
    out = merge(tmp_path / "store", tmp_path / "out").out
    fresh = Split(tmp_path / "other", {0: [0, 2], 1: [1, 3]}, [SGD, AdamW])
    for number, optimizer in enumerate(fresh.optimizers):
        optimizer.load_state_dict(torch.load(out / f"optimizer.{number}.pt"))
    fresh.model.load_state_dict(torch.load(out / "model.pt"))
    for name, state in one.moments().items():
        assert all(torch.equal(value, fresh.moments()[name][key]) for key, value in state.items())


def test_wrong_targets_are_refused() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"several of SGD \+ AdamW hold 0\.weight.*one optimizer"):
        monitor.attach((model, [optimizer, AdamW(model.parameters())]), CONFIG)
    with pytest.raises(UnsupportedError, match="there is no optimizer"):
        monitor.attach((model, []), CONFIG)
    for name in ("", "a.b", "train", 1):
        with pytest.raises(UnsupportedError, match="cannot name a model"):
            monitor.attach({name: (model, optimizer)}, CONFIG)
    with pytest.raises(UnsupportedError, match="'generator' is a Sequential"):
        monitor.attach({"generator": model}, CONFIG)
