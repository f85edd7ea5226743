"""ZeRO stage 3: every parameter is cut into ceil(numel / world size) slices, one per rank; the slices of a
sub-group lie behind one another in one flat partition.

The last ranks hold padding, which is cut off here. Parameters outside the optimizer (frozen ones) have
their slice in ``param.ds_tensor``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from monitor.adapters.base import Piece
from monitor.adapters.deepspeed_zero import Flat, Placement, ZeroAdapter
from monitor.adapters.inventory import Names, slice_of, whole
from store.errors import UnsupportedError
from store.names import FROZEN, WEIGHTS, Fragment


class Zero3Adapter(ZeroAdapter):
    """Adapter of an engine at ZeRO stage 3."""

    def _flats(self) -> list[Flat]:
        """One per sub-group (several in a param group that ``sub_group_size`` splits)."""
        names = self._inventory.names()
        return [self._flat(index, names) for index in range(len(self._zero.fp16_groups))]

    def finish_load(self) -> None:
        """Working slices from the masters, then the small parameters that stay gathered. Collective.

        Everything gathered is let go first: it was gathered from what was there before the load.
        """
        self._zero.checkpoint_event_prologue()
        for index in range(len(self._zero.fp16_groups)):
            self._zero._reassign_or_swap_out_partitioned_parameters(index)
        self._zero.checkpoint_event_epilogue()

    def _flat(self, index: int, names: Names) -> Flat:
        placements, fqns, offset = [], [], 0
        for parameter in self._zero.fp16_groups[index]:
            fqn = names.of(parameter, f"sub-group {index} of ZeRO-3")
            start, numel = _own_slice(parameter)
            fqns.append(fqn)
            if numel:
                placements.append(Placement(fqn, start, offset, numel))
            offset += parameter.partition_numel()
        group = int(self._zero.sub_group_to_group_id[index])
        return Flat(self._zero.fp32_partitioned_groups_flat[index], group, tuple(fqns), tuple(placements))

    def _outside(self) -> tuple[list[Piece], list[Piece]]:
        inside = {id(parameter) for group in self._zero.fp16_groups for parameter in group}
        sliced: list[Piece] = []
        parameter: Any
        for fqn, parameter in self._inventory.parameters().items():
            start, numel = _own_slice(parameter)
            if id(parameter) not in inside and numel:
                slot = WEIGHTS if parameter.requires_grad else FROZEN
                piece = slice_of(whole(fqn, slot, parameter.ds_tensor), 0, numel)
                sliced.append(Piece(Fragment(fqn, slot, start, numel), piece.tensor))
        return [], sliced

    def _refuse_this_stage(self) -> None:
        self._need("fp16_groups", "fp32_partitioned_groups_flat", "sub_group_to_group_id", "checkpoint_event_prologue")
        zero = self._zero
        if getattr(zero, "swap_optimizer", False) or getattr(zero, "params_in_nvme_and_cpu", False):
            raise UnsupportedError("ZeRO-3 with offload to NVMe is not handled; offload to the CPU, or not at all")
        if getattr(zero, "offload_optimizer", False) and getattr(zero, "partial_offload", 1.0) != 1.0:
            raise UnsupportedError("partial optimizer offload (ratio below 1) is not handled; set its ratio to 1.0")
        if getattr(zero, "use_muon", False):
            raise UnsupportedError("Muon at ZeRO stage 3 is not handled; use stage 1 or 2")
        for fqn, parameter in self._inventory.parameters().items():
            self._refuse_parameter(fqn, parameter)

    def _refuse_parameter(self, fqn: str, parameter: Any) -> None:
        if not hasattr(parameter, "ds_tensor"):
            raise UnsupportedError(f"{fqn} is not partitioned by ZeRO-3; was it added after the engine was built?")
        if dist.get_world_size(parameter.ds_process_group) != self._world_size:
            raise UnsupportedError(f"{fqn} is partitioned over a part of the ranks (MiCS or AutoEP): not handled")
        if hasattr(parameter.ds_tensor, "ds_quant_scale"):
            raise UnsupportedError(f"{fqn} is quantized; set zero_quantized_nontrainable_weights to false")

    def _stage_facts(self) -> dict[str, Any]:
        return {
            "partition_count": int(self._zero.partition_count),
            "param_groups": [{"params": fqns} for fqns, _ in self._groups()],
            "sub_groups": [dict(facts) for facts in self._sub_group_facts()],
        }

    def _sub_group_facts(self) -> Iterator[dict[str, Any]]:
        for flat, params in zip(self.flats(), self._zero.fp16_groups, strict=True):
            slices = [int(parameter.partition_numel()) for parameter in params]
            yield {
                "params": list(flat.fqns),
                "param_group": flat.group,
                "partition_numels": slices,
                "flat_numel": sum(slices),
            }


def _own_slice(parameter: Any) -> tuple[int, int]:
    """(start, numel) of this rank's slice of a partitioned parameter, without padding."""
    part, total = int(parameter.partition_numel()), int(parameter.ds_numel)
    start = min(dist.get_rank(parameter.ds_process_group) * part, total)
    return start, min(part, total - start)
