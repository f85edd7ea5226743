"""DeepSpeed engines: choosing the adapter of a ZeRO stage, and stage 0, which shards nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from monitor.adapters.base import Adapter, Trail
from monitor.adapters.deepspeed_engine import (
    check_engine_state,
    engine_facts,
    engine_objects,
    engine_state,
    load_engine_state,
    require_same_engine,
)
from monitor.adapters.inventory import Inventory
from monitor.adapters.plain import PlainAdapter
from store.errors import UnsupportedError


def engine_adapter(engine: Any) -> Adapter:
    """The adapter for an engine's ZeRO stage. Raises UnsupportedError, naming it, for what is not handled."""
    for base in type(engine).__mro__:
        if base.__name__ in {"PipelineEngine", "DeepSpeedHybridEngine"}:
            raise UnsupportedError(f"{base.__name__} is not handled yet; use deepspeed.initialize on a plain module")
    if engine.optimizer is None or type(engine.optimizer).__name__ == "DummyOptim":
        raise UnsupportedError("the DeepSpeed engine has no optimizer, so there is nothing to checkpoint; give it one")
    _refuse_model_parallelism(engine)
    stage, kind = int(engine.zero_optimization_stage()), type(engine.optimizer).__name__
    if kind in {"DeepSpeedZeroOptimizer", "BF16_Optimizer"}:
        from monitor.adapters.deepspeed_zero12 import Zero12Adapter

        return Zero12Adapter(engine)
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        from monitor.adapters.deepspeed_zero3 import Zero3Adapter

        return Zero3Adapter(engine)
    if stage == 0 and engine.optimizer is engine.basic_optimizer:
        return Stage0Adapter(engine)
    raise UnsupportedError(
        f"DeepSpeed's {kind} at ZeRO stage {stage} is not handled; use stage 1, 2 or 3 (or stage 0 in fp32)"
    )


def _refuse_model_parallelism(engine: Any) -> None:
    if getattr(engine, "has_moe_layers", False):
        raise UnsupportedError("DeepSpeed MoE (expert parallelism) is not handled yet; use a dense model")
    group = getattr(engine.optimizer, "dp_process_group", engine.data_parallel_group)
    size, world_size = dist.get_world_size(group), dist.get_world_size()
    if size != world_size or int(engine.mp_world_size) != 1:
        raise UnsupportedError(
            f"DeepSpeed is data parallel over {size} of {world_size} ranks: tensor, pipeline or other model "
            "parallelism is not handled yet; use data parallelism over all ranks"
        )
    if getattr(engine.optimizer, "zenflow", False):
        raise UnsupportedError("ZenFlow is not handled; remove zero_optimization.zenflow")


class Stage0Adapter(PlainAdapter):
    """An engine without ZeRO, in fp32: replicas, with DeepSpeed's counters and scheduler."""

    framework = "deepspeed"

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        super().__init__(engine.module, engine.optimizer, engine.data_parallel_group)

    def _take_inventory(self, module: nn.Module) -> Inventory:
        return Inventory(module)  # by the names that DeepSpeed's own files have

    def completed_steps(self) -> int | None:
        """Steps at accumulation boundaries."""
        return int(self.engine.global_steps)

    def check_attached(self) -> None:
        """See :class:`monitor.adapters.base.Adapter`."""
        require_same_engine(self.engine, self.module, self.optimizer)
        super().check_attached()

    def trail(self) -> Trail | None:
        """None: the engine says which optimizer it has."""
        return None

    def run_state(self) -> dict[str, Any]:
        """See :class:`monitor.adapters.base.Adapter`."""
        return {**super().run_state(), **engine_state(self.engine)}

    def objects(self) -> Mapping[str, Any]:
        """See :class:`monitor.adapters.base.Adapter`."""
        return engine_objects(self.engine)

    def check_run_state(self, state: Mapping[str, Any]) -> None:
        """See :class:`monitor.adapters.base.Adapter`."""
        super().check_run_state(state)
        check_engine_state(self.engine, state)

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """See :class:`monitor.adapters.base.Adapter`."""
        super().load_run_state(state)
        load_engine_state(self.engine, state)

    def layout_facts(self) -> dict[str, Any]:
        """See :class:`monitor.adapters.base.Adapter`."""
        return {**super().layout_facts(), **engine_facts(self.engine, self._inventory)}
