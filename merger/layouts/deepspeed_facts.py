"""What DeepSpeed's adapter noted about an engine: validated before anything is laid out from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from merger.checkpoint import Checkpoint
from store.errors import MergeError, UnsupportedError


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class PlacedParameter(_Facts):
    """A parameter in a param group's flat tensor: elements [offset, offset + numel)."""

    fqn: str
    offset: int = Field(ge=0)
    numel: int = Field(ge=0)


class GroupFacts(_Facts):
    """A param group at ZeRO-1/2: one flat tensor of ``flat_numel`` elements, cut into equal partitions.

    params: in the order of the param group. layout: in the order of the data. group_paddings: by rank, elements
    of its partition behind the last parameter.
    """

    params: tuple[str, ...]
    layout: tuple[PlacedParameter, ...] = ()
    flat_numel: int = 0
    partition_size: int = 0
    group_paddings: tuple[int, ...] = ()


class SubGroupFacts(_Facts):
    """A sub-group at ZeRO-3: the slices of its parameters behind one another, ``partition_numels`` long each."""

    params: tuple[str, ...]
    param_group: int = Field(ge=0)
    partition_numels: tuple[int, ...]
    flat_numel: int = Field(ge=0)


class EngineFacts(_Facts):
    """An engine. Fields as in the adapter's ``layout_facts``."""

    ds_version: str
    zero_stage: int = Field(ge=0, le=3)
    world_size: int = Field(ge=1)
    mp_world_size: int = 1
    dtype: str
    ds_config: Any
    zero_optimizer: str
    dynamic_loss_scale: bool
    clip_grad: float
    state_dict_names: tuple[str, ...]
    buffer_names: tuple[str, ...]
    param_groups: tuple[GroupFacts, ...]
    frozen: tuple[str, ...] = ()
    partition_count: int | tuple[int, ...] = 1
    round_robin_gradients: bool = False
    param_alignment_paddings: tuple[tuple[int, ...], ...] = ()
    sub_groups: tuple[SubGroupFacts, ...] = ()

    @property
    def optim_prefix(self) -> str:
        """Start of the names of optimizer files."""
        return "bf16_" if self.dtype == "bf16" else ""

    @property
    def is_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed wrapped the optimizer in its ``BF16_Optimizer``, whose files differ."""
        return self.zero_optimizer == "BF16_Optimizer"

    @property
    def has_layout(self) -> bool:
        """Whether the places of parameters were noted; without, they have to be computed."""
        if self.zero_stage == 3:
            return bool(self.sub_groups)
        return self.zero_stage == 0 or all(group.layout for group in self.param_groups)


def facts_of(checkpoint: Checkpoint) -> EngineFacts:
    """Of the engine that trained a checkpoint. UnsupportedError where no DeepSpeed engine did."""
    if checkpoint.framework != "deepspeed":
        raise UnsupportedError(
            f"{checkpoint.origin} is of a run without DeepSpeed, and nothing says how an engine would be configured; "
            "write layout 'torch', 'hf' or 'dcp', or resume the run's store under DeepSpeed and save it there"
        )
    return engine_facts(checkpoint.facts)


def engine_facts(facts: Mapping[str, Any]) -> EngineFacts:
    """The facts in a store. MergeError, naming what is missing, where they do not describe an engine."""
    try:
        return EngineFacts.model_validate(facts)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise MergeError(
            f"the store does not say how the DeepSpeed engine laid out its state: {where}: {first['msg']}; it was "
            "written by another release: merge it with that one"
        ) from error
