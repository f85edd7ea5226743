"""DeepSpeed's configuration at another stage and world size: whatever comes out, DeepSpeed accepts it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("deepspeed")

from deepspeed.runtime.config import DeepSpeedConfig

from merger.layouts.deepspeed_facts import ACCUMULATION, MICRO, TRAIN, batch_of, config_for

WORLDS = st.integers(1, 12)
WAYS = [(TRAIN,), (MICRO,), (TRAIN, MICRO), (TRAIN, ACCUMULATION), (MICRO, ACCUMULATION), (TRAIN, MICRO, ACCUMULATION)]
"""The keys that a configuration may have; DeepSpeed works out the others."""


def batch_in_deepspeed(config: dict[str, Any], world: int) -> tuple[int, int, int]:
    """(samples per step, micro-batch, micro-steps), as DeepSpeed's own rules and assertions have them."""
    read = object.__new__(DeepSpeedConfig)
    read.world_size = world
    read.train_batch_size = config.get(TRAIN)
    read.train_micro_batch_size_per_gpu = config.get(MICRO)
    read.gradient_accumulation_steps = config.get(ACCUMULATION)
    read._configure_train_batch_size()
    return read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps


@given(micro=st.integers(1, 6), steps=st.integers(1, 6), before=WORLDS, after=WORLDS, keys=st.data())
def test_the_batch_stays_consistent(micro: int, steps: int, before: int, after: int, keys: st.DataObject) -> None:
    ways = [
        (TRAIN,),
        (MICRO,),
        (TRAIN, MICRO),
        (TRAIN, ACCUMULATION),
        (MICRO, ACCUMULATION),
        (TRAIN, MICRO, ACCUMULATION),
    ]
    named = keys.draw(st.sampled_from(ways))
    steps = 1 if ACCUMULATION not in named and named != (TRAIN, MICRO) else steps
    whole = {TRAIN: micro * steps * before, MICRO: micro, ACCUMULATION: steps}
    config = {key: whole[key] for key in named}
    assert batch_in_deepspeed(config, before) == (whole[TRAIN], micro, steps)
    fitted = config_for(config, (2, before), (2, after))
    train, own_micro, own_steps = batch_in_deepspeed(fitted, after)
    assert fitted.keys() == config.keys()
    found = batch_of(fitted, after)
    assert found is not None and (found.train, found.micro, found.accumulation) == (train, own_micro, own_steps)
    if TRAIN in named and (
        whole[TRAIN] % (micro * after) == 0 if MICRO in named else whole[TRAIN] % (steps * after) == 0
    ):
        assert train == whole[TRAIN]


def test_nothing_changes_where_nothing_has_to() -> None:
    config = {TRAIN: "auto", MICRO: "auto", "zero_optimization": {"stage": 2, "elastic_checkpoint": True}}
    assert config_for(config, (2, 4), (2, 4)) is config
    assert config_for(config, (2, 4), (2, 3)) == config
    assert config_for(None, (2, 4), (3, 3)) is None


def test_a_stage_drops_what_deepspeed_refuses_there_and_keeps_the_rest() -> None:
    zero = {"stage": 1, "elastic_checkpoint": True, "compute_grad_norm": False, "sub_group_size": 9}
    fitted = config_for({"zero_optimization": zero, "bf16": {"enabled": True}}, (1, 2), (3, 2))
    assert fitted == {"zero_optimization": {"stage": 3, "sub_group_size": 9}, "bf16": {"enabled": True}}
    assert json.loads(json.dumps(zero))["elastic_checkpoint"] is True
    assert config_for({"zero_optimization": True}, (1, 2), (3, 2)) == {"zero_optimization": {"stage": 3}}
