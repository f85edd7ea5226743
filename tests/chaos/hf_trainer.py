"""What the random kills of a Hugging Face Trainer fall on. Every micro-batch's loss goes, to the last bit, into a file
that outlives it.

Usage: hf_trainer.py SPEC.json (under torchrun, or alone)
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import monitor
from tests.chaos.diary import Diary
from tests.support.internals import memory_of


class Bags(nn.Module):
    """Bags of tokens, and dropout: what the generators give shows in every loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner, self.head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.dropout = nn.Dropout(0.3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.dropout(torch.tanh(self.inner(self.tokens(input_ids).mean(1))))
        out = self.head(hidden)[:, 0]
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


class Samples(Dataset[Any]):
    """Of a length and with tokens that are a function of the index."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self._count:
            raise IndexError
        tokens = torch.randint(50, (3 + index * 7 % 9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": torch.tensor(index % 7 / 3)}


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tokens = nn.utils.rnn.pad_sequence([one["input_ids"] for one in samples], batch_first=True)
    return {"input_ids": tokens, "labels": torch.stack([one["labels"] for one in samples])}


class Recording(Trainer):  # type: ignore[misc]
    """The Trainer, and a diary."""

    diary: Diary

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, *args, **kwargs)
        if model.training:
            self.diary.put("loss", step=self.state.global_step, loss=float(found.detach()).hex())
        return found


class Telling(TrainerCallback):  # type: ignore[misc]
    """What was resumed, and what was acknowledged. It comes after ours."""

    def __init__(self, ours: monitor.CheckpointCallback, diary: Diary) -> None:
        self.ours, self.diary = ours, diary

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        found = self.ours.checkpointer.certificate
        sources = sorted({unit.source for unit in found.units}) if found else []
        self.diary.put("resumed", step=state.global_step, exact=found is None or found.exact, sources=sources)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        ckpt = self.ours.checkpointer
        committed, memory = ckpt.metrics.registry.get_sample_value("driftpoint_last_commit_step"), memory_of(ckpt)
        newest = memory.newest.step if memory is not None and memory.newest is not None else 0
        self.diary.put("step", step=state.global_step, committed=int(committed or 0), newest=newest)


def main(spec: dict[str, Any]) -> None:
    tempfile.tempdir = None  # so that TMPDIR counts, wherever this process was forked from
    torch.use_deterministic_algorithms(True)
    diary = Diary(spec["diary"])
    arguments = TrainingArguments(
        output_dir=spec["output"], use_cpu=True, report_to=[], disable_tqdm=True, ddp_find_unused_parameters=False,
        dataloader_pin_memory=False, **spec["arguments"],
    )  # fmt: skip
    ours = None if spec["settings"] is None else monitor.CheckpointCallback(spec["settings"])
    torch.manual_seed(3)
    trainer = Recording(
        model=Bags(),
        args=arguments,
        data_collator=padded,
        train_dataset=Samples(spec["samples"]),
        eval_dataset=Samples(5),
        callbacks=[] if ours is None else [ours, Telling(ours, diary)],
    )
    trainer.diary = diary
    trainer.train(resume_from_checkpoint=None if ours is None else ours.resume_path())
    weights = {name: value.flatten().tolist() for name, value in trainer.model.state_dict().items()}
    told = ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch", "step")
    log = [{key: one[key] for key in told if key in one} for one in trainer.state.log_history]
    diary.put("end", step=trainer.state.global_step, weights=weights, log=[one for one in log if len(one) > 2])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
