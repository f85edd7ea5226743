"""Whether DeepSpeed's files are of one save: what they count, and whether working weights are the masters' casts.

A fixed tag that is overwritten, and interrupted, leaves files of two saves under one name, and nothing in them names
the save. Steps are compared, and samples of weights. A sample can miss another save where no sampled element
differs in the working dtype: tiny updates, embeddings of tokens that did not occur, a parameter not used. It says
nothing about the optimizer's slots but that they lie in the same file as the masters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from merger.blocks import Block, Extent
from merger.sources.nest import Nest
from merger.sources.tensor import FileTensor
from merger.tensors import memory_of, torch_dtype
from store.errors import DamagedError, MergeError
from store.names import WEIGHTS
from store.text import counted, listed

SAMPLE = 512
"""Elements compared at the begin, the middle and the end of what each rank holds of a parameter."""
CHUNK = 1 << 24
"""Bytes read at once where a whole record has to be checked."""


def step_problems(model: Nest, optimizer: str, steps: Iterable[float | None]) -> list[str]:
    """What is doubtful about the optimizer's steps, against those that the engine took.

    model: model states. optimizer: the file with the steps, for messages. steps: of each flat partition, None where
    the optimizer keeps none; those that never stepped agree with anything. MergeError where the optimizer counts
    more steps than the engine took: no run has that, but for one more, which older releases counted when they made
    the state. Fewer is what a run has that loaded weights alone.
    """
    taken = model.at("global_steps").natural() - model.at("skipped_steps").natural()
    found = sorted({step for step in steps if step})
    if not found:
        return []
    if found[-1] > taken + 1:
        raise MergeError(
            f"{optimizer} counts {counted(found[-1], 'step')} of the optimizer, and {model.where} says that {taken} "
            "were taken: they are of different saves; name a tag whose files are of one save"
        )
    if found[-1] != taken:
        return [
            (
                f"the optimizer counts {counted(found[-1], 'step')}, the engine {taken}: the optimizer's state was "
                f"made anew during the run, or {optimizer} is of another save than {model.where}"
            )
        ]
    if len(found) > 1:
        counts = listed((f"{step:g}" for step in found), 6)
        return [
            f"param groups of {optimizer} count different steps ({counts}): some were trained for a part of the run"
        ]
    return []


def step_in(scalars: Mapping[str, Any], hyper: Mapping[str, Any]) -> float | None:
    """The steps that an optimizer counts for a flat partition, in its state or in the param group; None for none."""
    for values in (scalars, hyper):
        step = values.get("step")
        if isinstance(step, torch.Tensor) and step.numel() == 1:
            return float(step)
        if isinstance(step, int | float) and not isinstance(step, bool):
            return float(step)
    return None


def weight_problems(module: Mapping[str, Any], extents: Iterable[Extent]) -> list[str]:
    """Compare samples of the working weights with the masters, cast. Returns what could not be compared.

    module: working weights as saved, by fqn. MergeError, naming the parameter, where they differ; DamagedError where
    they do because a record is damaged; StorageError.
    """
    skipped = {}
    for extent in extents:
        weights = module.get(extent.fqn)
        if extent.slot != WEIGHTS or not isinstance(weights, FileTensor):
            continue
        if not weights.contiguous or weights.lazy:
            skipped[extent.fqn] = weights.where
            continue
        for start, stop in samples(extent.start, extent.stop):
            _require_cast(
                weights.extent(extent.fqn, "working", extent.start, extent.stop, extent.start), extent, start, stop
            )
    return [
        f"{where}, the working weights of {fqn}, could not be compared with the optimizer's copy"
        for fqn, where in skipped.items()
    ]


def samples(start: int, stop: int) -> list[tuple[int, int]]:
    """The begin, the middle and the end of elements [start, stop); all of a few."""
    if stop - start <= 3 * SAMPLE:
        return [(start, stop)]
    middle = (start + stop) // 2
    return [(start, start + SAMPLE), (middle, middle + SAMPLE), (stop - SAMPLE, stop)]


def _require_cast(working: Extent, master: Extent, start: int, stop: int) -> None:
    one, other = elements(working, start, stop), elements(master, start, stop)
    other = other.to(one.dtype)
    if bool(((one == other) | (one.isnan() & other.isnan())).all()):
        return
    for block in (working.block, master.block):
        require_whole(block)
    raise MergeError(
        f"{working.fqn}: the weights in {working.block.name} are not those in {master.block.name} (elements {start} to "
        f"{stop}), as they are within one save: files of different saves are mixed, or weights were changed behind the "
        "optimizer's back; name another tag"
    )


def elements(extent: Extent, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of the parameter, unchecked."""
    out = torch.empty(stop - start, dtype=torch_dtype(extent.dtype))
    at = extent.block.offset + extent.offset + (start - extent.start) * out.element_size()
    extent.block.files.read_into(extent.block.path, at, memory_of(out))
    return out


def require_whole(block: Block) -> None:
    """Read a block, however large, in pieces. DamagedError unless it matches its checksum; StorageError."""
    running = block.checksum()
    for at in range(0, block.nbytes, CHUNK):
        data = memoryview(bytearray(min(CHUNK, block.nbytes - at)))
        block.files.read_into(block.path, block.offset + at, data)
        running.update(data)
    if running.hexdigest() != block.digest:
        raise DamagedError(f"{block.name}: the bytes of the record do not match its checksum")
