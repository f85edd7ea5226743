"""Validate the DeepSpeed adapter's facts about an engine, and fit its configuration to another stage and world size.

The configuration in the files is a record: ``engine.load_checkpoint`` does not read it, and the loading engine has its
own. It is still kept valid for the new stage and world size."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from merger.checkpoint import Checkpoint, config_section
from store.errors import MergeError, UnsupportedError

T = TypeVar("T")
BF16_OPTIMIZER, ZERO_12, ZERO_3 = "BF16_Optimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"
_FP32 = ("fp32", "float32", "float", "torch.float32")  # names of float32 in DeepSpeed's configuration
TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"

_NOT_AT_STAGE: Mapping[int, tuple[str, ...]] = {
    1: ("offload_param", "compute_grad_norm"),
    2: ("offload_param",),
    3: ("elastic_checkpoint", "compute_grad_norm"),
}
"""Options of ``zero_optimization`` that DeepSpeed refuses or ignores at a stage."""


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened parameter, which begin at element ``offset`` of a flat partition."""

    fqn: str
    start: int
    stop: int
    offset: int


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class PlacedParameter(_Facts):
    """A parameter in a param group's flat tensor: elements [offset, offset + numel)."""

    fqn: str
    offset: int = Field(ge=0)
    numel: int = Field(ge=0)


class GroupFacts(_Facts):
    """A param group at ZeRO-1/2: one flat tensor, cut into equal partitions of ``partition_size`` elements."""

    params: tuple[str, ...]  # in the order of the param group
    layout: tuple[PlacedParameter, ...] = ()  # in the order of the data
    partition_size: int = 0
    group_paddings: tuple[int, ...] = ()  # elements of each rank's partition behind the last parameter

    def pieces(self, rank: int) -> list[Piece]:
        """Return the pieces of parameters in a rank's partition, in the order of the data."""
        return self._cut(((one.fqn, one.offset, one.numel) for one in self.layout), rank)

    def mapped_pieces(self, rank: int, gaps: Iterable[int], *, round_robin: bool) -> list[Piece]:
        """Return the pieces as DeepSpeed writes them into ``param_slice_mappings``, in the order of the param group.

        With ``round_robin_gradients`` and no gaps these are not the offsets of the data: DeepSpeed computes them as if
        the data were in the group's order. Native loading does not use them. ``gaps``: elements that
        ``parameter_alignment`` leaves behind each parameter."""
        placed = {one.fqn: (one.fqn, one.offset, one.numel) for one in self.layout}
        if not round_robin or any(gaps):
            return self._cut((placed[fqn] for fqn in self.params), rank)
        numels = [placed[fqn][2] for fqn in self.params]
        return self._cut(zip(self.params, accumulate(numels, initial=0), numels, strict=False), rank)

    def _cut(self, placed: Iterable[tuple[str, int, int]], rank: int) -> list[Piece]:
        first, end = rank * self.partition_size, (rank + 1) * self.partition_size
        cut = ((fqn, at, max(at, first), min(at + numel, end)) for fqn, at, numel in placed)
        return [Piece(fqn, start - at, stop - at, start - first) for fqn, at, start, stop in cut if start < stop]


class SubGroupFacts(_Facts):
    """A sub-group at ZeRO-3: the slices of its parameters in a row, ``partition_numels`` long each."""

    params: tuple[str, ...]
    param_group: int = Field(ge=0)
    partition_numels: tuple[int, ...]


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
    buffer_names: tuple[str, ...]
    param_groups: tuple[GroupFacts, ...]
    frozen: tuple[str, ...] = ()
    partition_count: int | tuple[int, ...] = 1
    round_robin_gradients: bool = False
    param_alignment_paddings: tuple[tuple[int, ...], ...] = ()
    sub_groups: tuple[SubGroupFacts, ...] = ()

    @property
    def is_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed wrapped the optimizer in ``BF16_Optimizer``, whose files differ."""
        return self.zero_optimizer == BF16_OPTIMIZER

    @property
    def has_layout(self) -> bool:
        """Whether the places of parameters were recorded; otherwise they are computed."""
        if self.zero_stage == 3:
            return bool(self.sub_groups)
        return self.zero_stage == 0 or all(group.layout for group in self.param_groups)


def facts_of(checkpoint: Checkpoint) -> EngineFacts:
    """Return the facts of the engine that trained a checkpoint. UnsupportedError if there was none."""
    if checkpoint.framework != "deepspeed":
        raise UnsupportedError(
            f"{checkpoint.origin} is of a run without DeepSpeed, so the engine's configuration is unknown; write "
            "layout 'universal', which an engine of any configuration loads, or 'torch', 'hf' or 'dcp'"
        )
    return engine_facts(checkpoint.facts)


def engine_facts(facts: Mapping[str, Any]) -> EngineFacts:
    """Validate the facts in a store. MergeError names the first missing or invalid one."""
    try:
        return EngineFacts.model_validate(facts)
    except ValidationError as error:
        first = error.errors()[0]
        raise MergeError(
            "the layout facts of the DeepSpeed engine are invalid: "
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}; another release wrote them: merge with that release"
        ) from error


@dataclass(frozen=True)
class Batch:
    """Samples per optimizer step (``train``), per rank and micro-step (``micro``), and micro-steps per step."""

    train: int
    micro: int
    accumulation: int


def batch_of(config: Any, world_size: int) -> Batch | None:
    """Return the batch as DeepSpeed computes it for a world size; None if the configuration does not determine it.

    The rules are those of ``DeepSpeedConfig._set_batch_related_parameters``."""
    values = [config_section(config).get(key) for key in (TRAIN, MICRO, ACCUMULATION)]
    if any(value is not None and (not isinstance(value, int) or value < 1) for value in values):
        return None  # "auto", which the caller of DeepSpeed fills in
    train, micro, accumulation = values
    if micro is None:
        if train is None:
            return None
        micro = train // world_size // (accumulation or 1)
    elif accumulation is None and train is not None:
        accumulation = train // micro // world_size
    accumulation = accumulation or 1
    return Batch(train or micro * accumulation * world_size, micro, accumulation)


def config_for(config: Any, source: tuple[int, int], target: tuple[int, int]) -> Any:
    """Return the configuration for another (ZeRO stage, world size); unchanged if both are the same.

    The samples per step stay the same if the configuration has them and the ranks divide them: by another number of
    micro-steps, or else by another micro-batch. Otherwise they change."""
    if not isinstance(config, Mapping) or source == target:
        return config
    out = dict(config)
    if source[0] != target[0]:
        zero = config_section(config, "zero_optimization")
        valid = {key: value for key, value in zero.items() if key not in _NOT_AT_STAGE.get(target[0], ())}
        out["zero_optimization"] = {**valid, "stage": target[0]}
    if source[1] != target[1]:
        out.update(_fitted_batch(config, source[1], target[1]))
    return out


def _fitted_batch(config: Mapping[str, Any], before: int, after: int) -> dict[str, int]:
    """Return new values of the batch keys that must change; only keys that the configuration has."""
    batch = batch_of(config, before)
    if batch is None or config.get(TRAIN) is None:
        return {}  # DeepSpeed computes the samples per step itself
    has_micro, has_accumulation = config.get(MICRO) is not None, config.get(ACCUMULATION) is not None
    if batch.train % (batch.micro * after) == 0 and has_micro:
        return {ACCUMULATION: batch.train // (batch.micro * after)} if has_accumulation else {}
    if batch.train % (batch.accumulation * after) == 0 and (has_accumulation or not has_micro):
        return {MICRO: batch.train // (batch.accumulation * after)} if has_micro else {}
    return {TRAIN: batch.micro * batch.accumulation * after}


def optimizer_wrapper(zero_stage: int, dtype: str, config: Any) -> str:
    """Return the class that DeepSpeed's engine wraps the optimizer in (``_do_optimizer_sanity_check``)."""
    if zero_stage == 3:
        return ZERO_3
    accumulates_fp32 = config_section(config, "data_types").get("grad_accum_dtype") in _FP32
    on_host = config_section(config, "zero_optimization", "offload_optimizer").get("device") == "cpu"
    return BF16_OPTIMIZER if zero_stage == 1 and dtype == "bf16" and accumulates_fp32 and not on_host else ZERO_12


def round_robin_order(params: Sequence[T], world_size: int) -> list[T]:
    """Return a param group's parameters as ``round_robin_gradients`` orders their data."""
    return list(chain.from_iterable(params[first::world_size] for first in range(world_size)))


def place_in_row(params: Iterable[tuple[str, int, int]]) -> tuple[tuple[PlacedParameter, ...], int]:
    """Place (fqn, numel, elements left free behind it) one behind the other. Returns them, and where the last ends."""
    layout, free, end = [], 0, 0
    for fqn, numel, gap in params:
        layout.append(PlacedParameter(fqn=fqn, offset=free, numel=numel))
        end = free + numel
        free = end + gap
    return tuple(layout), end


def partition_paddings(size: int, end: int, world_size: int) -> tuple[int, ...]:
    """Return the elements of each rank's partition behind the last parameter, which ends at ``end``."""
    return tuple(min(size, max(0, (rank + 1) * size - end)) for rank in range(world_size))


def slice_numel(numel: int, world_size: int) -> int:
    """Return the elements of a rank's slice of a parameter, padding included."""
    return -(-numel // world_size)


def slice_pieces(params: Iterable[tuple[str, int, int]], rank: int) -> list[Piece]:
    """Return a rank's slices of (fqn, numel, elements of a slice) in a row. Slices of padding alone are empty."""
    pieces, offset = [], 0
    for fqn, numel, part in params:
        pieces.append(Piece(fqn, min(rank * part, numel), min((rank + 1) * part, numel), offset))
        offset += part
    return pieces
