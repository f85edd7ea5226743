"""ZeRO stages 1 and 2: each param group is one flat tensor, cut into equal partitions, one per rank.

Also the wrapper ``BF16_Optimizer``, which DeepSpeed builds for stage 1 in bf16 with fp32 gradient
accumulation. A parameter's place is read off the memory that it views in the flat tensor, not from
DeepSpeed's parameter mappings: with ``round_robin_gradients`` those are in another order than the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from monitor.adapters.base import Piece
from monitor.adapters.deepspeed_zero import Flat, Placement, ZeroAdapter
from monitor.adapters.inventory import Names, whole
from store.errors import UnsupportedError
from store.names import FROZEN, WEIGHTS


class Zero12Adapter(ZeroAdapter):
    """Adapter of an engine at ZeRO stage 1 or 2."""

    def _flats(self) -> list[Flat]:
        """One per param group."""
        names = self._inventory.names()
        return [self._flat(index, names) for index in range(len(self._param_lists()))]

    def finish_load(self) -> None:
        """Working weights from the masters: each rank casts its partition, then all gather. Collective."""
        self._zero.update_lp_params()

    def _flat(self, index: int, names: Names) -> Flat:
        masters, working = self._masters()[index], self._working()[index]
        size = masters.numel()
        first = dist.get_rank(self._zero.real_dp_process_group[index]) * size
        placed = _in_memory_order(self._param_lists()[index], working, names)
        placements = []
        for fqn, offset, numel in placed:
            start, stop = max(offset, first), min(offset + numel, first + size)
            if start < stop:
                placements.append(Placement(fqn, start - offset, start - first, stop - start))
        return Flat(masters, index, tuple(fqn for fqn, _, _ in placed), tuple(placements))

    def _outside(self) -> tuple[list[Piece], list[Piece]]:
        inside = {id(parameter) for group in self._param_lists() for parameter in group}
        replicated = [
            whole(fqn, WEIGHTS if parameter.requires_grad else FROZEN, parameter)
            for fqn, parameter in self._inventory.parameters().items()
            if id(parameter) not in inside
        ]
        return replicated, []

    def _refuse_this_stage(self) -> None:
        self._need("real_dp_process_group", "update_lp_params", "partition_count")
        if self._is_bf16_optimizer():
            self._need("bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition")
        else:
            self._need("bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups")
        self.flats()

    def _stage_facts(self) -> dict[str, Any]:
        return {
            "partition_count": [int(count) for count in self._zero.partition_count],
            "nccl_start_alignment_factor": int(self._zero.nccl_start_alignment_factor),
            "round_robin_gradients": bool(getattr(self._zero, "round_robin_gradients", False)),
            "param_alignment_paddings": [
                [int(padding) for padding in group] for group in getattr(self._zero, "round_robin_bit16_padding", [])
            ],
            "param_groups": [self._group_facts(index) for index in range(len(self._param_lists()))],
        }

    def _group_facts(self, index: int) -> dict[str, Any]:
        names, working = self._inventory.names(), self._working()[index]
        params = self._param_lists()[index]
        placed = _in_memory_order(params, working, names)
        size, count = self._masters()[index].numel(), int(self._zero.partition_count[index])
        end = placed[-1][1] + placed[-1][2]
        return {
            "params": [names.of(parameter, "ZeRO") for parameter in params],
            "layout": [{"fqn": fqn, "offset": offset, "numel": numel} for fqn, offset, numel in placed],
            "flat_numel": working.numel(),
            "partition_size": size,
            # Elements behind the last parameter, on each rank.
            "group_paddings": [min(size, max(0, (rank + 1) * size - end)) for rank in range(count)],
        }

    def _is_bf16_optimizer(self) -> bool:
        return type(self._zero).__name__ == "BF16_Optimizer"

    def _param_lists(self) -> Sequence[Sequence[nn.Parameter]]:
        lists: Sequence[Sequence[nn.Parameter]] = (
            self._zero.bf16_groups if self._is_bf16_optimizer() else self._zero.bit16_groups
        )
        return lists

    def _working(self) -> Sequence[torch.Tensor]:
        flats: Sequence[torch.Tensor] = (
            self._zero.bf16_groups_flat if self._is_bf16_optimizer() else self._zero.bit16_groups_flat
        )
        return flats

    def _masters(self) -> Sequence[torch.Tensor]:
        name = "fp32_groups_flat_partition" if self._is_bf16_optimizer() else "single_partition_of_fp32_groups"
        partitions: Sequence[torch.Tensor] = getattr(self._zero, name)
        return partitions


def _in_memory_order(params: Sequence[nn.Parameter], flat: torch.Tensor, names: Names) -> list[tuple[str, int, int]]:
    """(fqn, offset in the flat tensor, numel) of each parameter, by offset. Raises UnsupportedError for a
    parameter that is not a view of the flat tensor (states moved off the device, for one)."""
    begin, width = flat.data_ptr(), flat.element_size()
    out = []
    for parameter in params:
        fqn = names.of(parameter, "ZeRO")
        offset, remainder = divmod(parameter.data_ptr() - begin, width)
        if remainder or not 0 <= offset <= flat.numel() - parameter.numel() or not parameter.is_contiguous():
            raise UnsupportedError(
                f"{fqn} does not lie in its group's flat tensor; if states were offloaded, call "
                "engine.reload_states() first"
            )
        out.append((fqn, offset, parameter.numel()))
    return sorted(out, key=lambda placed: placed[1])
