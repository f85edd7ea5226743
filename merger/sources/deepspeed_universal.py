"""Read universal checkpoints, as ``ds_to_universal`` makes them, and check that their files are of one save.

Tensors are whole, a directory per parameter; the model states say which parameter is in which param group. A directory
may be missing, left from another save, or half copied. ZeRO-3 saves no working weights, but the converter keeps rank
0's optimizer state in ``optimizer_state.pt``, with each parameter's first elements in every slot. Samples of these are
compared; nonzero moments change at every step. Another save's elements beyond rank 0's slice are not detected."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from merger.io.blocks import Extent
from merger.layouts.deepspeed_facts import BF16_OPTIMIZER, ZERO_3, ZERO_12, optimizer_wrapper, slice_numel
from merger.sources import deepspeed_files
from merger.sources import deepspeed_zero as zero
from merger.sources.base import FileTensor, Nest, checked_name, read_values
from merger.sources.deepspeed import DeepSpeedSource
from merger.sources.deepspeed_files import RankFiles
from merger.sources.deepspeed_zero import OptimizerContents, Shape
from merger.sources.torch_file import read_pt
from merger.tensors import memory_of
from store.errors import DamagedError, MergeError
from store.names import BUFFER, FROZEN, WEIGHTS, group_by_key
from store.storage.local import LocalFiles
from store.text import listed

CONVERTED = ("exp_avg", "exp_avg_sq")  # slots that DeepSpeed's converter writes for every parameter, or fails
_UNFINISHED = "tmp"  # working directory of the converter beside `zero`, removed when all of `zero` is written
_STEP = "step"


class UniversalSource(DeepSpeedSource):
    """A directory of universal checkpoints, or one of them."""

    kind, latest = "universal", "latest_universal"
    is_one = staticmethod(deepspeed_files.is_universal)

    def _read(self, folder: Path) -> tuple[RankFiles, OptimizerContents]:
        if (folder / _UNFINISHED).is_dir():  # it may hold files of an earlier conversion
            raise MergeError(
                f"{folder / _UNFINISHED} exists, so ds_to_universal was interrupted, and {folder / 'zero'} may hold "
                "files of an earlier conversion. Convert the checkpoint again into an empty directory (or remove "
                f"{_UNFINISHED} if --keep_temp_folder kept it)"
            )
        files = deepspeed_files.read_universal(folder)
        return files, _read_optimizer(files)


def _read_optimizer(files: RankFiles) -> OptimizerContents:
    shapes, state = zero.param_shapes(files.model), files.optims[0]
    own, groups = state.get("driftpoint"), zero.base_groups(state, files.model)
    out, local = OptimizerContents(), LocalFiles(files.folder)
    for members, hyper in groups:
        fqns = [shape.fqn for index in members for shape in _in_order(files, shapes[index])]
        out.groups.append({"params": fqns, "hyper": hyper})
    for index, group in enumerate(shapes):
        # Only ZeRO-3 keeps the scalars of a sub-group together: there is no ``step.pt``.
        base = files.optims[0].get("optimizer_state_dict") if own is None else None
        common = {} if base is None or base.get("state") is None else zero.scalars_of(zero.state_of(base, index))
        for shape in group:
            out.scalars[shape.fqn], found = _parameter(local, shape, common, own)
            out.slots[shape.fqn] = sorted(extent.slot for extent in found if extent.slot != WEIGHTS)
            out.extents += found
    held = {shape.fqn for group in shapes for shape in group if shape.numel}
    whole = [[fqn for fqn in group["params"] if fqn in held] for group in out.groups]
    require_whole_groups(files, whole, out, own)
    if own is None:
        out.problems += _doubts(files, out)
    if own is not None and own.get("contents") is not None:  # every file notes a checksum of the whole state
        out.vouched |= {(extent.fqn, extent.slot) for extent in out.extents}
    if files.stage != 3:
        out.compare_weights(files.model)
    elif own is None:
        out.problems += slice_problems(files, shapes, out.extents)
    plain = BF16_OPTIMIZER if _is_wrapped(files) else ZERO_12
    out.facts = {
        "zero_optimizer": ZERO_3 if files.stage == 3 else plain,
        "partition_count": files.world_size if files.stage == 3 else [files.world_size] * len(shapes),
        "param_groups": [{"params": list(group["params"])} for group in out.groups],
    }
    return out


def _is_wrapped(files: RankFiles) -> bool:
    """Return whether the run used ``BF16_Optimizer``: its own file has no stage; else by configuration."""
    wrapper = optimizer_wrapper(files.stage, "bf16" if files.bf16 else "", files.model.at("ds_config").mapping())
    return wrapper == BF16_OPTIMIZER or files.optims[0].get("zero_stage") is None


def _in_order(files: RankFiles, group: list[Shape]) -> list[Shape]:
    """Return a (sub-)group's parameters in the order of the param group. MergeError if the converter broke it."""
    if files.stage == 3 or _is_wrapped(files) or not zero.is_round_robin(files.model):
        return group
    ordered = zero.in_group_order(group, files.world_size)
    gaps = files.optims[0].get("param_alignment_paddings")
    aligned = gaps is not None and any(any(entry.naturals()) for entry in gaps.entries())
    # A run may pass on a merge's client state; this file is always written anew by DeepSpeed.
    if ordered != group and not aligned and files.optims[0].get("driftpoint") is None:
        raise MergeError(
            f"{files.folder} was converted from a checkpoint with round_robin_gradients, which DeepSpeed's converter "
            "cuts at the wrong offsets: its tensors hold parts of others. Merge the original checkpoint"
        )
    return ordered


def _parameter(
    local: LocalFiles, shape: Shape, common: dict[str, Any], own: Nest | None
) -> tuple[dict[str, Any], list[Extent]]:
    """Return (scalars, extents) of a parameter's directory. ``own``: note of the save if a merge wrote it."""
    folder = f"zero/{checked_name(shape.fqn, f'the model states in {local.root}')}"
    scalars, out = dict(common), []
    for name in local.list_dir(folder):
        slot, dot, kind = name.partition(".")
        if (dot, kind) != (".", "pt") or slot in (FROZEN, BUFFER):
            raise DamagedError(f"{local.root / folder / name} is not a file of a universal checkpoint; remove it")
        nest = Nest(read_pt(local, f"{folder}/{name}")[0], str(local.root / folder / name))
        if slot == _STEP:
            scalars[_STEP] = read_values(nest.value)
            continue
        require_one_save(nest, own)
        tensor = (nest.at("param") if isinstance(nest.value, dict) else nest).tensor()
        if tensor.shape not in (shape.shape, (shape.numel,)):
            raise MergeError(
                f"{nest.where} has the shape {tensor.shape}, but {shape.fqn} has {shape.shape}; copy the checkpoint "
                "again"
            )
        out.append(tensor.extent(shape.fqn, slot, 0, shape.numel))
    return scalars, out


def require_one_save(found: Nest, own: Nest | None) -> None:
    """Raise MergeError unless a file's note of its save equals ``own``, that of ``optimizer_state.pt``."""
    if own is None or not isinstance(found.value, dict):
        return
    noted, expected = found.get("driftpoint"), _save_note(own)
    if noted is None or _save_note(noted) != expected:
        actual = "no save" if noted is None else f"step {noted.at('step').value} of {noted.at('save').value}"
        if noted is not None and _save_note(noted)[:2] == expected[:2]:
            actual = f"another state with the name {actual}"
        raise MergeError(
            f"{found.where} is of {actual}, but {own.where} is of step {expected[1]} of {expected[0]}: files of two "
            "saves are mixed; copy the checkpoint again"
        )


def slice_problems(files: RankFiles, shapes: Sequence[Sequence[Shape]], extents: Sequence[Extent]) -> Iterator[str]:
    """Compare the parameters' files with rank 0's slices. Yields what could not be verified.

    ``extents``: the parameters' files, each whole. Raises MergeError, naming the parameter, if they differ;
    DamagedError if a damaged record is the reason; StorageError if reading failed."""
    found = group_by_key((extent.fqn, extent) for extent in extents)
    unverified = []
    for index, group in enumerate(shapes):
        slices, offset = _rank0_partitions(files, index, group), 0
        for shape in group:
            part = min(slice_numel(shape.numel, files.world_size), shape.numel)
            comparable = [one for one in found.get(shape.fqn, ()) if one.slot in slices]
            pairs = [(one, slices[one.slot].extent(shape.fqn, one.slot, 0, part, offset)) for one in comparable]
            if shape.numel and (len(pairs) < len(found.get(shape.fqn, ())) or not _is_verified(pairs, part)):
                unverified.append(shape.fqn)
            offset += slice_numel(shape.numel, files.world_size)
    if unverified:
        yield (
            f"nothing tells whether all files of {listed(unverified, 6)} in {files.folder / 'zero'} are of one save: "
            f"{files.optims[0].where} has nothing of the optimizer's to compare them with"
        )


def _rank0_partitions(files: RankFiles, index: int, group: Sequence[Shape]) -> Mapping[str, FileTensor]:
    """Return rank 0's flat partitions of a sub-group by slot; none if the converter kept none."""
    optim = files.optims[0]
    masters, base = optim.get("fp32_flat_groups"), optim.get("optimizer_state_dict")
    if masters is None or base is None or base.get("state") is None:
        return {}
    state, numel = zero.state_of(base, index), sum(slice_numel(shape.numel, files.world_size) for shape in group)
    tensors = {key: one.value for key, one in state.items() if isinstance(one.value, FileTensor) and one.value.shape}
    out = {**tensors, WEIGHTS: masters.at(index).tensor()}
    for slot, tensor in out.items():
        if tensor.shape != (numel,):
            raise MergeError(
                f"{optim.where} has {tensor.shape} elements of {slot} in sub-group {index}, but rank 0's slices in "
                f"{files.model.where} have {numel}, so they are of different saves; convert the checkpoint again into "
                "an empty directory"
            )
    return out


def _is_verified(pairs: Sequence[tuple[Extent, Extent]], part: int) -> bool:
    """Return whether comparing (own file, rank 0's slice) of each slot, ``part`` elements, proves one save."""
    unproven = {own.slot for own, _ in pairs if own.slot != WEIGHTS}
    if not unproven:
        return False
    for start, stop in (*deepspeed_files.sample_ranges(0, part), *_chunks(0, part)):
        for own, slice_ in pairs:
            unproven -= {own.slot} if _require_same(own, slice_, start, stop) else set()
        if not unproven:
            return True
    # A parameter that is never trained has no moments anywhere, and the same weights in every save.
    rest = [(own, chunk) for own, _ in pairs if own.slot in unproven for chunk in _chunks(part, own.stop)]
    return not any(bool(deepspeed_files.read_elements(own, *chunk).any()) for own, chunk in rest)


def _chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    count = deepspeed_files.CHUNK // 8
    for at in range(start, stop, count):
        yield at, min(at + count, stop)


def _require_same(own: Extent, slice_: Extent, start: int, stop: int) -> bool:
    """Compare elements [start, stop), bit for bit. Returns whether any of them is not zero."""
    one, other = deepspeed_files.read_elements(own, start, stop), deepspeed_files.read_elements(slice_, start, stop)
    if one.dtype != other.dtype or memory_of(one) != memory_of(other):
        deepspeed_files.refuse(
            (own.block, slice_.block),
            f"{own.fqn}: {own.slot} in {own.block.name} differs from {slice_.block.name} (elements {start} to {stop}), "
            "so files of different saves are mixed; convert the checkpoint again into an empty directory",
        )
    return bool(one.any())


def _save_note(own: Nest) -> tuple[Any, ...]:
    """Return save, step, and the checksum of the contents, which early releases did not write."""
    return own.at("save").value, own.at("step").value, own.mapping().get("contents")


def require_whole_groups(
    files: RankFiles, groups: Sequence[Sequence[str]], found: OptimizerContents, own: Nest | None
) -> None:
    """Raise MergeError unless all parameters of a param group have the same slots and step, and no file is surplus.

    ``groups``: parameters that have elements."""
    _refuse_surplus(files, found)
    if own is not None and own.at("step").value != files.model.at("global_steps").natural():
        raise MergeError(
            f"{own.where} is of step {own.at('step').value}, but {files.model.where} is of step "
            f"{files.model.at('global_steps').value}: files of two saves are mixed; copy the checkpoint again"
        )
    for i, group in enumerate(groups):
        expected = set(CONVERTED) if own is None else {slot.text() for slot in own.at("slots").at(i).entries()}
        _require_equal(files, group, expected.union(*(found.slots[fqn] for fqn in group)), found.scalars)


def _refuse_surplus(files: RankFiles, found: OptimizerContents) -> None:
    """Raise MergeError for a directory of an unknown parameter.

    The converter gives everything else in the model (frozen parameters, buffers, other names of tied parameters) a
    directory with only its value. Those are read from the model states, which have them in their own dtype."""
    place, local, module = files.folder / "zero", LocalFiles(files.folder), files.model.get("module")
    of_the_model = set(module.mapping()) if module is not None else set()
    for name in local.list_dir("zero"):
        value_only = name in of_the_model and list(local.list_dir(f"zero/{name}")) == ["fp32.pt"]
        if name not in found.slots and not value_only and (place / name).is_dir():
            raise MergeError(
                f"{place / name} is not a parameter of {files.model.where}: it may be of another model or save; remove "
                "it if it does not belong there"
            )


def _require_equal(files: RankFiles, group: Sequence[str], slots: set[str], scalars: dict[str, dict[str, Any]]) -> None:
    held = {fqn: set(LocalFiles(files.folder).list_dir(f"zero/{fqn}")) for fqn in group}
    for fqn in group:
        if missing := sorted(slot for slot in slots if f"{slot}.pt" not in held[fqn]):
            raise MergeError(
                f"{files.folder / 'zero' / fqn} has no {', '.join(f'{slot}.pt' for slot in missing)}, unlike the other "
                "parameters of its param group; copy the checkpoint again"
            )
    first = group[0] if group else ""
    for fqn in group[1:]:
        if deepspeed_files.comparable(scalars[fqn]) != deepspeed_files.comparable(scalars[first]):
            raise MergeError(
                f"{files.folder / 'zero' / fqn} has the scalars {scalars[fqn]}, but {first} of the same param group "
                f"has {scalars[first]}: one of them is of another save; copy the checkpoint again"
            )


def _doubts(files: RankFiles, found: OptimizerContents) -> Iterator[str]:
    """Yield doubts from step counts: an optimizer not loaded with its model restarts at 0, which proves nothing."""
    counted = files.model.at("global_steps").natural() - files.model.at("skipped_steps").natural()
    each = found.steps()
    steps = {step for step in each if step is not None}
    if not steps and each and files.stage == 3:
        yield (
            "the optimizer counts no steps, and ZeRO-3 saves the weights once: nothing tells whether "
            f"{files.folder / 'zero'} and {files.model.where} are of one save"
        )
    elif not steps <= {float(counted)}:
        yield (
            f"the optimizer in {files.folder / 'zero'} has made {listed((f'{step:g}' for step in sorted(steps)), 6)} "
            f"steps, and {files.model.where} counts {counted}: it was started anew in between, or is of another save"
        )
