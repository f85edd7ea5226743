"""Trains a small character model with FSDP2 (``fully_shard``) and resumes by itself, at any number of ranks.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py

Kill it whenever you like and give the line again, with another ``--nproc-per-node`` if you want: it goes on from the
newest commit in ``./driftpoint-checkpoints``. It needs nothing but torch and driftpoint; with CUDA it uses it.
What Driftpoint asks of a training script are the three lines marked ``<-``; the rest is any FSDP2 script.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import monitor

BATCH, LENGTH, WIDTH, BLOCKS = 12, 64, 96, 4
TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes()))


class Model(nn.Module):
    """The loss of predicting each byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(BLOCKS)]
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, tokens.device)
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, src_mask=mask.to(x.dtype), is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


def batch(step: int) -> torch.Tensor:
    """This rank's part of a step's batch, which is the same at any number of ranks that divides it."""
    starts = torch.randint(len(TEXT) - LENGTH - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    mine = starts[dist.get_rank() :: dist.get_world_size()].tolist()
    return torch.stack([TEXT[start : start + LENGTH + 1] for start in mine])


def main() -> None:
    args = arguments()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.ERROR, format="%(message)s")

    torch.manual_seed(args.seed)
    model = Model().to("cuda" if cuda else "cpu")
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if cuda else None, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after fully_shard, which replaces the parameters
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)

    with monitor.attach((model, optimizer), args.config or SETTINGS, state=[scheduler]) as ckpt:  # <-
        for step in range(ckpt.resume(), args.steps):  # <- 0, or the step that the newest commit is of
            loss = model(batch(step).to("cuda" if cuda else "cpu"))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            ckpt.step()  # <- measure, decide, begin a save; never waits for the disk
            dist.all_reduce(loss)
            logging.info("step %d: loss %.6f", step + 1, loss.item() / dist.get_world_size())
    dist.destroy_process_group()


SETTINGS = {"store": "./driftpoint-checkpoints", "every": 10, "policy": "full"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first weights")
    parser.add_argument("--config", help="a YAML file in place of what is set here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
