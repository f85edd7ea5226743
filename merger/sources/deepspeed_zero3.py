"""Optimizer files of ZeRO-3: every parameter cut into ceil(numel / world size) slices, one per rank, laid flat by
sub-group; the last slices hold padding."""

from __future__ import annotations

from typing import Any

from merger.sources.deepspeed_files import RankFiles
from merger.sources.deepspeed_one_save import step_in, step_problems
from merger.sources.deepspeed_zero import (
    Optimized,
    Piece,
    Shape,
    base_groups,
    flat_state,
    param_shapes,
    require_same_groups,
    state_of,
)
from store.errors import MergeError, UnsupportedError
from store.text import counted


def zero3(files: RankFiles) -> Optimized:
    """What the optimizer's files hold. MergeError, UnsupportedError, DamagedError."""
    _refuse_variants(files)
    bases = [optim.at("optimizer_state_dict") for optim in files.optims]
    require_same_groups(bases)
    hyper = base_groups(bases[0])
    shapes = param_shapes(files.model)
    home = {index: group for group, (indices, _) in enumerate(hyper) for index in indices}
    if sorted(home) != list(range(len(shapes))):
        raise MergeError(f"{bases[0].where} has {len(home)} flat partitions, {files.model.where} {len(shapes)}")
    out = Optimized(groups=[{"params": [], "hyper": values} for _, values in hyper])
    sub_groups = []
    for index, sub_group in enumerate(shapes):
        parts = [slice_numel(shape.numel, files.world_size) for shape in sub_group]
        masters = [optim.at("fp32_flat_groups").at(index).tensor() for optim in files.optims]
        for optim, master in zip(files.optims, masters, strict=True):
            if master.shape != (sum(parts),):
                raise MergeError(
                    f"{optim.where}, sub-group {index}: {master.shape} elements are not the {sum(parts)} of a rank's "
                    f"slices of its parameters on {counted(files.world_size, 'rank')}; it is not known where they lie"
                )
        state = flat_state([state_of(base, index) for base in bases], masters, sum(parts))
        for rank in range(files.world_size):
            out.extents += state.extents(rank, _pieces(sub_group, parts, rank))
        fqns = [shape.fqn for shape in sub_group]
        out.groups[home[index]]["params"] += fqns
        out.scalars |= {fqn: dict(state.scalars) for fqn in fqns}
        out.slots |= {fqn: list(state.slots) for fqn in fqns}
        sub_groups.append(
            {"params": fqns, "param_group": home[index], "partition_numels": parts, "flat_numel": sum(parts)}
        )
    out.facts = _facts(files, out, sub_groups)
    steps = [step_in(out.scalars.get(fqn, {}), group["hyper"]) for group in out.groups for fqn in group["params"]]
    out.problems += step_problems(files.model, files.optims[0].where, steps)
    if all(step is None for step in steps):
        out.problems.append(
            f"the optimizer counts no steps, and ZeRO-3 saves the weights once: nothing tells whether all files in "
            f"{files.folder} are of one save"
        )
    return out


def slice_numel(numel: int, world_size: int) -> int:
    """Elements of a rank's slice of a parameter, padding included."""
    return -(-numel // world_size)


def own_slice(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """[start, stop) of a rank's slice, without padding."""
    part = slice_numel(numel, world_size)
    return min(rank * part, numel), min((rank + 1) * part, numel)


def _pieces(sub_group: list[Shape], parts: list[int], rank: int) -> list[Piece]:
    pieces, offset = [], 0
    for shape, part in zip(sub_group, parts, strict=True):
        start, stop = min(rank * part, shape.numel), min((rank + 1) * part, shape.numel)
        pieces.append(Piece(shape.fqn, start, stop, offset))
        offset += part
    return pieces


def _refuse_variants(files: RankFiles) -> None:
    for optim in files.optims:
        count = optim.at("partition_count")
        if (
            isinstance(count.value, list)
            or count.natural() != files.world_size
            or optim.get("ds_zero_partition_groups")
        ):
            raise UnsupportedError(
                f"{optim.where} is partitioned over a part of the ranks ({count.value} of {files.world_size}; MiCS or "
                "AutoEP): not handled"
            )


def _facts(files: RankFiles, found: Optimized, sub_groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "zero_optimizer": "DeepSpeedZeroOptimizer_Stage3",
        "partition_count": files.world_size,
        "param_groups": [{"params": list(group["params"])} for group in found.groups],
        "sub_groups": sub_groups,
    }
