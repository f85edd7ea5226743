"""Train a small Llama under the Hugging Face Trainer, saving every second step. The result is OUT/final.safetensors.

Usage: judged_trainer.py OUT. Prints the step that it starts from. With RANK and WORLD_SIZE in the environment it is one
rank of several.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from judged_loop import STEPS, await_trace, result, settings, write
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import monitor


class Sentences(Dataset[Any]):
    """Tokens that are a function of the index."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(32, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Flushing(TrainerCallback):  # type: ignore[misc]
    """Wait for each save, so that every run of the judge makes the same ones."""

    def __init__(self, ours: monitor.CheckpointCallback, out: Path) -> None:
        self.ours, self.out = ours, out

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        await_trace(self.out)
        print(f"resumed from step {state.global_step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ours.checkpointer.flush()


def main(out: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
            attention_dropout=0.2,
        )
    )
    ours = monitor.CheckpointCallback(settings(out))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(out / "output"),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=5e-3,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            use_cpu=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Sentences(),
        callbacks=[ours, Flushing(ours, out)],
    )
    trainer.train(resume_from_checkpoint=monitor.resume_path(settings(out)))
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    write(out, {**result(trainer.model, trainer.optimizer), "losses": torch.tensor(losses)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
