"""Every case of its spec under the Hugging Face Trainer: without interruption; again until the process is killed; and,
in the processes that follow, resumed and trained to the end.

Usage: hf_train.py SPEC.json — ``cases``: name, zero (0: none), settings, arguments, ...; ``phase`` without torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from accelerate.state import AcceleratorState
from resume_jobs import Results, leave, start_group
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

import monitor
from monitor.adapters.module_tensors import as_bytes
from tests.support.internals import memory_of, wait_for_snapshot

VOCABULARY = 67


class Sentences(Dataset[Any]):
    """Tokens that are a function of the index."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(VOCABULARY, (11,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Recording(Trainer):  # type: ignore[misc]
    """The Trainer itself; every micro-batch's loss in training is kept to the last bit, by step."""

    losses: dict[int, list[str]]

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, *args, **kwargs)
        if not hasattr(self, "losses"):
            self.losses = {}
        if model.training:
            self.losses.setdefault(self.state.global_step, []).append(float(found.detach()).hex())
        return found


class Killed(Exception):
    """Thrown where the process dies, so that other cases of it may come to the same point."""


class Dying(TrainerCallback):  # type: ignore[misc]
    """Leaves training in the middle, when the save under way is done."""

    def __init__(self, step: int, ours: monitor.CheckpointCallback) -> None:
        self.step, self.ours = step, ours

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.ours.checkpointer.flush()
            raise Killed


class Flushing(TrainerCallback):  # type: ignore[misc]
    """Each decision finds the save before it committed, and the version in memory before it whole."""

    def __init__(self, ours: monitor.CheckpointCallback) -> None:
        self.ours = ours

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ours.checkpointer.flush()
        if memory_of(self.ours.checkpointer) is not None:
            wait_for_snapshot(self.ours.checkpointer)


class Certified(TrainerCallback):  # type: ignore[misc]
    """Whether what was resumed is one step's, to the bit."""

    def __init__(self, ours: monitor.CheckpointCallback) -> None:
        self.ours, self.exact = ours, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.exact = self.ours.checkpointer.certificate.exact


class Run:
    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.directory = Path(spec["directory"])
        self.results = Results(spec["results"])

    def straight(self, case: Mapping[str, Any]) -> None:
        trainer = self.trainer(case, "straight", seed=1)
        trainer.train()
        self.tell(case, "straight", trainer)

    def killed(self, case: Mapping[str, Any]) -> None:
        ours = self.callback(case)
        trainer = self.trainer(case, "killed", 1, ours, Flushing(ours), Dying(case["kill_at"], ours))
        path = monitor.resume_path(self.settings(case))
        assert path is None, path
        try:
            trainer.train(resume_from_checkpoint=path)
        except Killed:
            self.tell(case, "killed", trainer)
        else:
            raise AssertionError("it was not killed")

    def resumed(self, case: Mapping[str, Any]) -> None:
        """From other weights."""
        ours = self.callback(case)
        trainer = self.trainer(case, "killed", 2, ours, Flushing(ours), certified := Certified(ours))
        trainer.train(resume_from_checkpoint=monitor.resume_path(self.settings(case)))
        self.tell(case, "resumed", trainer, exact=certified.exact)

    def callback(self, case: Mapping[str, Any]) -> monitor.CheckpointCallback:
        return monitor.CheckpointCallback(self.settings(case))

    def settings(self, case: Mapping[str, Any]) -> dict[str, Any]:
        here = self.directory / case["name"]
        given = dict(case["settings"])
        if "memory" in given:
            (here / "memory").mkdir(parents=True, exist_ok=True)
            given["memory"] = {**given["memory"], "path": str(here / "memory")}
        return {"store": str(here / "store"), "metrics": {"enabled": False}, **given}

    def trainer(self, case: Mapping[str, Any], what: str, seed: int, *callbacks: Any) -> Recording:
        # Several Trainers live in one process here, which keeps what the first one was told about DeepSpeed.
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        arguments = TrainingArguments(
            output_dir=str(self.directory / case["name"] / what),
            use_cpu=True,
            bf16=bool(case["zero"]),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            warmup_steps=3,
            max_grad_norm=0.5,
            lr_scheduler_type="cosine",
            logging_steps=1,
            report_to=[],
            seed=17,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            optim="adamw_torch",
            deepspeed=deepspeed_config(case["zero"], case.get("config", {})) if case["zero"] else None,
            ddp_find_unused_parameters=False if case["name"] == "ddp" else None,
            **case["arguments"],
        )
        torch.manual_seed(seed)
        return Recording(
            model=model(case, self.directory),
            args=arguments,
            train_dataset=Sentences(case["samples"]),
            eval_dataset=Sentences(5),
            callbacks=list(callbacks),
        )

    def tell(self, case: Mapping[str, Any], kind: str, trainer: Recording, **more: Any) -> None:
        self.results.tell(
            kind,
            case=case["name"],
            losses=trainer.losses,
            log=trainer.state.log_history,
            step=trainer.state.global_step,
            epoch=trainer.state.epoch,
            best=trainer.state.best_metric,
            rate=trainer.lr_scheduler.get_last_lr(),
            weights=weights(trainer),
            **more,
        )


def model(case: Mapping[str, Any], directory: Path) -> Any:
    """A Llama; under LoRA only adapters are trained, and the base is what the script makes it, whatever the seed."""
    if case.get("fsdp2"):
        return sharded(directory / "pretrained" / str(torch.initial_seed()))
    if not case.get("lora"):
        return LlamaForCausalLM(llama())
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = LlamaForCausalLM(llama())
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


def sharded(folder: Path) -> Any:
    """A Llama that transformers has sharded by FSDP2 while loading it."""
    made = LlamaForCausalLM(llama())
    if dist.get_rank() == 0:
        made.save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32)


def weights(trainer: Trainer) -> str:
    """A digest of what this rank has of the model."""
    found = xxhash.xxh3_128()
    for name, value in trainer.model.state_dict().items():
        found.update(name.encode())
        found.update(bytes(as_bytes(local(value).reshape(-1))))
    return found.hexdigest()


def local(value: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    mine = value.to_local() if isinstance(value, DTensor) else getattr(value, "ds_tensor", value)
    return mine.detach().cpu().contiguous()


def llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=32,
        attention_dropout=0.2,
    )


def deepspeed_config(stage: int, more: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1 << 14, "allgather_bucket_size": 1 << 14},
        "bf16": {"enabled": True},
        **more,
    }


def main(spec: Mapping[str, Any]) -> None:
    cases, run = spec["cases"], Run(spec)
    if "phase" in spec:
        before = int(spec["phase"])
    else:
        start_group(any(case["zero"] for case in cases))
        before = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.use_deterministic_algorithms(True)
    if before == 0:
        for case in cases:
            run.straight(case)
        for case in cases:
            run.killed(case)
        if dist.is_initialized():
            dist.barrier()  # the last commit is rank 0's
        if int(os.environ.get("RANK", "0")) == (dist.get_world_size() - 1 if dist.is_initialized() else 0):
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    for case in cases:
        run.resumed(case)
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
