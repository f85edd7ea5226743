"""Optimizer files of ZeRO-1/2 and of ``BF16_Optimizer``: each param group one flat tensor, cut into equal partitions.

Parameters lie in the order of ``param_shapes``, which is the truth. ``param_slice_mappings`` say the same in
another way, but in the order of the param group, wrongly so with ``round_robin_gradients``: they are compared with
what DeepSpeed would have written, and never used to find a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from merger.sources.deepspeed_classes import FragmentAddress, attributes
from merger.sources.deepspeed_files import RankFiles
from merger.sources.deepspeed_one_save import step_in, step_problems, weight_problems
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
from merger.sources.nest import Nest
from merger.sources.tensor import FileTensor
from store.errors import MergeError, UnsupportedError
from store.text import counted

T = TypeVar("T")


@dataclass(frozen=True)
class _Group:
    """A param group. params: in its own order, with offsets as DeepSpeed maps them. layout: where the data is."""

    params: tuple[tuple[Shape, int], ...]
    layout: tuple[tuple[Shape, int], ...]
    size: int
    paddings: tuple[int, ...]

    def pieces(self, placed: Sequence[tuple[Shape, int]], rank: int) -> list[Piece]:
        """What of each parameter lies in a rank's partition, ``placed`` being right."""
        first, last = rank * self.size, (rank + 1) * self.size
        return [
            Piece(
                shape.fqn, max(offset, first) - offset, min(offset + shape.numel, last) - offset, max(offset - first, 0)
            )
            for shape, offset in placed
            if max(offset, first) < min(offset + shape.numel, last)
        ]


def zero12(files: RankFiles) -> Optimized:
    """What the optimizer's files hold. MergeError, UnsupportedError, DamagedError."""
    bases = [_base(optim) for optim in files.optims]
    require_same_groups(bases)
    hyper = base_groups(bases[0])
    shapes = param_shapes(files.model)
    if [indices for indices, _ in hyper] != [[i] for i in range(len(shapes))]:
        raise MergeError(f"{bases[0].where} has {len(hyper)} param groups, {files.model.where} {len(shapes)}")
    out = Optimized()
    round_robin = not _is_wrapper(files) and is_round_robin(files.model)
    groups = [_group(files, index, group, round_robin) for index, group in enumerate(shapes)]
    for index, group in enumerate(groups):
        masters = [_master(optim, index) for optim in files.optims]
        state = flat_state([state_of(base, index) for base in bases], masters, group.size)
        for rank in range(files.world_size):
            out.extents += state.extents(rank, group.pieces(group.layout, rank))
        fqns = [shape.fqn for shape, _ in group.params]
        out.groups.append({"params": fqns, "hyper": hyper[index][1]})
        out.scalars |= {fqn: dict(state.scalars) for fqn in fqns}
        out.slots |= {fqn: list(state.slots) for fqn in fqns}
    _check_mappings(files, groups)
    out.facts = _facts(files, groups, round_robin)
    steps = [step_in(out.scalars.get(fqn, {}), group["hyper"]) for group in out.groups for fqn in group["params"]]
    out.problems += step_problems(files.model, files.optims[0].where, steps)
    out.problems += weight_problems(files.model.at("module").mapping(), out.extents)
    return out


def _base(optim: Nest) -> Nest:
    base = optim.at("base_optimizer_state")
    if isinstance(base.value, list):
        raise UnsupportedError(
            f"{base.where} was saved with elastic_checkpoint: such a file keeps neither learning rate nor any other "
            "setting of the optimizer. Load it with DeepSpeed and save it again with elastic_checkpoint: false"
        )
    return base


def _master(optim: Nest, index: int) -> FileTensor:
    return optim.at("single_partition_of_fp32_groups").at(index).tensor()


def _is_wrapper(files: RankFiles) -> bool:
    """Whether DeepSpeed wrapped the optimizer in ``BF16_Optimizer``: it leaves the padding where it is."""
    return files.optims[0].get("zero_stage") is None


def is_round_robin(model: Nest) -> bool:
    """Whether the run was configured to deal its parameters out to the ranks in turn."""
    config = model.at("ds_config").get("zero_optimization")
    return config is not None and config.mapping().get("round_robin_gradients") is True


def in_group_order(dealt: Sequence[T], world_size: int) -> list[T]:
    """What ``round_robin_gradients`` dealt out, as it was before: the order of the param group.

    Dealing takes every ``world_size``-th from the first, then those from the second, and so on.
    """
    order = [i for first in range(world_size) for i in range(first, len(dealt), world_size)]
    return [dealt[at] for at in sorted(range(len(dealt)), key=order.__getitem__)]


def _group(files: RankFiles, index: int, shapes: list[Shape], round_robin: bool) -> _Group:
    gaps = _gaps(files, index, len(shapes))
    starts = accumulate((shape.numel + gap for shape, gap in zip(shapes, gaps, strict=True)), initial=0)
    layout = tuple(zip(shapes, starts, strict=False))
    end = layout[-1][1] + shapes[-1].numel if layout else 0
    paddings = tuple(optim.at("group_paddings").at(index).natural() for optim in files.optims)
    sizes = {
        _master(optim, index).numel + (0 if _is_wrapper(files) else padding)
        for optim, padding in zip(files.optims, paddings, strict=True)
    }
    size = max(sizes)
    expected = _paddings(files, size, end)
    counts = {optim.at("partition_count").at(index).natural() for optim in files.optims}
    if len(sizes) > 1 or paddings != expected or size * files.world_size < end or counts != {files.world_size}:
        raise MergeError(
            f"param group {index} of {files.folder}: partitions of {sorted(sizes)} elements with paddings "
            f"{list(paddings)} on {counted(files.world_size, 'rank')} cannot hold the {counted(end, 'element')} of "
            "its parameters; files of different saves are mixed, or the parameters lie in a way that is not known"
        )
    return _Group(_in_group_order(layout, gaps, round_robin, files.world_size), layout, size, paddings)


def _paddings(files: RankFiles, size: int, end: int) -> tuple[int, ...]:
    """By rank, as DeepSpeed counts the elements behind the last parameter."""
    ranks = files.world_size
    if _is_wrapper(files):  # all of them on the last rank, even where they begin before it
        return (*([0] * (ranks - 1)), ranks * size - end)
    return tuple(min(size, max(0, (rank + 1) * size - end)) for rank in range(ranks))


def _gaps(files: RankFiles, index: int, count: int) -> tuple[int, ...]:
    """Elements that ``parameter_alignment`` leaves behind each parameter."""
    found = {
        (0,) * count if paddings is None else paddings.at(index).naturals()
        for paddings in (optim.get("param_alignment_paddings") for optim in files.optims)
    }
    if len(found) > 1 or len(next(iter(found))) != count:
        raise MergeError(f"{files.optims[0].where}: param_alignment_paddings do not fit the {count} parameters")
    return found.pop()


def _in_group_order(
    layout: tuple[tuple[Shape, int], ...], gaps: tuple[int, ...], round_robin: bool, world_size: int
) -> tuple[tuple[Shape, int], ...]:
    """The parameters as the param group has them, with the offsets that DeepSpeed writes into its mappings.

    Unless there are gaps, DeepSpeed maps what it dealt out as if it lay in the group's order.
    """
    if not round_robin:
        return layout
    placed = in_group_order(layout, world_size)
    if any(gaps):
        return tuple(placed)
    starts = accumulate((shape.numel for shape, _ in placed), initial=0)
    return tuple((shape, start) for (shape, _), start in zip(placed, starts, strict=False))


def _check_mappings(files: RankFiles, groups: Sequence[_Group]) -> None:
    for rank, optim in enumerate(files.optims):
        for index, group in enumerate(groups):
            nest = optim.at("param_slice_mappings").at(index)
            found = [(fqn, *_address(address)) for fqn, address in nest.items()]
            expected = [
                (piece.fqn, piece.offset, piece.stop - piece.start) for piece in group.pieces(group.params, rank)
            ]
            if found != expected:
                raise MergeError(
                    f"{nest.where} does not agree with param_shapes and round_robin_gradients in "
                    f"{files.model.where}, so it is not known where a parameter lies: {_first(found, expected)}"
                )


def _first(found: Sequence[Any], expected: Sequence[Any]) -> str:
    pairs = zip([*found, None], [*expected, None], strict=False)
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    return f"(name, start, elements) {one} instead of {other}"


def _address(nest: Nest) -> tuple[int, int]:
    if not isinstance(nest.value, FragmentAddress):
        return -1, -1
    plain = Nest(attributes(nest.value), nest.where)
    return plain.at("start").natural(), plain.at("numel").natural()


def _facts(files: RankFiles, groups: Sequence[_Group], round_robin: bool) -> dict[str, Any]:
    paddings = files.optims[0].get("param_alignment_paddings")
    return {
        "zero_optimizer": "BF16_Optimizer" if _is_wrapper(files) else "DeepSpeedZeroOptimizer",
        "partition_count": [files.world_size] * len(groups),
        "nccl_start_alignment_factor": 2,
        "round_robin_gradients": round_robin,
        "param_alignment_paddings": []
        if paddings is None
        else [list(paddings.at(i).naturals()) for i in range(len(groups))],
        "param_groups": [
            {
                "params": [shape.fqn for shape, _ in group.params],
                "layout": [
                    {"fqn": shape.fqn, "offset": offset, "numel": shape.numel} for shape, offset in group.layout
                ],
                "flat_numel": group.size * files.world_size,
                "partition_size": group.size,
                "group_paddings": list(group.paddings),
            }
            for group in groups
        ],
    }
