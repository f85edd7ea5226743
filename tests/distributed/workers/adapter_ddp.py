"""Under torchrun: DistributedDataParallel through its adapter, with DeepSpeed never imported."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from adapter_model import ACCUMULATION, CLIP, Tiny, batches, param_groups
from adapter_state import all_owned, leave, report, round_trip, same_losses, take, unequal
from torch.nn.parallel import DistributedDataParallel

from monitor.adapters import adapter_for
from monitor.adapters.base import Adapter

WIDE = 151
"""Wide enough that matrices are shared out in slices, with a last slice that is shorter."""


def build(seed: int, width: int = WIDE) -> tuple[Adapter, Callable[[range], list[float]]]:
    torch.manual_seed(seed)
    model = DistributedDataParallel(Tiny(width))
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 9)

    def train(steps: range) -> list[float]:
        # The scheduler is the user's to resume; here it is a function of the step.
        scheduler.last_epoch = steps.start
        losses = []
        for step in steps:
            for tokens in batches(step, dist.get_rank()):
                loss = model(tokens)
                (loss / ACCUMULATION).backward()
                losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return losses

    return adapter_for((model, optimizer)), train


def shares() -> None:
    """Every rank writes about as much; small tensors are not cut."""
    adapter, _ = build(0)
    mine = sum(piece.tensor.numel() for piece in adapter.owned())
    every: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    uneven = f"ranks write {every} elements" if max(every) > 1.1 * min(every) else ""
    cut = [str(p.fragment) for p in all_owned(adapter) if p.fragment.numel < 8192 and p.fragment.start]
    report("ddp", "shares", uneven, *cut)


def names() -> None:
    adapter, _ = build(0)
    prefixed = [name for name in adapter.tensors() if name.startswith("module.")]
    tied = adapter.tensors()["embed.weight"].aliases
    report("ddp", "names", *prefixed, *unequal(tied, ("head.weight",), "aliases"))


def to_the_start() -> None:
    adapter, train = build(0)
    untrained, rng = take(adapter), torch.get_rng_state()
    first = train(range(2))
    slots = {fqn: {slot: "F32"} for fqn, slot in untrained.tensors}
    adapter.prepare_load(slots)
    for piece in adapter.held():
        piece.tensor.copy_(untrained.tensors[piece.fragment.fqn, piece.fragment.slot])
    adapter.load_run_state(untrained.run_state)
    adapter.finish_load()
    torch.set_rng_state(rng)
    report("ddp", "to the start", *same_losses(first, train(range(2))))


def main() -> None:
    dist.init_process_group("gloo")
    round_trip("ddp", build)
    shares()
    names()
    to_the_start()
    report("ddp", "no deepspeed", *(["deepspeed was imported"] if "deepspeed" in sys.modules else []))
    leave()


if __name__ == "__main__":
    main()
