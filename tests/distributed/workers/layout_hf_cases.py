"""A tiny Llama under the Hugging Face Trainer, on CPUs, as the checks of the hf and trainer layouts train it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

CASES = ("zero2-bf16", "zero3-bf16", "ddp-fp32")
"""ZeRO-2 with the Trainer's own optimizer and scheduler, ZeRO-3 with DeepSpeed's, and no DeepSpeed at all.
``zero1-bf16`` is as ZeRO-3 here, so that it can resume from it."""

EARLIER, SAVED, LATER, LAST = 2, 4, 5, 7
TIED = "zero2-bf16"
VOCABULARY = 67


class Sentences(Dataset[Any]):
    """A function of the index."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (11,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class Recording(Trainer):  # type: ignore[misc]
    """The Trainer itself; every micro-batch's loss is kept to the last bit."""

    losses: list[str]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """As in the base."""
        found = super().compute_loss(*args, **kwargs)
        if not hasattr(self, "losses"):
            self.losses = []
        self.losses.append(float((found[0] if isinstance(found, tuple) else found).detach()).hex())
        return found


def probe() -> torch.Tensor:
    """Tokens whose logits are compared, (2, 9)."""
    return torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(99))


def logits_of(model: Any) -> torch.Tensor:
    """Logits of :func:`probe`, (2, 9, vocabulary). ZeRO-3 wants all ranks to call it."""
    was = model.training
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=probe()).logits
    model.train(was)
    return logits


def trainer(case: str, output: Path, seed: int, micro: int = 2) -> Recording:
    """A fresh Trainer; other seeds give other weights. micro: samples a rank takes at a time."""
    # Several Trainers live in one process here, which keeps what the first one was told about DeepSpeed.
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    arguments = TrainingArguments(
        output_dir=str(output),
        use_cpu=True,
        bf16=case.endswith("bf16"),
        max_steps=LAST,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        warmup_steps=3,
        max_grad_norm=0.5,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_steps=1,
        report_to=[],
        seed=17,
        deepspeed=None if case == "ddp-fp32" else _config(case),
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False if case == "ddp-fp32" else None,
        optim="adamw_torch",
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(_llama(tied=case == TIED))
    return Recording(model=model, args=arguments, train_dataset=Sentences())


def _llama(*, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=32,
        attention_dropout=0.1,
        tie_word_embeddings=tied,
    )


def _config(case: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": int(case[4])},
        "bf16": {"enabled": True},
    }
    if case in ("zero3-bf16", "zero1-bf16"):
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        }
    return config
