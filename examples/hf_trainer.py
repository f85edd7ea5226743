"""Trains a small Llama with random weights on made-up sentences under the Hugging Face Trainer, and resumes by itself.

    python -m examples.hf_trainer --steps 60

Kill it whenever you like and give the same line again: it goes on where the newest commit is. It downloads nothing.
With DeepSpeed ZeRO-2 on two CPU ranks:

    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    torchrun --standalone --nproc-per-node 2 -m examples.hf_trainer --steps 60 --zero 2

What Driftpoint asks of a training script are the two lines marked ``<-``; the rest is any Trainer script.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import monitor

VOCABULARY, LENGTH = 128, 32
SETTINGS = {"every": 10, "metrics": {"port": 0}}


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Tokens that count up from somewhere: a pattern that a small model learns."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) * (1 + index % 5) + index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    args = arguments()
    settings = {"store": str(args.store), **SETTINGS}
    trainer = Trainer(
        model=model(),
        args=training_arguments(args),
        train_dataset=Sentences(),
        callbacks=[monitor.CheckpointCallback(settings)],  # <- what to save, and where: or the name of a YAML file
    )
    trainer.train(resume_from_checkpoint=monitor.resume_path(settings))  # <- None, or where the newest commit is


def model() -> LlamaForCausalLM:
    """A Llama with random weights, 0.2 M parameters."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
            attention_dropout=0.1,
        )
    )


def training_arguments(args: argparse.Namespace) -> TrainingArguments:
    """The Trainer's own saving is off: it may be on as well."""
    return TrainingArguments(
        output_dir=str(args.store) + "-output",
        max_steps=args.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=bool(args.zero),
        deepspeed=deepspeed_config(args.zero) if args.zero else None,
    )


def deepspeed_config(stage: int) -> dict[str, Any]:
    """ZeRO, with what the Trainer knows filled in by it."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": "auto"},
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("driftpoint-checkpoints"), help="where commits go")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps in all")
    parser.add_argument("--zero", type=int, default=0, choices=(0, 1, 2, 3), help="DeepSpeed's ZeRO stage; 0: none")
    return parser.parse_args()


if __name__ == "__main__":
    main()
