"""DeepSpeed's own checkpoint files, laid out again from the layout facts and compared with the real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adapter_state import Saved, unequal


def file_problems(engine: Any, facts: Mapping[str, Any], saved: Saved, directory: Path) -> list[str]:
    """Save with DeepSpeed itself; what of this rank's optimizer file the facts and the state do not give."""
    rank = dist.get_rank()
    engine.save_checkpoint(str(directory), tag="now")
    prefix = "bf16_" if facts["dtype"] == "bf16" else ""
    path = directory / "now" / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    real = torch.load(path, weights_only=False)["optimizer_state_dict"]
    model = "zero_pp_rank_0_mp_rank_00" if facts["zero_stage"] == 3 else "mp_rank_00"
    states = torch.load(directory / "now" / f"{model}_model_states.pt", weights_only=False)
    facts = json.loads(json.dumps(facts))
    layout = _zero3(facts, saved, rank) if facts["zero_stage"] == 3 else _zero12(facts, saved, rank)
    return [*_compare_flats(real, layout, facts), *_compare_rest(real, facts), *_compare_model(states, facts)]


def _zero12(facts: Mapping[str, Any], saved: Saved, rank: int) -> dict[str, list[torch.Tensor]]:
    out: dict[str, list[torch.Tensor]] = {}
    for group in facts["param_groups"]:
        for slot in ("fp32", "exp_avg", "exp_avg_sq"):
            flat = torch.zeros(group["flat_numel"])
            for place in group["layout"]:
                flat[place["offset"] : place["offset"] + place["numel"]] = saved.tensors[place["fqn"], slot]
            size = group["partition_size"]
            lean = slot == "fp32" and facts["zero_optimizer"] == "DeepSpeedZeroOptimizer"
            end = size - (group["group_paddings"][rank] if lean else 0)
            out.setdefault(slot, []).append(flat[rank * size : rank * size + end])
    return out


def _zero3(facts: Mapping[str, Any], saved: Saved, rank: int) -> dict[str, list[torch.Tensor]]:
    out: dict[str, list[torch.Tensor]] = {}
    for group in facts["sub_groups"]:
        for slot in ("fp32", "exp_avg", "exp_avg_sq"):
            slices = []
            for fqn, part in zip(group["params"], group["partition_numels"], strict=True):
                mine = saved.tensors[fqn, slot][rank * part : (rank + 1) * part]
                slices.append(torch.cat([mine, mine.new_full((part - mine.numel(),), float("nan"))]))
            out.setdefault(slot, []).append(torch.cat(slices))
            assert out[slot][-1].numel() == group["flat_numel"]
    return out


def _compare_flats(real: Mapping[str, Any], layout: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    three = facts["zero_stage"] == 3
    weights = real["fp32_flat_groups"] if three else real["single_partition_of_fp32_groups"]
    base = real["optimizer_state_dict" if three else "base_optimizer_state"]["state"]
    found = {slot: [base[i][slot] for i in range(len(base))] for slot in ("exp_avg", "exp_avg_sq")} | {"fp32": weights}
    problems = []
    for slot, flats in layout.items():
        for index, (ours, theirs) in enumerate(zip(flats, found[slot], strict=True)):
            held = ~ours.isnan()  # padding at stage 3: whatever was in memory
            if ours.shape != theirs.shape or not torch.equal(ours[held], theirs.detach()[held]):
                problems.append(f"{slot} of flat {index} is not DeepSpeed's")
    return problems


def _compare_rest(real: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    problems = []
    if "group_paddings" in real:
        mine = [group["group_paddings"][dist.get_rank()] for group in facts["param_groups"]]
        problems += unequal(list(real["group_paddings"]), mine, "group_paddings")
    for key in ("param_alignment_paddings", "partition_count", "dynamic_loss_scale", "clip_grad"):
        if key in real:
            problems += unequal(real[key], facts[key], key)
    base = real.get("base_optimizer_state") or real["optimizer_state_dict"]
    for group, ours in zip(base["param_groups"], facts["param_groups"], strict=True):
        theirs = {key: value for key, value in group.items() if key != "params"}
        problems += unequal(json.loads(json.dumps(theirs)), ours["hyper"], "hyper")
    return problems


def _compare_model(states: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    groups = facts["sub_groups"] if facts["zero_stage"] == 3 else facts["param_groups"]
    names = [g["params"] if facts["zero_stage"] == 3 else [place["fqn"] for place in g["layout"]] for g in groups]
    problems = unequal([list(shapes) for shapes in states["param_shapes"]], names, "param_shapes")
    problems += unequal(list(states["module"]), facts["state_dict_names"], "module")
    problems += unequal(states["buffer_names"], facts["buffer_names"], "buffer_names")
    problems += unequal(states["shared_params"], facts["shared_params"], "shared_params")
    if states["frozen_param_shapes"] is not None:
        problems += unequal(list(states["frozen_param_shapes"]), facts["frozen"], "frozen")
    return problems + unequal(json.loads(json.dumps(states["ds_config"])), facts["ds_config"], "ds_config")
