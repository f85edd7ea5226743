"""Adapt DeepSpeed engines, by ZeRO stage: 0 (no sharding), 1 and 2, 3."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import astuple
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from monitor.adapters import deepspeed_base
from monitor.adapters.base import Adapter, Gradient, Groups, Piece
from monitor.adapters.hyperparameters import describe_group, restore_groups
from monitor.adapters.module_tensors import ModuleTensors, ParameterNames, slice_piece, whole_piece
from monitor.adapters.pytorch import PyTorchAdapter
from store.errors import UnsupportedError
from store.names import FROZEN, GRADIENT, WEIGHTS, Fragment
from store.schema import as_json


def engine_adapter(engine: Any) -> Adapter:
    """Return the adapter for an engine's ZeRO stage. Raise UnsupportedError for unsupported engines."""
    kinds = {base.__name__ for base in type(engine).__mro__}
    if "DeepSpeedHybridEngine" in kinds:
        raise UnsupportedError("DeepSpeedHybridEngine is not supported; use deepspeed.initialize on a plain module")
    if engine.optimizer is None or type(engine.optimizer).__name__ == "DummyOptim":
        raise UnsupportedError("the DeepSpeed engine has no optimizer; pass one to deepspeed.initialize")
    stage, kind = int(engine.zero_optimization_stage()), type(engine.optimizer).__name__
    stages = "PipelineEngine" in kinds
    if stages and engine.optimizer is not engine.basic_optimizer:
        raise UnsupportedError(
            f"PipelineEngine with {kind} is not supported, since that cuts the parameters of each stage; use ZeRO "
            "stage 0 in fp32, or torch.distributed.pipelining with fully_shard"
        )
    _check_parallelism(engine, int(engine.grid.pipe_parallel_size) if stages else 1)
    if kind in {"DeepSpeedZeroOptimizer", "BF16_Optimizer"}:
        return Zero12Adapter(engine)
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        return Zero3Adapter(engine)
    if stage == 0 and engine.optimizer is engine.basic_optimizer:
        return PipelineAdapter(engine) if stages else Stage0Adapter(engine)
    raise UnsupportedError(
        f"DeepSpeed's {kind} at ZeRO stage {stage} is not supported; use stage 1, 2 or 3 (or stage 0 in fp32)"
    )


def _check_parallelism(engine: Any, stages: int) -> None:
    if getattr(engine, "has_moe_layers", False):
        raise UnsupportedError("DeepSpeed MoE (expert parallelism) is not supported; use a dense model")
    group = getattr(engine.optimizer, "dp_process_group", engine.data_parallel_group)
    size, world_size = dist.get_world_size(group), dist.get_world_size()
    if (size * stages, int(engine.mp_world_size)) != (world_size, stages):
        raise UnsupportedError(
            f"DeepSpeed is data parallel over {size} of {world_size} ranks: tensor, pipeline or other model "
            "parallelism is not supported, since its parameters do not tell which part of the whole a rank has; use "
            "data parallelism over all ranks, or DTensors (parallelize_module, fully_shard)"
        )
    if getattr(engine.optimizer, "zenflow", False):
        raise UnsupportedError("ZenFlow is not supported; remove zero_optimization.zenflow")


def engine_facts(adapter: "Stage0Adapter | deepspeed_base.ZeroAdapter") -> dict[str, Any]:
    """Return the JSON values that a writer of DeepSpeed's own files needs from an engine of any stage."""
    engine, inventory, optimizer = adapter.engine, adapter._inventory, adapter.engine.optimizer
    return {
        "framework": "deepspeed",
        "ds_version": str(deepspeed.__version__),
        "zero_stage": int(engine.zero_optimization_stage()),
        "world_size": dist.get_world_size(),
        "mp_world_size": int(engine.mp_world_size),
        "dtype": "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32",
        "ds_config": as_json(engine._config._param_dict),
        "zero_optimizer": type(optimizer).__name__,
        "optimizer": type(engine.basic_optimizer).__name__,
        "loss_scaler": deepspeed_base.scaler_state(optimizer),
        "dynamic_loss_scale": bool(getattr(optimizer, "dynamic_loss_scale", False)),
        "clip_grad": float(getattr(optimizer, "clip_grad", 0.0)),
        "elastic_checkpoint": bool(getattr(optimizer, "elastic_checkpoint", False)),
        **adapter._keep("names in files", lambda: {
            "state_dict_names": inventory.state_dict_names(),
            # As in DeepSpeed: all parameters that its optimizer wrappers leave out, those without elements too.
            "frozen": [
                fqn
                for fqn, parameter in inventory.parameters().items()
                if not parameter.requires_grad or not getattr(parameter, "ds_numel", parameter.numel())
            ],
            "buffer_names": list(engine._get_buffer_names()),
            "shared_params": {alias: fqn for fqn, names in inventory.aliases().items() for alias in names},
        }),
    }  # fmt: skip


class Stage0Adapter(deepspeed_base.EngineAdapter, PyTorchAdapter):
    """Adapter of an engine without ZeRO, in fp32: replicas, with DeepSpeed's counters and scheduler."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        super().__init__(engine.module, engine.optimizer, engine.data_parallel_group)

    def _collect_tensors(self, module: nn.Module) -> ModuleTensors:
        return ModuleTensors(module)  # with the names that DeepSpeed's own files use

    def check_attached(self) -> None:
        deepspeed_base.require_same_engine(self.engine, self.module, self.optimizer)
        super().check_attached()

    def capture_run_state(self) -> Callable[[], dict[str, Any]]:
        captured, own = super().capture_run_state(), deepspeed_base.engine_state(self.engine)
        return lambda: {**captured(), **own}

    def check_run_state(self, state: Mapping[str, Any]) -> None:
        super().check_run_state(state)
        deepspeed_base.check_engine_state(self.engine, state)

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        super().load_run_state(state)
        deepspeed_base.load_engine_state(self.engine, state)

    def layout_facts(self) -> dict[str, Any]:
        return {**super().layout_facts(), **engine_facts(self)}


class PipelineAdapter(Stage0Adapter):
    """Adapter of an engine of a ``PipelineModule``. As no rank has the whole model, its facts are those of PyTorch."""

    framework = "torch"

    def layout_facts(self) -> dict[str, Any]:
        return PyTorchAdapter.layout_facts(self)


class _JournalAdapter(deepspeed_base.ZeroAdapter):
    """Reads and repeats, for the journal, the steps of the optimizer that ZeRO wraps, on its flat partitions."""

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [self._base_optimizer]

    def step_inputs(self, number: int) -> tuple[list[dict[str, Any]], list[Piece], torch.Tensor | float]:
        # Within a step the base optimizer has only the param groups, or the parameters, that are updated now.
        flats, groups, pieces = {id(flat.tensor): flat for flat in self._listed}, [], list[Piece]()
        for group in self._base_optimizer.param_groups:
            found = [flats[id(one)] for one in group["params"]]
            groups += [describe_group((fqn for flat in found for fqn in flat.fqns), group)] if found else []
            pieces += (piece for flat in found for piece in _pieces(flat, flat.tensor.grad))
        return groups, pieces, self._factor()

    def _factor(self) -> torch.Tensor | float:
        """Return the factor of ``unscale_and_clip_grads``, computed in the same types to be equal to the last bit.

        Does not copy a number from a device to the host, because training would wait for that."""
        scale, clip, norm = (getattr(self._zero, one, 0.0) for one in ("loss_scale", "clip_grad", "_global_grad_norm"))
        scale = scale or 1.0  # a wrapper without loss scale has 0.0 here
        if clip and isinstance(norm, torch.Tensor):
            scale = torch.clamp((norm + 1e-6) / clip, min=1.0) * scale
        return 1.0 / scale

    def new_gradients(self, number: int) -> list[Gradient]:
        made = [(flat, torch.zeros_like(flat.tensor)) for flat in self.flats()]
        return [Gradient(flat.tensor, memory, _pieces(flat, memory)) for flat, memory in made]

    def repeat_step(self, number: int, groups: Groups, fqns: Set[str], gradients: Sequence[Gradient]) -> None:
        restore_groups(groups, self._groups())
        before = [one.owner.grad for one in gradients]
        for one in gradients:
            one.owner.grad = one.memory
        self._step_base_optimizer()
        for one, gradient in zip(gradients, before, strict=True):
            one.owner.grad = gradient

    def _step_base_optimizer(self) -> None:
        self._base_optimizer.step()


def _pieces(flat: deepspeed_base.FlatPartition, gradient: torch.Tensor | None) -> list[Piece]:
    return [
        Piece(Fragment(fqn, GRADIENT, start, numel), gradient.narrow(0, offset, numel))
        for fqn, start, offset, numel in map(astuple, flat.placements)
        if gradient is not None
    ]


class Zero12Adapter(_JournalAdapter):
    """Adapter of an engine at ZeRO stage 1 or 2, also with DeepSpeed's wrapper ``BF16_Optimizer``.

    Each param group is one flat tensor, cut into equal partitions, one per rank. A parameter's offset is derived from
    the address of its view in the flat tensor, not from DeepSpeed's parameter mappings: with ``round_robin_gradients``
    those are in another order than the data."""

    def _flats(self) -> list[deepspeed_base.FlatPartition]:
        names = self._inventory.names()
        return [self._flat(index, names) for index in range(len(self._lists()))]

    def _masters(self) -> Sequence[torch.Tensor]:
        return [masters for _, _, masters in self._lists()]

    def _located(self) -> Sequence[torch.Tensor]:
        return [tensor for _, working, masters in self._lists() for tensor in (working, masters)]

    def finish_load(self) -> None:
        self._zero.update_lp_params()  # each rank casts its partition of the masters, then all gather

    def _flat(self, index: int, names: ParameterNames) -> deepspeed_base.FlatPartition:
        params, working, masters = self._lists()[index]
        size = masters.numel()
        first = dist.get_rank(self._zero.real_dp_process_group[index]) * size
        placed = _in_memory_order(params, working, names)
        placements = []
        for fqn, offset, numel in placed:
            start, stop = max(offset, first), min(offset + numel, first + size)
            if start < stop:
                placements.append(deepspeed_base.Placement(fqn, start - offset, start - first, stop - start))
        return deepspeed_base.FlatPartition(masters, index, tuple(fqn for fqn, _, _ in placed), tuple(placements))

    def _unpartitioned(self) -> tuple[list[Piece], list[Piece]]:
        inside = {id(parameter) for group, _, _ in self._lists() for parameter in group}
        replicated = [
            whole_piece(fqn, WEIGHTS if parameter.requires_grad else FROZEN, parameter)
            for fqn, parameter in self._inventory.parameters().items()
            if id(parameter) not in inside
        ]
        return replicated, []

    def _check_supported(self) -> None:
        self._require_attributes("real_dp_process_group", "update_lp_params", "partition_count", *self._attributes())
        self.flats()

    def _facts(self) -> dict[str, Any]:
        return {
            **engine_facts(self),
            "partition_count": [int(count) for count in self._zero.partition_count],
            "nccl_start_alignment_factor": int(self._zero.nccl_start_alignment_factor),
            "round_robin_gradients": bool(getattr(self._zero, "round_robin_gradients", False)),
            "param_alignment_paddings": [
                [int(padding) for padding in group] for group in getattr(self._zero, "round_robin_bit16_padding", [])
            ],
            "param_groups": self._keep("group facts", self._group_facts),
        }

    def _group_facts(self) -> list[dict[str, Any]]:
        names, facts = self._inventory.names(), list[dict[str, Any]]()
        for (params, working, masters), count in zip(self._lists(), self._zero.partition_count, strict=True):
            placed, size = _in_memory_order(params, working, names), masters.numel()
            facts.append({
                "params": [names.of(parameter, "ZeRO") for parameter in params],
                "layout": [{"fqn": fqn, "offset": offset, "numel": numel} for fqn, offset, numel in placed],
                "flat_numel": working.numel(),
                "partition_size": size,
                # Elements behind the last parameter, on each rank.
                "group_paddings": [min(size, max(0, n * size - sum(placed[-1][1:]))) for n in range(1, int(count) + 1)],
            })  # fmt: skip
        return facts

    def _attributes(self) -> tuple[str, str, str]:
        """Return the names of the lists of parameters, flat working weights and master partitions."""
        if type(self._zero).__name__ == "BF16_Optimizer":
            return "bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition"
        return "bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups"

    def _lists(self) -> list[tuple[Sequence[nn.Parameter], torch.Tensor, torch.Tensor]]:
        """Return the parameters, flat working weights and master partition of each param group."""
        params, working, masters = (getattr(self._zero, name) for name in self._attributes())
        return list(zip(params, working, masters, strict=True))


def _in_memory_order(
    params: Sequence[nn.Parameter], flat: torch.Tensor, names: ParameterNames
) -> list[tuple[str, int, int]]:
    """Return (fqn, offset in the flat tensor, numel) of each parameter, by offset.

    Raise UnsupportedError for a parameter that is not a view of the flat tensor (offloaded states, for example)."""
    begin, width = flat.data_ptr(), flat.element_size()
    out = []
    for parameter in params:
        fqn = names.of(parameter, "ZeRO")
        offset, remainder = divmod(parameter.data_ptr() - begin, width)
        if remainder or not 0 <= offset <= flat.numel() - parameter.numel() or not parameter.is_contiguous():
            raise UnsupportedError(
                f"{fqn} is not a view of its group's flat tensor; if states were offloaded, call "
                "engine.reload_states() first"
            )
        out.append((fqn, offset, parameter.numel()))
    return sorted(out, key=lambda placed: placed[1])


class Zero3Adapter(_JournalAdapter):
    """Adapter of an engine at ZeRO stage 3.

    Every parameter is cut into ceil(numel / world size) slices, one per rank; the slices of a sub-group are consecutive
    in one flat partition. The padding on the last ranks is cut off. Parameters that are not in the optimizer (frozen
    ones) have their slice in ``param.ds_tensor``."""

    def _flats(self) -> list[deepspeed_base.FlatPartition]:
        names = self._inventory.names()
        return [self._flat(index, names) for index in range(len(self._zero.fp16_groups))]

    def _masters(self) -> Sequence[torch.Tensor]:
        return list(self._zero.fp32_partitioned_groups_flat)

    memory_of = staticmethod(lambda tensor: getattr(tensor, "ds_tensor", tensor))  # one gathered each step moves

    def finish_load(self) -> None:
        # Release gathered parameters, whose values are from before the load; cast the working slices from the masters;
        # then gather the small parameters that persist.
        self._zero.checkpoint_event_prologue()
        for index in range(len(self._zero.fp16_groups)):
            self._zero._reassign_or_swap_out_partitioned_parameters(index)
        self._zero.checkpoint_event_epilogue()

    def _step_base_optimizer(self) -> None:
        # As ZeRO-3 does: sub-group by sub-group. Between steps the param groups are empty.
        for flat in self.flats():
            group = self._base_optimizer.param_groups[flat.group]
            group["params"] = [flat.tensor]
            self._base_optimizer.step()
            group["params"] = []

    def _flat(self, index: int, names: ParameterNames) -> deepspeed_base.FlatPartition:
        placements, fqns, offset = [], [], 0
        for parameter in self._zero.fp16_groups[index]:
            fqn = names.of(parameter, f"sub-group {index} of ZeRO-3")
            start, numel = _local_slice(parameter)
            fqns.append(fqn)
            if numel:
                placements.append(deepspeed_base.Placement(fqn, start, offset, numel))
            offset += parameter.partition_numel()
        group = int(self._zero.sub_group_to_group_id[index])
        masters = self._zero.fp32_partitioned_groups_flat[index]
        return deepspeed_base.FlatPartition(masters, group, tuple(fqns), tuple(placements))

    def _unpartitioned(self) -> tuple[list[Piece], list[Piece]]:
        inside = {id(parameter) for group in self._zero.fp16_groups for parameter in group}
        sliced: list[Piece] = []
        parameter: Any
        for fqn, parameter in self._inventory.parameters().items():
            start, numel = _local_slice(parameter)
            if id(parameter) not in inside and numel:
                slot = WEIGHTS if parameter.requires_grad else FROZEN
                (piece,) = slice_piece(whole_piece(fqn, slot, parameter.ds_tensor), 0, numel)
                sliced.append(Piece(Fragment(fqn, slot, start, numel), piece.tensor))
        return [], sliced

    def _check_supported(self) -> None:
        self._require_attributes(
            "fp16_groups", "fp32_partitioned_groups_flat", "sub_group_to_group_id", "checkpoint_event_prologue"
        )
        zero = self._zero
        if getattr(zero, "swap_optimizer", False) or getattr(zero, "params_in_nvme_and_cpu", False):
            raise UnsupportedError("ZeRO-3 with offload to NVMe is not supported; offload to the CPU, or not at all")
        if getattr(zero, "offload_optimizer", False) and getattr(zero, "partial_offload", 1.0) != 1.0:
            raise UnsupportedError("partial optimizer offload (ratio below 1) is not supported; set its ratio to 1.0")
        if getattr(zero, "use_muon", False):
            raise UnsupportedError("Muon at ZeRO stage 3 is not supported; use stage 1 or 2")
        parameter: Any
        for fqn, parameter in self._inventory.parameters().items():
            if not hasattr(parameter, "ds_tensor"):
                raise UnsupportedError(f"{fqn} is not partitioned by ZeRO-3: add it before deepspeed.initialize")
            if dist.get_world_size(parameter.ds_process_group) != self._world_size:
                raise UnsupportedError(
                    f"{fqn} is partitioned over some of the ranks (MiCS or AutoEP), which is not supported: turn it off"
                )
            if hasattr(parameter.ds_tensor, "ds_quant_scale"):
                raise UnsupportedError(f"{fqn} is quantized; set zero_quantized_nontrainable_weights to false")

    def _facts(self) -> dict[str, Any]:
        return {
            **engine_facts(self),
            "partition_count": int(self._zero.partition_count),
            "param_groups": [{"params": fqns} for fqns, _ in self._groups()],
            "sub_groups": self._keep("sub-groups", lambda: [
                {
                    "params": list(flat.fqns),
                    "param_group": flat.group,
                    "partition_numels": (slices := [int(parameter.partition_numel()) for parameter in params]),
                    "flat_numel": sum(slices),
                }
                for flat, params in zip(self.flats(), self._zero.fp16_groups, strict=True)
            ]),
        }  # fmt: skip


def _local_slice(parameter: Any) -> tuple[int, int]:
    """Return (start, numel) of this rank's slice of a partitioned parameter, without padding."""
    part, total = int(parameter.partition_numel()), int(parameter.ds_numel)
    start = min(dist.get_rank(parameter.ds_process_group) * part, total)
    return start, min(part, total - start)
