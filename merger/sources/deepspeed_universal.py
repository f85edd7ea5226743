"""Universal checkpoints as a source, as DeepSpeed's ``ds_to_universal`` makes them: a directory per parameter.

Tensors are whole in them; which parameter is in which param group still stands in the model states beside them.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

from merger.blocks import Extent, Flaw
from merger.checkpoint import Checkpoint
from merger.sources.deepspeed_checkpoint import build
from merger.sources.deepspeed_classes import STAND_INS
from merger.sources.deepspeed_files import RankFiles, is_universal, read_universal
from merger.sources.deepspeed_one_save import weight_problems
from merger.sources.deepspeed_tags import Tags
from merger.sources.deepspeed_universal_slices import slice_problems
from merger.sources.deepspeed_universal_whole import require_converted, require_one_save, require_whole
from merger.sources.deepspeed_zero import Optimized, Shape, base_groups, param_shapes, scalars_of
from merger.sources.deepspeed_zero12 import in_group_order, is_round_robin
from merger.sources.folder import plain_name
from merger.sources.merged import as_merged
from merger.sources.nest import Nest
from merger.sources.pt import read_pt
from merger.sources.tensor import values
from store.errors import DamagedError, MergeError
from store.files import LocalFiles
from store.names import BUFFER, FROZEN, WEIGHTS

_STEP = "step"
_FP32 = ("fp32", "float32", "float", "torch.float32")
"""Names that DeepSpeed's configuration has for it."""


class UniversalSource:
    """A directory with universal checkpoints, or one of them."""

    kind = "universal"

    def __init__(self, root: Path, files: Path | None = None) -> None:
        self._tags, self._files = Tags(root.absolute(), "latest_universal", is_universal), files

    def steps(self) -> tuple[int, ...]:
        """See :class:`merger.sources.base.Source`."""
        return self._tags.steps()

    def checkpoint(self, step: int | str | None, _: Set[Flaw] = frozenset()) -> Checkpoint:
        """See :class:`merger.sources.base.Source`. None: the one that ``latest_universal`` names."""
        folder = self._tags.folder(step)
        require_converted(folder)
        files = read_universal(folder)
        shapes = param_shapes(files.model)
        found = as_merged(build(files, shapes, _optimized(files, shapes), self._files), files)
        return self._tags.verified(found, step)


def _optimized(files: RankFiles, shapes: list[list[Shape]]) -> Optimized:
    state = files.optims[0]
    own = state.get("driftpoint")
    groups = base_groups(state)
    indices = sorted(index for members, _ in groups for index in members)
    if indices != list(range(len(shapes))):
        raise MergeError(f"{state.where} has {len(indices)} flat partitions, {files.model.where} {len(shapes)}")
    out, local = Optimized(), LocalFiles(files.folder)
    for members, hyper in groups:
        fqns = [shape.fqn for index in members for shape in _in_order(files, shapes[index])]
        out.groups.append({"params": fqns, "hyper": hyper})
    for index, group in enumerate(shapes):
        for shape in group:
            common = _common_scalars(files, index) if own is None else {}
            out.scalars[shape.fqn], found = _parameter(local, shape, common, own)
            out.slots[shape.fqn] = sorted(extent.slot for extent in found if extent.slot != WEIGHTS)
            out.extents += found
    held = {shape.fqn for group in shapes for shape in group if shape.numel}
    whole = [[fqn for fqn in group["params"] if fqn in held] for group in out.groups]
    out.problems += require_whole(files, whole, out, own)
    if files.stage != 3:
        out.problems += weight_problems(files.model.at("module").mapping(), out.extents)
    elif own is None:
        out.problems += slice_problems(files, shapes, out.extents)
    plain = "BF16_Optimizer" if _is_wrapped(files) else "DeepSpeedZeroOptimizer"
    out.facts = {
        "zero_optimizer": "DeepSpeedZeroOptimizer_Stage3" if files.stage == 3 else plain,
        "partition_count": files.world_size if files.stage == 3 else [files.world_size] * len(shapes),
        "param_groups": [{"params": list(group["params"])} for group in out.groups],
    }
    return out


def _is_wrapped(files: RankFiles) -> bool:
    """Whether the run's optimizer was in ``BF16_Optimizer``: its own file has no stage, others' follow the
    configuration."""
    config = files.model.at("ds_config").mapping()
    types, zero = config.get("data_types"), config.get("zero_optimization")
    named = types.get("grad_accum_dtype") if isinstance(types, dict) else None
    offload = zero.get("offload_optimizer") if isinstance(zero, dict) else None
    on_host = isinstance(offload, dict) and offload.get("device") == "cpu"
    configured = files.stage == 1 and files.bf16 and named in _FP32 and not on_host
    return configured or files.optims[0].get("zero_stage") is None


def _in_order(files: RankFiles, group: list[Shape]) -> list[Shape]:
    """A (sub-)group's parameters in the order of the param group. MergeError where the converter mixed them up."""
    if files.stage == 3 or _is_wrapped(files) or not is_round_robin(files.model):
        return group
    ordered = in_group_order(group, files.world_size)
    gaps = files.optims[0].get("param_alignment_paddings")
    aligned = gaps is not None and any(any(entry.naturals()) for entry in gaps.entries())
    # The client state may be anybody's who continued from a merge; DeepSpeed writes this file anew.
    if ordered != group and not aligned and files.optims[0].get("driftpoint") is None:
        raise MergeError(
            f"{files.folder} was converted from a checkpoint with round_robin_gradients, which DeepSpeed's converter "
            "cuts in the wrong places: tensors in it hold parts of others. Merge the checkpoint that it was made from"
        )
    return ordered


def _common_scalars(files: RankFiles, index: int) -> dict[str, Any]:
    """What the optimizer kept for a sub-group beside slots: only at ZeRO-3, where parameters have no ``step.pt``."""
    base = files.optims[0].get("optimizer_state_dict")
    states = None if base is None else base.get("state")
    if states is None or index not in states.mapping():
        return {}
    return scalars_of(states.at(index))


def _parameter(
    local: LocalFiles, shape: Shape, common: dict[str, Any], own: Nest | None
) -> tuple[dict[str, Any], list[Extent]]:
    """(scalars, extents) of a parameter, from its directory. own: what a merge noted of the save, if one wrote it."""
    folder = f"zero/{plain_name(shape.fqn, f'the model states in {local.root}')}"
    scalars, out = dict(common), []
    for name in local.list_dir(folder):
        slot, dot, kind = name.partition(".")
        if (dot, kind) != (".", "pt") or slot in (FROZEN, BUFFER):
            raise DamagedError(f"{local.root / folder / name} is no file of a universal checkpoint")
        nest = Nest(read_pt(local, f"{folder}/{name}", STAND_INS).value, str(local.root / folder / name))
        if slot == _STEP:
            scalars[_STEP] = values(nest.value)
            continue
        require_one_save(nest, own)
        tensor = (nest.at("param") if isinstance(nest.value, dict) else nest).tensor()
        if tensor.shape not in (shape.shape, (shape.numel,)):
            raise MergeError(f"{nest.where} has the shape {tensor.shape}, and {shape.fqn} has {shape.shape}")
        out.append(tensor.extent(shape.fqn, slot, 0, shape.numel))
    return scalars, out
