"""``frozen: skip``: frozen weights are not stored, and a resume with other ones is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from merger.merge import merge
from monitor.adapters.frozen import fingerprint
from store.catalog import open_catalog
from store.errors import MergeError, ModelMismatchError
from store.storage.local import LocalFiles


class Tuned(nn.Module):
    """A frozen base and something small on top of it."""

    def __init__(self, base: int) -> None:
        super().__init__()
        torch.manual_seed(base)
        self.base = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
        self.base.requires_grad_(False)
        self.top = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.base(x))


def job(store: Path, base: int = 0, **settings: Any) -> tuple[Tuned, torch.optim.Optimizer, monitor.Checkpointer]:
    model = Tuned(base)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    config = {"store": str(store), "every": 1, "frozen": "skip", "metrics": {"enabled": False}, **settings}
    return model, optimizer, monitor.attach((model, optimizer), config)


def train(model: Tuned, optimizer: torch.optim.Optimizer, ckpt: monitor.Checkpointer, steps: int) -> None:
    for step in range(ckpt.resume(), steps):
        model(torch.full((4, 64), 0.1 * step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
        ckpt.flush()


def test_only_trained_weights_are_written_and_restored(tmp_path: Path) -> None:
    model, optimizer, ckpt = job(tmp_path / "store")
    with ckpt:
        train(model, optimizer, ckpt, 3)
    written = sum(path.stat().st_size for path in (tmp_path / "store" / "segments").glob("*/*.safetensors"))
    assert written < 4 * sum(p.numel() for p in model.base.parameters())
    again, optimizer, ckpt = job(tmp_path / "store")
    with ckpt:
        assert ckpt.resume() == 3
        assert ckpt.certificate is not None
        assert ckpt.certificate.exact
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_another_base_model_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer, ckpt = job(tmp_path / "store")
    with ckpt:
        train(model, optimizer, ckpt, 2)
    other, _, ckpt = job(tmp_path / "store", base=1)
    before = other.top.weight.clone()
    with (
        ckpt,
        pytest.raises(ModelMismatchError, match=r"differ from those it was saved with: base\.0\.bias and 3 more"),
    ):
        ckpt.resume()
    assert torch.equal(other.top.weight, before)
    _, _, ckpt = job(tmp_path / "store", frozen="save")
    with ckpt, pytest.raises(ModelMismatchError, match=r"only in this model: base\.0\.bias"):
        ckpt.resume()


def test_parameters_frozen_later_are_saved_and_unfrozen_ones_refused(tmp_path: Path) -> None:
    model, optimizer, ckpt = job(tmp_path / "store")
    with ckpt:
        train(model, optimizer, ckpt, 2)
        model.top.bias.requires_grad_(False)
        report = ckpt.save(wait=True)
        assert report.skipped is None
        newest = open_catalog(LocalFiles(tmp_path / "store"))
        assert set(newest.manifest(newest.saves()[0]).tensors) == {"top.weight", "top.bias"}
        model.base[2].bias.requires_grad_(True)
        report = ckpt.save(wait=True, strict=False)
        assert report.skipped == "unsupported"
        assert report.problem is not None
        assert report.problem.startswith("base.2.bias was frozen when the job attached")


def test_a_weight_that_is_left_out_and_changed_stops_saving_until_it_is_as_before(tmp_path: Path) -> None:
    model, optimizer, ckpt = job(tmp_path / "store")
    with ckpt:
        train(model, optimizer, ckpt, 1)
        model.base.load_state_dict(model.base.state_dict())  # the same values
        optimizer.step()
        report = ckpt.step()
        ckpt.flush()
        assert report is not None and report.skipped is None
        before = model.base[0].weight[3, 5].clone()
        model.base[0].weight[3, 5] *= 1 + 1e-6
        optimizer.step()
        report = ckpt.step()
        assert report is not None and report.skipped == "unsupported"
        assert report.problem is not None and "base.0.weight is frozen" in report.problem
        model.base[0].weight[3, 5] = before
        optimizer.step()
        report = ckpt.step()
        assert report is not None and report.skipped is None


def test_a_merge_names_the_missing_weights(tmp_path: Path) -> None:
    model, optimizer, ckpt = job(tmp_path / "store")
    with ckpt:
        train(model, optimizer, ckpt, 2)
    with pytest.raises(MergeError, match=r"`frozen: skip`, so 4 frozen parameters \(base\.0\.bias"):
        merge(tmp_path / "store", tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex128, torch.bool])
def test_fingerprints_of_pieces_add_up(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    whole = fingerprint(values, 0)
    parts = fingerprint(values[:333].clone(), 0) + fingerprint(values[333:].clone(), 333)
    assert whole == parts % (1 << 64)
    swapped = values.clone()
    swapped[[0, 1]] = values[[1, 0]]
    changed = values.clone()
    changed[500] = changed[500] == 0
    assert fingerprint(changed, 0) != whole
    assert bool(values[0] == values[1]) or fingerprint(swapped, 0) != whole
