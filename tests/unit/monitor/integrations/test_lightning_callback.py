"""What a Lightning Trainer cannot resume exactly is refused by name, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import monitor
from store.errors import ConfigError, ModelMismatchError, UnsupportedError

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed; .ci/run installs it by itself")


class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Fetching(Model):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        raise AssertionError("not reached")


class Sharded(pl.strategies.SingleDeviceStrategy):  # type: ignore[misc, name-defined]
    """Another strategy: a subclass may keep the state elsewhere, as DeepSpeed's does."""


def fit(store: Path, model: Any = None, ckpt_path: str | None = None, **trainer: Any) -> monitor.LightningCallback:
    callback = monitor.LightningCallback({"store": str(store), "metrics": {"enabled": False}})
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)))
    made = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **trainer,
    )  # fmt: skip
    made.fit(Model() if model is None else model, loader, ckpt_path=ckpt_path)
    return callback


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda: {"model": Manual()}, "manual optimization"),
        (lambda: {"model": Fetching()}, "dataloader_iter"),
        (lambda: {"strategy": Sharded("cpu")}, "strategy Sharded"),
        (lambda: {"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, given: Any, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        fit(tmp_path / "store", **given())
    assert not (tmp_path / "store").exists()


def test_a_checkpoint_of_lightning_beside_the_callback(tmp_path: Path) -> None:
    trainer = pl.Trainer(accelerator="cpu", max_epochs=0, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(Model())
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    with pytest.raises(UnsupportedError, match="ckpt_path"):
        fit(tmp_path / "store", ckpt_path=str(tmp_path / "it.ckpt"))


def test_settings_that_lightning_decides(tmp_path: Path) -> None:
    for settings in ({"resume": {"data": "on"}}, {"preemption": {"exit": False}}):
        with pytest.raises(ConfigError, match="Lightning"):
            monitor.LightningCallback(settings)


def test_the_place_in_the_data_is_that_of_as_many_ranks(tmp_path: Path) -> None:
    from monitor.integrations.lightning import TrainerProgress

    with pytest.raises(ModelMismatchError, match="that had 2 ranks"):
        TrainerProgress(pl.Trainer(accelerator="cpu", logger=False)).load_state_dict({"ranks": 2})


def test_the_loop_is_as_it_was_when_training_has_ended(tmp_path: Path) -> None:
    callback = fit(tmp_path / "store")
    assert callback.checkpointer is None
    assert fit(tmp_path / "store").checkpointer is None, "nothing was left to train"
