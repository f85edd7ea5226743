"""Trains a small Llama on the text of Python's standard library with DeepSpeed ZeRO-3, and resumes by itself.

    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    driftpoint run -c examples/demo.yaml -- \\
        torchrun --standalone --nproc-per-node 2 -m examples.train_llama --config examples/demo.yaml

Kill any of its ranks whenever you like: the job is started again, and training goes on from the newest commit.
What Driftpoint asks of a training script are the three lines marked ``<-``; the rest is any DeepSpeed script.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import monitor
from examples.deepspeed_save import timed_save
from examples.journal import Journal, decision
from examples.stdlib_text import VOCABULARY, Batches, standard_library


def main() -> None:
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    deepspeed.init_distributed(dist_backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = build_model(args)
    batches = Batches(
        standard_library(), length=args.length, size=args.batch, seed=args.seed, rank=rank, world_size=world_size
    )
    engine, *_ = deepspeed.initialize(model=model, config=deepspeed_config(args))
    journal = Journal(args.journal if rank == 0 else None)

    with monitor.attach(engine, args.config, state=[batches]) as ckpt:  # <- what to save, and where
        first = ckpt.resume()  # <- 0, or the step that the newest commit is of
        tell_start(journal, ckpt, first, model)
        for step in range(first, args.steps):
            began = time.perf_counter()
            tokens = next(batches)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            report = ckpt.step()  # <- measure, decide, begin a save; never waits for the disk
            if report is not None:
                journal.write("decision", **decision(report))
            mean = mean_loss(loss)
            journal.write("step", step=step + 1, loss=mean, seconds=time.perf_counter() - began)
            if rank == 0 and (step + 1) % 10 == 0:
                logging.info("step %d: loss %.4f", step + 1, mean)

    if args.time_deepspeed:
        journal.write("deepspeed_save", **timed_save(engine, args.time_deepspeed))
    journal.write("end", step=engine.global_steps)
    dist.barrier()  # rank 0 may hold the rendezvous: nobody leaves before the others are done
    dist.destroy_process_group()


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with random weights; 4.8 M parameters unless the flags say otherwise."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=args.hidden,
            intermediate_size=args.hidden * 8 // 3,
            num_hidden_layers=args.blocks,
            num_attention_heads=args.hidden // 64,
            num_key_value_heads=args.hidden // 64,
            max_position_embeddings=args.length,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    )


def deepspeed_config(args: argparse.Namespace) -> dict[str, Any]:
    """ZeRO-3 in bf16, with PyTorch's own AdamW so that nothing is compiled."""
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": [0.9, 0.95], "torch_adam": True}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": args.steps,
                "warmup_num_steps": max(1, args.steps // 10),
                "cos_min_ratio": 0.05,
            },
        },
        "steps_per_print": 10**9,
    }


def mean_loss(loss: torch.Tensor) -> float:
    """The mean over ranks."""
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def tell_start(journal: Journal, ckpt: monitor.Checkpointer, first: int, model: Any) -> None:
    """Where this incarnation of the job begins, on what, and where it can be watched."""
    journal.write(
        "start",
        step=first,
        certificate=ckpt.certificate.as_json() if ckpt.certificate else None,
        layers=list(ckpt.layers),
        parameters=sum(parameter.ds_numel for parameter in model.parameters()),
        metrics_port=ckpt.metrics.port,
        incarnation=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="Driftpoint's settings, a YAML file")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps in all")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model, a multiple of 64")
    parser.add_argument("--blocks", type=int, default=6, help="number of transformer blocks")
    parser.add_argument("--length", type=int, default=128, help="tokens (bytes) in a window")
    parser.add_argument("--batch", type=int, default=2, help="windows in one rank's batch")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--journal", type=Path, help="append what happens to this file, as JSON lines")
    parser.add_argument("--time-deepspeed", type=Path, metavar="DIR", help="at the end, time DeepSpeed's own saves")
    return parser.parse_args()


if __name__ == "__main__":
    main()
