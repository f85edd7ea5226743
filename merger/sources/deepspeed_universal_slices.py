"""Whether a universal checkpoint's parameters at ZeRO-3 are of one save: rank 0's own slices tell.

Working weights are saved nowhere at ZeRO-3, and parameters have no ``step.pt``. But DeepSpeed's converter leaves rank
0's optimizer state in ``optimizer_state.pt`` as it was, and so the first elements of every parameter in every slot.
Samples of them are compared, and more where the optimizer never touched those: moments that are not zero change with
every step, whatever the gradients. It cannot see another save's elements beyond rank 0's slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from merger.blocks import Extent
from merger.sources.deepspeed_files import RankFiles
from merger.sources.deepspeed_one_save import CHUNK, elements, require_whole, samples
from merger.sources.deepspeed_zero import Shape, state_of
from merger.sources.deepspeed_zero3 import slice_numel
from merger.sources.tensor import FileTensor
from merger.tensors import memory_of
from store.errors import MergeError
from store.names import WEIGHTS
from store.text import listed

_Pairs = Sequence[tuple[Extent, Extent]]
"""Of one parameter, slot by slot: its own file, and rank 0's slice of it."""


def slice_problems(files: RankFiles, shapes: Sequence[Sequence[Shape]], extents: Sequence[Extent]) -> list[str]:
    """Compare the parameters' files with rank 0's slices. Returns what nothing tells.

    shapes: by sub-group. extents: the parameters' files, each whole. MergeError, naming the parameter, where they
    differ; DamagedError where they do because a record is damaged; StorageError.
    """
    found: dict[str, list[Extent]] = {}
    for extent in extents:
        found.setdefault(extent.fqn, []).append(extent)
    unsaid = []
    for index, group in enumerate(shapes):
        kept, offset = _kept(files, index, group), 0
        for shape in group:
            part = min(slice_numel(shape.numel, files.world_size), shape.numel)
            own = [one for one in found.get(shape.fqn, ()) if one.slot in kept]
            pairs = [(one, kept[one.slot].extent(shape.fqn, one.slot, 0, part, offset)) for one in own]
            if shape.numel and (len(own) < len(found.get(shape.fqn, ())) or not _is_told(pairs, part)):
                unsaid.append(shape.fqn)
            offset += slice_numel(shape.numel, files.world_size)
    if not unsaid:
        return []
    line = (
        f"nothing tells whether all files of {listed(unsaid, 6)} in {files.folder / 'zero'} are of one save: "
        f"{files.optims[0].where} has nothing of the optimizer's to compare them with"
    )
    return [line]


def _kept(files: RankFiles, index: int, group: Sequence[Shape]) -> Mapping[str, FileTensor]:
    """Rank 0's flat partitions of a sub-group by slot; none where the converter left none."""
    optim = files.optims[0]
    masters, base = optim.get("fp32_flat_groups"), optim.get("optimizer_state_dict")
    if masters is None or base is None or base.get("state") is None:
        return {}
    state, numel = state_of(base, index), sum(slice_numel(shape.numel, files.world_size) for shape in group)
    tensors = {
        key: nest.value for key, nest in state.items() if isinstance(nest.value, FileTensor) and nest.value.shape
    }
    out = {**tensors, WEIGHTS: masters.at(index).tensor()}
    for slot, tensor in out.items():
        if tensor.shape != (numel,):
            raise MergeError(
                f"{optim.where} has {tensor.shape} elements of {slot} in sub-group {index}, and rank 0's slices in "
                f"{files.model.where} have {numel}: they are of different saves; convert the checkpoint again, into an "
                "empty directory"
            )
    return out


def _is_told(pairs: _Pairs, part: int) -> bool:
    """Whether a comparison of the slices proves that the files are of the same save. part: elements of a slice."""
    silent = {own.slot for own, _ in pairs if own.slot != WEIGHTS}
    if not silent:
        return False
    for start, stop in (*samples(0, part), *_chunks(0, part)):
        for own, slice_ in pairs:
            silent -= {own.slot} if _require_same(own, slice_, start, stop) else set()
        if not silent:
            return True
    # A parameter that takes no part in training has no moments anywhere, and its weights are those of any save.
    return all(not _any(own, part) for own, _ in pairs if own.slot in silent)


def _chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    count = CHUNK // 8
    for at in range(start, stop, count):
        yield at, min(at + count, stop)


def _require_same(own: Extent, slice_: Extent, start: int, stop: int) -> bool:
    """Compare elements [start, stop), bit for bit. Returns whether any of them is not zero."""
    one, other = elements(own, start, stop), elements(slice_, start, stop)
    if one.dtype == other.dtype and memory_of(one) == memory_of(other):
        return bool(one.any())
    for block in (own.block, slice_.block):
        require_whole(block)
    raise MergeError(
        f"{own.fqn}: {own.slot} in {own.block.name} is not what {slice_.block.name} has of it (elements {start} to "
        f"{stop}): files of different saves are mixed; convert the checkpoint again, into an empty directory"
    )


def _any(extent: Extent, start: int) -> bool:
    return any(bool(elements(extent, *chunk).any()) for chunk in _chunks(start, extent.stop))
