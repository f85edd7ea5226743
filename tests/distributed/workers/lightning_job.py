"""A training by Lightning that leans on every generator, and signals itself in the batch that is named.

Usage: lightning_job.py SPEC.json. ``store``: Driftpoint's settings, none for a run without it. ``die``: epoch and batch
in which rank ``victim`` sends itself ``signal``. ``path``: where Lightning may be.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from resume_jobs import Results
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import monitor

SPEC = json.loads(Path(sys.argv[1]).read_text())
sys.path.extend(SPEC["path"])

import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402

SAMPLES = 44
RESULTS = Results(SPEC["results"])


class Noisy(Dataset[Any]):
    """Samples that are augmented by torch's, numpy's and python's generators."""

    def __init__(self, train: bool) -> None:
        self._data = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3))
        self._train = train

    def __len__(self) -> int:
        return SAMPLES if self._train else 10

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(()) + random.random() + np.random.rand() if self._train else 0.0
        return self._data[index] + 0.1 * noise


class Stream(IterableDataset[Any]):
    """The same, without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        data = Noisy(True)
        for index in torch.randperm(SAMPLES).tolist():
            yield data[index]


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch) - batch.sin().sum(1, keepdim=True)).square().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        if SPEC.get("die") == [self.current_epoch, batch_idx] and self.global_rank == SPEC.get("victim", 0):
            os.kill(os.getpid(), signal.Signals[SPEC.get("signal", "SIGKILL")])
        place = [self.current_epoch, batch_idx, self.global_step]
        RESULTS.tell("loss", place=place, loss=loss.item().hex())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch) - batch.sin().sum(1, keepdim=True)).square().mean(), sync_dist=True)

    def on_train_epoch_start(self) -> None:
        torch.rand(random.randrange(1, 4))  # a hook that draws

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        step = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=200)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
        chosen = {"scheduler": step, "interval": "step"}
        if SPEC.get("plateau"):
            chosen = {"scheduler": plateau, "monitor": "val_loss", "interval": "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": chosen}


class Flush(pl.Callback):
    """Waits for every save, so that a kill leaves it committed."""

    def __init__(self, of: monitor.LightningCallback) -> None:
        self.of = of

    def on_train_batch_start(self, *_: Any) -> None:
        assert self.of.checkpointer is not None
        self.of.checkpointer.flush()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # rank 0 has committed


def loader(kind: str) -> Any:
    if kind == "stream":
        return DataLoader(Stream(), batch_size=4)
    if kind == "stateful":
        return StatefulDataLoader(Noisy(True), batch_size=4, shuffle=True)
    if kind == "generator":
        return DataLoader(Noisy(True), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(11))
    return DataLoader(Noisy(True), batch_size=4, shuffle=True, num_workers=2 if kind == "workers" else 0)


def main(spec: Mapping[str, Any]) -> None:
    pl.seed_everything(5, verbose=False)
    folder = Path(spec["directory"])
    best = ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=1, save_weights_only=True)
    stop = EarlyStopping("val_loss", patience=50)
    callbacks: list[pl.Callback] = [stop, best]
    if spec["store"] is not None:
        settings = {"store": str(folder / "store"), "metrics": {"enabled": False}, **spec["store"]}
        saving = monitor.LightningCallback(settings)
        callbacks += [saving, Flush(saving)]
    trainer = pl.Trainer(
        max_epochs=spec.get("epochs", 3), accelerator="cpu", devices=spec.get("devices", 1),
        strategy=spec.get("strategy", "auto"), callbacks=callbacks,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        **spec.get("trainer", {}),
    )  # fmt: skip
    model = Model()
    trainer.fit(model, loader(spec["loader"]), DataLoader(Noisy(False), batch_size=5))
    weights = torch.cat([one.detach().flatten() for one in model.state_dict().values()]).double().sum().item()
    rates = [group["lr"].hex() for group in trainer.optimizers[0].param_groups]
    score = float(best.best_model_score or 0).hex()
    RESULTS.tell(
        "end", weights=weights.hex(), step=trainer.global_step, score=score, waits=stop.wait_count, rates=rates
    )


if __name__ == "__main__":
    main(SPEC)
