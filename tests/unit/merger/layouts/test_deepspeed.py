"""DeepSpeed's files where the parameters of a flat partition bring several steps, or nothing, or too much."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from merger.checkpoint import PlannedTensor
from merger.layouts.base import LayoutResult, Target
from merger.layouts.deepspeed import deepspeed_layout
from merger.writers.torch_zip import PtFile
from store.errors import UnsupportedError
from tests.support.planned import MOMENTS, Tensor, planned


def optimizer_states(laid: LayoutResult) -> list[dict[str, Any]]:
    """``optimizer.state_dict()`` of every rank."""
    found = [file.container for file in laid.files if file.path.endswith("optim_states.pt")]
    assert all(isinstance(container, PtFile) for container in found)
    return [container.value["optimizer_state_dict"] for container in found]  # type: ignore[attr-defined]


def filled(stored: PlannedTensor) -> set[str]:
    return {one.fragment.fqn for one in stored.placed}


def test_equal_steps_are_kept_without_a_note() -> None:
    checkpoint = planned({"a.w": Tensor((5,)), "b.w": Tensor((3,)), "c.w": Tensor((4,), 7)}, [["a.w", "b.w"], ["c.w"]])
    laid = deepspeed_layout(checkpoint, Target("deepspeed"))
    assert laid.notes == ()
    for states in optimizer_states(laid):
        state = states["base_optimizer_state"]["state"]
        assert (state[0]["step"].item(), state[1]["step"].item()) == (10, 7)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_newest_step_of_those_that_share_a_partition_is_taken_and_told(stage: int) -> None:
    tensors = {"a.w": Tensor((5,), 8), "b.w": Tensor((3,), 12), "c.w": Tensor((3,), 4), "d.w": Tensor((4,), 6)}
    groups = [["a.w", "b.w", "c.w"], ["d.w"]]
    hyper = [{"lr": 0.1, "weight_decay": 0.5}, {"lr": 0.2, "weight_decay": 0.0}]
    checkpoint = planned(tensors, groups, hyper=hyper)
    laid = deepspeed_layout(checkpoint, Target("deepspeed", zero_stage=stage, world_size=3))
    note = next(note for note in laid.notes if "one optimizer step" in note)
    assert "param group 0 get the run's, 12" in note
    assert "4 in c; 8 in a" in note
    assert sum("one optimizer step" in note for note in laid.notes) == 1
    for states in optimizer_states(laid):
        base = states["optimizer_state_dict"] if stage == 3 else states["base_optimizer_state"]
        assert [base["state"][i]["step"].item() for i in (0, 1)] == [12, 6]
        assert [{key: group[key] for key in hyper[0]} for group in base["param_groups"]] == hyper
    assert checkpoint.framework_state["scalars"]["a.w"]["step"].item() == 8


def test_the_step_is_that_of_the_run_which_goes_on_even_if_another_is_newer() -> None:
    tensors = {"a.w": Tensor((5,), 8), "b.w": Tensor((3,), 12), "c.w": Tensor((3,), 8)}
    checkpoint = replace(planned(tensors, [["a.w", "b.w"], ["c.w"]]), run_steps=dict.fromkeys(tensors, 8))
    laid = deepspeed_layout(checkpoint, Target("deepspeed", zero_stage=1))
    for states in optimizer_states(laid):
        assert [float(states["base_optimizer_state"]["state"][i]["step"]) for i in (0, 1)] == [8, 8]
    assert any("get the run's, 8; it was 12 in b" in note for note in laid.notes)


def test_the_certificate_has_the_chosen_step_and_what_the_layers_had() -> None:
    tensors = {"a.w": Tensor((5,), 8), "a.v": Tensor((5,), 8), "b.w": Tensor((3,), 12), "c.w": Tensor((3,), 6)}
    checkpoint = planned(tensors, [["a.w", "a.v", "b.w"], ["c.w"]])
    laid = deepspeed_layout(checkpoint, Target("deepspeed", zero_stage=1))
    assert laid.certificate is not None
    assert json.loads(json.dumps(laid.certificate.as_json()))["optimizer_steps"] == [
        {"param_group": 0, "chosen": 12.0, "had": [{"step": 8.0, "layers": ["a"]}, {"step": 12.0, "layers": ["b"]}]},
        {"param_group": 1, "chosen": 6.0, "had": [{"step": 6.0, "layers": ["c"]}]},
    ]
    assert checkpoint.certificate.exact and not laid.certificate.exact


def test_steps_that_all_layers_had_leave_it_exact() -> None:
    tensors = {"a.w": Tensor((50,), 8), "b.w": Tensor((50,), 12)}
    config = {"zero_optimization": {"stage": 3, "sub_group_size": 10}}
    laid = deepspeed_layout(planned(tensors, [["a.w", "b.w"]], config=config, stage=3), Target("deepspeed"))
    assert laid.certificate is not None and laid.certificate.exact
    steps = laid.certificate.as_json()["optimizer_steps"]
    assert [(one["chosen"], [had["layers"] for had in one["had"]]) for one in steps] == [(8, [("a",)]), (12, [("b",)])]


def test_sub_groups_keep_steps_of_their_own() -> None:
    tensors = {"a.w": Tensor((50,), 8), "b.w": Tensor((50,), 12)}
    config = {"zero_optimization": {"stage": 3, "sub_group_size": 10}}
    laid = deepspeed_layout(planned(tensors, [["a.w", "b.w"]], config=config, stage=3), Target("deepspeed"))
    assert laid.notes == ()
    for states in optimizer_states(laid):
        assert [states["optimizer_state_dict"]["state"][i]["step"].item() for i in (0, 1)] == [8, 12]


@pytest.mark.parametrize("other", [{"factor": 2.0}, {}])
def test_another_scalar_that_differs_is_refused_by_name(other: dict[str, float]) -> None:
    tensors = {"a.w": Tensor((5,), scalars={"factor": 1.0}), "b.w": Tensor((3,), scalars=other)}
    with pytest.raises(UnsupportedError, match=r"a\.w and b\.w share a flat partition.*'factor' differs: 1\.0"):
        deepspeed_layout(planned(tensors, [["a.w", "b.w"]]), Target("deepspeed"))


def test_a_scalar_that_is_the_same_everywhere_is_kept() -> None:
    tensors = {"a.w": Tensor((5,), scalars={"factor": 1.5}), "b.w": Tensor((3,), 9, scalars={"factor": 1.5})}
    laid = deepspeed_layout(planned(tensors, [["a.w", "b.w"]]), Target("deepspeed"))
    assert [states["base_optimizer_state"]["state"][0]["factor"] for states in optimizer_states(laid)] == [1.5, 1.5]


def test_a_parameter_without_state_gets_zeros_among_others_and_is_told() -> None:
    checkpoint = planned({"a.w": Tensor((5,)), "b.w": Tensor((3,), None)}, [["a.w", "b.w"]])
    laid = deepspeed_layout(checkpoint, Target("deepspeed", world_size=1))
    (states,) = optimizer_states(laid)
    assert filled(states["single_partition_of_fp32_groups"][0]) == {"a.w", "b.w"}
    for slot in MOMENTS:
        assert filled(states["base_optimizer_state"]["state"][0][slot]) == {"a.w"}
    assert any("no state yet for b (1 parameter of" in note for note in laid.notes)


def test_a_group_without_state_stays_without() -> None:
    checkpoint = planned({"a.w": Tensor((5,), None), "b.w": Tensor((3,), None)}, [["a.w", "b.w"]])
    laid = deepspeed_layout(checkpoint, Target("deepspeed"))
    assert laid.notes == ()
    assert [states["base_optimizer_state"]["state"] for states in optimizer_states(laid)] == [{}, {}]


def test_a_param_group_of_frozen_parameters_has_stage_3_only() -> None:
    tensors = {"a.w": Tensor((5,)), "b.w": Tensor((3,), None, "frozen")}
    checkpoint = planned(tensors, [["a.w"], ["b.w"]], hyper=[{"lr": 0.1}, {"lr": 0.2}], stage=3)
    with pytest.raises(UnsupportedError, match="param group 1 has no trained parameter"):
        deepspeed_layout(checkpoint, Target("deepspeed", zero_stage=2))
    laid = deepspeed_layout(checkpoint, Target("deepspeed"))
    for states in optimizer_states(laid):
        assert [group["params"] for group in states["optimizer_state_dict"]["param_groups"]] == [[0], []]
        assert [group["lr"] for group in states["optimizer_state_dict"]["param_groups"]] == [0.1, 0.2]


def test_stage_3_refuses_to_lose_a_parameter_that_no_group_holds() -> None:
    checkpoint = planned({"a.w": Tensor((5,)), "b.w": Tensor((3,), None)}, [["a.w"]])
    with pytest.raises(UnsupportedError, match=r"b\.w requires gradients but is in no param group"):
        deepspeed_layout(checkpoint, Target("deepspeed", zero_stage=3))
    deepspeed_layout(checkpoint, Target("deepspeed", zero_stage=1))


def test_a_run_without_deepspeed_is_refused() -> None:
    checkpoint = replace(planned({"a.w": Tensor((5,))}, [["a.w"]]), framework="torch")
    with pytest.raises(UnsupportedError, match="a run without DeepSpeed"):
        deepspeed_layout(checkpoint, Target("deepspeed", zero_stage=2))


def test_every_element_is_placed_once_at_any_stage_and_world_size() -> None:
    sizes = {"a.w": 7, "b.w": 1, "c.w": 64, "d.w": 3, "e.w": 129}
    config = {"zero_optimization": {"stage": 2, "round_robin_gradients": True, "sub_group_size": 20}}
    tensors = {fqn: Tensor((numel,)) for fqn, numel in sizes.items()}
    checkpoint = planned(tensors, [["a.w", "c.w", "e.w"], ["b.w", "d.w"]], config=config)
    for stage in (1, 2, 3):
        for world in (1, 2, 3, 5, 8, 200):
            laid = deepspeed_layout(checkpoint, Target("deepspeed", zero_stage=stage, world_size=world))
            counts = {fqn: torch.zeros(numel, dtype=torch.int64) for fqn, numel in sizes.items()}
            states = optimizer_states(laid)
            assert len(states) == world
            for state in states:
                for stored in state["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]:
                    for one in stored.placed:
                        counts[one.fragment.fqn][one.fragment.start : one.fragment.stop] += 1
            assert all(bool((count == 1).all()) for count in counts.values()), (stage, world)


@pytest.mark.parametrize(
    ("config", "stage", "named"),
    [
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, 2, "zenflow"),
        ({"zero_optimization": {"mics_shard_size": 2}}, 3, "mics_shard_size"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, 3, "NVMe"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}}, 3, "SuperOffload"),
        ({"optimizer": {"type": "Muon"}}, 3, "Muon at stage 3"),
    ],
)
def test_variants_with_a_layout_of_their_own_are_refused_by_name(config: Any, stage: int, named: str) -> None:
    checkpoint = planned({"a.w": Tensor((5,))}, [["a.w"]], config=config)
    with pytest.raises(UnsupportedError, match=named):
        deepspeed_layout(checkpoint, Target("deepspeed", zero_stage=stage, world_size=3))


def test_a_configuration_that_loads_universally_is_told() -> None:
    checkpoint = planned({"a.w": Tensor((5,))}, [["a.w"]], config={"checkpoint": {"load_universal": True}})
    assert any("load_universal to false" in note for note in deepspeed_layout(checkpoint, Target()).notes)
