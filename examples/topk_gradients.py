"""Send only the largest gradients of each rank (top-k sparsification with error feedback), as a hook of DDP.

Copy this file beside your training script::

    model = DistributedDataParallel(model)
    topk = TopK(model, share=0.01)
    model.register_comm_hook(topk, reduce_topk)
    ckpt = monitor.attach((model, optimizer), {"journal": {"enabled": True}}, state={"topk": topk})

What a rank does not send it adds to its next gradient, as in Deep Gradient Compression (Lin et al., arXiv:1712.01887).
These remainders are state: with ``state=`` a resume brings them back on each rank. They are dense, so the journal then
records four bytes a parameter for them at each step. Without ``state=`` records are small, weights and optimizer come
back exactly, and the remainders begin at zero. With gradient accumulation, use ``no_sync()`` for all but the last
micro-batch.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class TopK:
    """State of :func:`reduce_topk`: what this rank has not sent yet, by the name of the parameter."""

    def __init__(self, model: nn.Module, share: float = 0.01) -> None:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share={share}: give the share of elements to send, above 0 and at most 1")
        self.share = share
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.remainders = {name: torch.zeros_like(one).flatten() for name, one in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"remainders": dict(self.remainders)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, remainder in self.remainders.items():
            remainder.copy_(state["remainders"][name])


def reduce_topk(state: TopK, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replace the gradients of a bucket by the mean over ranks of what each of them sends."""
    with torch.no_grad():
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            remainder = state.remainders[state.names[parameter]]
            if not remainder.numel():
                continue
            remainder += gradient.flatten()
            places = remainder.abs().topk(max(1, int(state.share * remainder.numel()))).indices
            values = remainder[places]
            remainder[places] = 0.0
            total = torch.zeros_like(remainder)
            for where, what in zip(_gathered(places), _gathered(values), strict=True):
                total[where] += what / dist.get_world_size()  # rank by rank: all at once, a GPU adds in any order
            gradient.copy_(total.view_as(gradient))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found
