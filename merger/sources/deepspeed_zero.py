"""Read the optimizer files of ZeRO-1/2 (``BF16_Optimizer`` included) and ZeRO-3.

At ZeRO-1/2 parameters lie in the order of ``param_shapes``. ``param_slice_mappings`` use the order of the param group,
wrongly so with ``round_robin_gradients``: they are compared with what DeepSpeed would have written, and never used to
find a parameter."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from merger.checkpoint import config_section
from merger.io.blocks import Extent
from merger.layouts import deepspeed_facts as facts
from merger.sources import deepspeed_files
from merger.sources.base import FileTensor, Nest, read_values
from merger.sources.deepspeed_files import RankFiles, comparable, require_equal
from merger.sources.torch_file import FragmentAddress
from store.errors import MergeError, UnsupportedError
from store.names import BUFFER, FROZEN, WEIGHTS
from store.text import counted

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # slots that stay zero where gradients are zero
_Placed = Sequence[tuple[str, int, int]]  # (fqn, elements, elements of a slice) of parameters, in the order of the data


@dataclass(frozen=True)
class Shape:
    """A parameter that the optimizer holds."""

    fqn: str
    shape: tuple[int, ...]
    numel: int


@dataclass
class OptimizerContents:
    """Contents of the optimizer files."""

    extents: list[Extent] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)  # fqns and hyperparameters, in the optimizer's order
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    slots: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # layout facts of the stage
    problems: list[str] = field(default_factory=list)  # why it may not be the engine's state
    vouched: set[tuple[str, str]] = field(default_factory=set)  # (fqn, slot) that another file proves to be of the save

    def add_state(self, fqns: Sequence[str], state: "FlatState") -> None:
        """Note the scalars and slots of parameters in a flat partition."""
        self.scalars |= {fqn: dict(state.scalars) for fqn in fqns}
        self.slots |= {fqn: list(state.slots) for fqn in fqns}

    def compare_weights(self, model: Nest) -> None:
        """Vouch for masters whose casts equal the working weights, in samples. Raises as :func:`require_cast`."""
        module, skipped = model.at("module").mapping(), dict[str, str]()
        for extent in self.extents:
            weights = module.get(extent.fqn)
            if extent.slot != WEIGHTS or not isinstance(weights, FileTensor):
                continue
            if not weights.contiguous or weights.lazy:
                skipped[extent.fqn] = weights.where
                continue
            self.vouched.add((extent.fqn, extent.slot))
            working = weights.extent(extent.fqn, "working", extent.start, extent.stop, extent.start)
            for start, stop in deepspeed_files.sample_ranges(extent.start, extent.stop):
                deepspeed_files.require_cast(working, extent, start, stop)
        self.problems += (
            f"{where}, the working weights of {fqn}, could not be compared with the optimizer's copy"
            for fqn, where in skipped.items()
        )

    def steps(self) -> list[float | None]:
        """Return the steps that the optimizer counts for each parameter."""
        groups = ((group["hyper"], group["params"]) for group in self.groups)
        return [deepspeed_files.stored_step(self.scalars.get(fqn, {}), hyper) for hyper, fqns in groups for fqn in fqns]


def param_shapes(model: Nest) -> list[list[Shape]]:
    """Return the parameters of each (sub-)group, in the order of the data. MergeError for duplicates."""
    groups, seen = [], set()
    for entry in model.at("param_shapes").entries():
        group = []
        for fqn, shape in entry.items():
            if fqn in seen:
                raise MergeError(f"{entry.where} names {fqn} twice")
            seen.add(fqn)
            sizes = shape.naturals()
            group.append(Shape(fqn, sizes, math.prod(sizes)))
        groups.append(group)
    return groups


def flat_state(ranks: Sequence[Nest], masters: Sequence[FileTensor], numel: int) -> "FlatState":
    """Return the optimizer state of one flat partition on all ranks.

    ``ranks`` and ``masters``: its state and its master weights on each rank. Raises MergeError if ranks differ in slots
    or scalars; UnsupportedError for state of another shape."""
    slots = require_equal(ranks, "slots", lambda nest: _slots(nest, numel))
    require_equal(ranks, "scalars", lambda nest: comparable(scalars_of(nest)))
    pairs = zip(masters, ranks, strict=True)
    tensors = [{WEIGHTS: master, **{slot: nest.at(slot).tensor() for slot in slots}} for master, nest in pairs]
    return FlatState(tuple(slots), scalars_of(ranks[0]), tensors)


@dataclass(frozen=True)
class FlatState:
    """A flat partition. ``tensors``: by rank, the masters and the optimizer's slots, by name of the slot."""

    slots: tuple[str, ...]
    scalars: Mapping[str, Any]
    tensors: Sequence[Mapping[str, FileTensor]]

    def extents(self, rank: int, pieces: Sequence[facts.Piece]) -> Iterator[Extent]:
        """Yield where the values of each piece lie, in every slot."""
        for slot, tensor in self.tensors[rank].items():
            for piece in pieces:
                if piece.start < piece.stop:
                    yield tensor.extent(piece.fqn, slot, piece.start, piece.stop, piece.offset)


def _slots(state: Nest, numel: int) -> list[str]:
    """Return the slots of a flat partition's state: its tensors over the elements."""
    slots = []
    for key, nest in state.items():
        if _is_scalar(nest.value):
            continue
        tensor = nest.tensor()
        if tensor.shape != (numel,) or key in ("step", WEIGHTS, FROZEN, BUFFER):
            raise UnsupportedError(
                f"{nest.where} has the shape {tensor.shape} for a flat partition of {counted(numel, 'element')}, so it "
                "cannot be split by parameter; only optimizers with state per element, such as AdamW, are supported"
            )
        slots.append(key)
    return sorted(slots)


def scalars_of(state: Nest) -> dict[str, Any]:
    """Return the scalars of the base optimizer's state for a flat partition; not the tensors over its elements."""
    return {key: read_values(nest.value) for key, nest in state.items() if _is_scalar(nest.value)}


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, FileTensor) or not value.shape


def base_groups(base: Nest, model: Nest, *, one_each: bool = False) -> list[tuple[list[int], dict[str, Any]]]:
    """Return (indices of flat partitions, hyperparameters) of each of the base optimizer's param groups.

    ``one_each``: whether each has one, in order. Raises MergeError if param_shapes has other partitions."""
    groups = base.at("param_groups").entries()
    held = [list(group.at("params").naturals()) for group in groups]
    flat, count = sorted(chain.from_iterable(held)), len(model.at("param_shapes").entries())
    if flat != list(range(count)) or (one_each and held != [[index] for index in flat]):
        raise MergeError(
            f"{base.where} has {len(groups)} param groups with {counted(len(flat), 'flat partition')}, but "
            f"{model.where} has {count}, so they are of different saves; name another tag, or copy the checkpoint again"
        )
    hyper = [{key: read_values(value) for key, value in one.mapping().items() if key != "params"} for one in groups]
    return list(zip(held, hyper, strict=True))


def state_of(base: Nest, index: int) -> Nest:
    """Return the base optimizer's state of a flat partition; empty if it keeps none."""
    states = base.at("state")
    return states.at(index) if index in states.mapping() else Nest({}, f"{states.where}, {index}")


def read_zero12(files: RankFiles) -> OptimizerContents:
    """Read the optimizer files of ZeRO-1/2. MergeError, UnsupportedError, DamagedError."""
    bases = [_base(optim) for optim in files.optims]
    require_equal(bases, "param_groups", lambda base: comparable(base.at("param_groups").value))
    hyper, shapes = base_groups(bases[0], files.model, one_each=True), param_shapes(files.model)
    out = OptimizerContents()
    round_robin = not _is_wrapper(files) and is_round_robin(files.model)
    gaps = [_gaps(files, index, len(group)) for index, group in enumerate(shapes)]
    groups = [_group(files, index, group, gaps[index], round_robin) for index, group in enumerate(shapes)]
    for index, group in enumerate(groups):
        masters = [_master(optim, index) for optim in files.optims]
        state = flat_state([state_of(base, index) for base in bases], masters, group.partition_size)
        for rank in range(files.world_size):
            out.extents += state.extents(rank, group.pieces(rank))
            _check_mapping(files, rank, index, group.mapped_pieces(rank, gaps[index], round_robin=round_robin))
        out.groups.append({"params": list(group.params), "hyper": hyper[index][1]})
        out.add_state(group.params, state)
    aligned = files.optims[0].get("param_alignment_paddings") is not None
    out.facts = {
        "zero_optimizer": facts.BF16_OPTIMIZER if _is_wrapper(files) else facts.ZERO_12,
        "partition_count": [files.world_size] * len(groups),
        "round_robin_gradients": round_robin,
        "param_alignment_paddings": [list(group) for group in gaps] if aligned else [],
        "param_groups": [group.model_dump(mode="json") for group in groups],
    }
    out.problems += deepspeed_files.step_problems(files.model, files.optims[0].where, out.steps())
    out.compare_weights(files.model)
    return out


def _base(optim: Nest) -> Nest:
    base = optim.at("base_optimizer_state")
    if isinstance(base.value, list):
        raise UnsupportedError(
            f"{base.where} was saved with elastic_checkpoint, which drops the optimizer's hyperparameters. Load it "
            "with DeepSpeed and save it again with elastic_checkpoint: false"
        )
    return base


def _master(optim: Nest, index: int) -> FileTensor:
    return optim.at("single_partition_of_fp32_groups").at(index).tensor()


def _is_wrapper(files: RankFiles) -> bool:
    """Return whether the run used ``BF16_Optimizer``, which keeps the padding."""
    return files.optims[0].get("zero_stage") is None


def is_round_robin(model: Nest) -> bool:
    """Return whether the run used ``round_robin_gradients``."""
    return config_section(model.at("ds_config").value, "zero_optimization").get("round_robin_gradients") is True


def in_group_order(dealt: Sequence[Shape], world_size: int) -> list[Shape]:
    """Return parameters in the order of the param group, before ``round_robin_gradients`` distributed them."""
    places = facts.round_robin_order(range(len(dealt)), world_size)
    return [shape for _, shape in sorted(zip(places, dealt, strict=True), key=lambda pair: pair[0])]


def _group(
    files: RankFiles, index: int, shapes: list[Shape], gaps: Sequence[int], round_robin: bool
) -> facts.GroupFacts:
    layout, end = facts.place_in_row((shape.fqn, shape.numel, gap) for shape, gap in zip(shapes, gaps, strict=True))
    paddings = tuple(optim.at("group_paddings").at(index).natural() for optim in files.optims)
    pairs = zip(files.optims, paddings, strict=True)
    sizes = {_master(optim, index).numel + (0 if _is_wrapper(files) else padding) for optim, padding in pairs}
    size = max(sizes)
    expected = facts.partition_paddings(size, end, files.world_size)
    if _is_wrapper(files):  # all of them on the last rank, even where they begin before it
        expected = (*([0] * (files.world_size - 1)), files.world_size * size - end)
    counts = {optim.at("partition_count").at(index).natural() for optim in files.optims}
    if len(sizes) > 1 or paddings != expected or size * files.world_size < end or counts != {files.world_size}:
        raise MergeError(
            f"param group {index} of {files.folder}: partitions of {sorted(sizes)} elements with paddings "
            f"{list(paddings)} on {counted(files.world_size, 'rank')} cannot hold the {counted(end, 'element')} of "
            "its parameters; files of different saves are mixed, or the layout is unknown"
        )
    params = tuple(shape.fqn for shape in (in_group_order(shapes, files.world_size) if round_robin else shapes))
    return facts.GroupFacts(params=params, layout=layout, partition_size=size, group_paddings=paddings)


def _gaps(files: RankFiles, index: int, count: int) -> tuple[int, ...]:
    """Return the elements that ``parameter_alignment`` leaves behind each parameter."""
    found = {
        (0,) * count if paddings is None else paddings.at(index).naturals()
        for paddings in (optim.get("param_alignment_paddings") for optim in files.optims)
    }
    if len(found) > 1 or len(next(iter(found))) != count:
        raise MergeError(f"{files.optims[0].where}: param_alignment_paddings do not fit the {count} parameters")
    return found.pop()


def _check_mapping(files: RankFiles, rank: int, index: int, pieces: Sequence[facts.Piece]) -> None:
    nest = files.optims[rank].at("param_slice_mappings").at(index)
    found = [(fqn, *_address(address)) for fqn, address in nest.items()]
    expected = [(piece.fqn, piece.offset, piece.stop - piece.start) for piece in pieces]
    if found != expected:
        pairs = zip([*found, None], [*expected, None], strict=False)
        one, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise MergeError(
            f"{nest.where} contradicts param_shapes and round_robin_gradients in {files.model.where}, so the "
            f"parameters cannot be located: (name, start, elements) {one} instead of {other}"
        )


def _address(nest: Nest) -> tuple[int, int]:
    if not isinstance(nest.value, FragmentAddress):
        return -1, -1
    plain = Nest(vars(nest.value), nest.where)
    return plain.at("start").natural(), plain.at("numel").natural()


def read_zero3(files: RankFiles) -> OptimizerContents:
    """Read the optimizer files of ZeRO-3. MergeError, UnsupportedError, DamagedError."""
    for optim in files.optims:
        count = optim.at("partition_count")
        partly = isinstance(count.value, list) or count.natural() != files.world_size
        if partly or optim.get("ds_zero_partition_groups"):
            raise UnsupportedError(
                f"{optim.where} is partitioned over a part of the ranks ({count.value} of {files.world_size}; MiCS or "
                "AutoEP), which is not supported"
            )
    bases = [optim.at("optimizer_state_dict") for optim in files.optims]
    require_equal(bases, "param_groups", lambda base: comparable(base.at("param_groups").value))
    hyper, shapes = base_groups(bases[0], files.model), param_shapes(files.model)
    home = {index: group for group, (indices, _) in enumerate(hyper) for index in indices}
    out = OptimizerContents(groups=[{"params": [], "hyper": values} for _, values in hyper])
    sub_groups = []
    for index, sub_group in enumerate(shapes):
        parts = [facts.slice_numel(shape.numel, files.world_size) for shape in sub_group]
        masters = [optim.at("fp32_flat_groups").at(index).tensor() for optim in files.optims]
        for optim, master in zip(files.optims, masters, strict=True):
            if master.shape != (sum(parts),):
                raise MergeError(
                    f"{optim.where}, sub-group {index}: {master.shape} elements instead of the {sum(parts)} in a "
                    f"rank's slices of its parameters on {counted(files.world_size, 'rank')}; name another tag"
                )
        state = flat_state([state_of(base, index) for base in bases], masters, sum(parts))
        placed = [(shape.fqn, shape.numel, part) for shape, part in zip(sub_group, parts, strict=True)]
        for rank in range(files.world_size):
            out.extents += state.extents(rank, facts.slice_pieces(placed, rank))
        _refuse_swapped(state.tensors, placed, [optim.where for optim in files.optims])
        fqns = [shape.fqn for shape in sub_group]
        out.groups[home[index]]["params"] += fqns
        out.add_state(fqns, state)
        sub_groups.append({"params": fqns, "param_group": home[index], "partition_numels": parts})
    out.facts = {
        "zero_optimizer": facts.ZERO_3,
        "partition_count": files.world_size,
        "param_groups": [{"params": list(group["params"])} for group in out.groups],
        "sub_groups": sub_groups,
    }
    out.problems += deepspeed_files.step_problems(files.model, files.optims[0].where, out.steps())
    if all(step is None for step in out.steps()):
        out.problems.append(
            f"the optimizer counts no steps, and ZeRO-3 saves the weights once: nothing tells whether all files in "
            f"{files.folder} are of one save"
        )
    return out


def _refuse_swapped(ranks: Sequence[Mapping[str, FileTensor]], placed: _Placed, files: Sequence[str]) -> None:
    """Raise MergeError if a rank's file has moments where the rank holds padding, and a lower rank's has none there.

    DeepSpeed pads gradients with zeros, so the moments of padding are zeros. Those of another rank's elements are not.
    If all parameters are divisible by the world size there is no padding, and nothing tells ranks apart."""
    held = [[piece.stop - piece.start for piece in facts.slice_pieces(placed, rank)] for rank in range(len(ranks))]
    for rank in range(len(ranks)):
        parts = [part for _, _, part in placed]
        if not _has_moments(ranks[rank], placed, held[rank], parts):
            continue
        for other in range(rank):
            # Only elements that the lower rank holds: what optimizers do to padding need not be the same on all ranks.
            first, stop = held[rank], held[other]
            if not _has_moments(ranks[rank], placed, first, stop) or _has_moments(ranks[other], placed, first, stop):
                continue
            deepspeed_files.refuse(
                {ranks[one][slot].block for one in (rank, other) for slot in _MOMENTS if slot in ranks[one]},
                f"{files[rank]} has moments where rank {rank} holds only padding, and {files[other]} has zeros there: "
                "the optimizer files of these ranks were exchanged. Copy the checkpoint again, or restore their names",
            )


def _has_moments(tensors: Mapping[str, FileTensor], placed: _Placed, first: Sequence[int], stop: Sequence[int]) -> bool:
    """Return whether any moment is not zero in elements [first, stop) of any parameter's slice."""
    for slot in _MOMENTS:
        if slot not in tensors:
            continue
        offset = 0
        for (fqn, _, part), begin, end in zip(placed, first, stop, strict=True):
            if begin < end:
                found = tensors[slot].extent(fqn, slot, 0, end - begin, offset + begin)
                if bool(deepspeed_files.read_elements(found, 0, end - begin).any()):
                    return True
            offset += part
    return False
