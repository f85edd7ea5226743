"""DeepSpeed's configuration as the files carry it, fitted to another ZeRO stage and world size.

It is a record: ``engine.load_checkpoint`` does not read it, and the engine that loads the files brings its own. It
has to be one that DeepSpeed accepts at the new stage and world size all the same. It does not know any tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"

_NOT_AT_STAGE: Mapping[int, tuple[str, ...]] = {
    1: ("offload_param", "compute_grad_norm"),
    2: ("offload_param",),
    3: ("elastic_checkpoint", "compute_grad_norm"),
}
"""Options of ``zero_optimization`` that DeepSpeed refuses, or has no use for, at a stage."""


@dataclass(frozen=True)
class Batch:
    """Samples per optimizer step (``train``), per rank and micro-step (``micro``), and micro-steps in a step."""

    train: int
    micro: int
    accumulation: int


def zero_section(config: Any) -> dict[str, Any]:
    """``zero_optimization``; empty where it is missing or in its old form, a mere boolean."""
    found = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def batch_of(config: Any, world_size: int) -> Batch | None:
    """The batch as DeepSpeed works it out on so many ranks; None where the configuration does not say.

    The rules are those of ``DeepSpeedConfig._set_batch_related_parameters``.
    """
    values = [config.get(key) if isinstance(config, Mapping) else None for key in (TRAIN, MICRO, ACCUMULATION)]
    if any(value is not None and (not isinstance(value, int) or value < 1) for value in values):
        return None  # "auto", which whoever drives DeepSpeed fills in
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
    """The configuration for another (ZeRO stage, world size). Unchanged where both stay as they are.

    The samples per step stay the same where the configuration names them and they can be divided among the ranks:
    by another number of micro-steps, or else by another micro-batch. Where they cannot, they change.
    """
    if not isinstance(config, Mapping) or source == target:
        return config
    out = dict(config)
    if source[0] != target[0]:
        kept = {
            key: value for key, value in zero_section(config).items() if key not in _NOT_AT_STAGE.get(target[0], ())
        }
        out["zero_optimization"] = {**kept, "stage": target[0]}
    if source[1] != target[1]:
        out.update(_fitted_batch(config, source[1], target[1]))
    return out


def _fitted_batch(config: Mapping[str, Any], before: int, after: int) -> dict[str, int]:
    """The batch's keys that have to change; only ones that the configuration has."""
    batch = batch_of(config, before)
    if batch is None or config.get(TRAIN) is None:
        return {}  # DeepSpeed works the samples per step out by itself
    has_micro, has_accumulation = config.get(MICRO) is not None, config.get(ACCUMULATION) is not None
    if batch.train % (batch.micro * after) == 0 and has_micro:
        return {ACCUMULATION: batch.train // (batch.micro * after)} if has_accumulation else {}
    if batch.train % (batch.accumulation * after) == 0 and (has_accumulation or not has_micro):
        return {MICRO: batch.train // (batch.accumulation * after)} if has_micro else {}
    return {TRAIN: batch.micro * batch.accumulation * after}
