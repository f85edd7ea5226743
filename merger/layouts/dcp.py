"""``torch.distributed.checkpoint``, as stock PyTorch with FSDP2 (``fully_shard``) saves and loads it.

Keys are those of ``{"model": ..., "optim": ...}`` with what ``get_state_dict(model, optimizer)`` of
``torch.distributed.checkpoint.state_dict`` gives: ``model.FQN``, ``optim.state.FQN.SLOT``,
``optim.param_groups.N.NAME``. Any number of ranks loads it. Weights are in the dtype of the master weights, which a
load casts to the model's. Counters, random-number states and the user's own objects, by rank, are in ``extra.pt``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from merger.checkpoint import SLOT_OF_KIND, Checkpoint
from merger.containers.base import OutFile
from merger.containers.dcp import DcpFile, DcpMetadata, Item
from merger.containers.pt import PtFile
from merger.layouts.base import Laid
from merger.layouts.names import bare_names, model_names
from merger.layouts.torch_optimizer import torch_hyper, with_torch_steps
from merger.runstate import portable
from merger.stored import Placed, Stored, whole
from merger.target import Target
from store.names import Fragment

CHUNK_BYTES = 1 << 26
"""Tensors are cut along their first dimension into blobs of about this size: a rank reads every blob that it has a
part of, whole."""

_LOAD = (
    "from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict",
    "state = dict(zip(('model', 'optim'), get_state_dict(model, optimizer)))",
    "torch.distributed.checkpoint.load(state, checkpoint_id={out!r})",
    "set_state_dict(model, optimizer, model_state_dict=state['model'], optim_state_dict=state['optim'])",
)


class DcpLayout:
    """One directory for any world size."""

    def lay_out(self, checkpoint: Checkpoint, target: Target) -> Laid:
        """See :class:`merger.layouts.base.Layout`."""
        state: dict[str, Any] = {"model": _model(checkpoint)}
        notes: tuple[str, ...] = ("there is no optimizer state to write: load the model only",)
        if checkpoint.framework_state.get("param_groups"):
            hyper, notes = torch_hyper(checkpoint)
            checkpoint, more = with_torch_steps(checkpoint)
            notes = (*notes, *more)
            state["optim"] = _optimizer(checkpoint, hyper)
        files, metadata = _planned(state, target.file_bytes)
        out = [OutFile(name, file) for name, file in files.items()]
        out += [OutFile(".metadata", metadata), OutFile("extra.pt", PtFile(_extra(checkpoint)))]
        return Laid(f"step{checkpoint.step}", tuple(out), _LOAD, notes, checkpoint.certificate)


def _model(checkpoint: Checkpoint) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for fqn in model_names(checkpoint).values():
        if fqn not in found:
            found[fqn] = whole(checkpoint, fqn, SLOT_OF_KIND[checkpoint.record(fqn).kind])
    return {name: found[fqn] for name, fqn in model_names(checkpoint).items()}


def _optimizer(checkpoint: Checkpoint, hyper: list[dict[str, Any]]) -> dict[str, Any]:
    """``get_optimizer_state_dict``: state by fqn, groups with fqns in them."""
    bare = bare_names(checkpoint)
    state: dict[str, dict[str, Any]] = {}
    groups = []
    for group, values in zip(checkpoint.framework_state["param_groups"], hyper, strict=True):
        for fqn in group["params"]:
            found = dict(portable(checkpoint.framework_state["scalars"].get(fqn, {})))
            for slot in checkpoint.slots(fqn):
                found[slot] = whole(checkpoint, fqn, slot)
            if found:
                state[bare[fqn]] = found
        groups.append({**values, "params": [bare[fqn] for fqn in group["params"]]})
    return {"state": state, "param_groups": groups}


def _planned(state: dict[str, Any], file_bytes: int) -> tuple[dict[str, DcpFile], DcpMetadata]:
    """All files of a nested state dict, ``.metadata`` apart; tied tensors are written once."""
    flat, mapping = flatten_state_dict(state)
    described: dict[str, BytesStorageMetadata | TensorStorageMetadata] = {}
    items: list[Item] = []
    aliases: dict[MetadataIndex, MetadataIndex] = {}
    names: dict[int, str] = {}
    for name, value in flat.items():
        if isinstance(value, Stored | torch.Tensor):
            chunks = list(_chunks(value))
            described[name] = TensorStorageMetadata(
                TensorProperties(dtype=value.dtype), torch.Size(value.shape), [chunk for chunk, _ in chunks]
            )
            first = names.setdefault(id(value), name)
            for number, (chunk, part) in enumerate(chunks):
                index = MetadataIndex(name, chunk.offsets, number)
                if first == name:
                    items.append(Item(index, part))
                else:
                    aliases[index] = MetadataIndex(first, chunk.offsets, number)
        else:
            described[name] = BytesStorageMetadata()
            items.append(Item(MetadataIndex(name), value))
    files = {f"__{number}_0.distcp": DcpFile(part) for number, part in enumerate(_shared_out(items, file_bytes))}
    metadata = Metadata(described, planner_data=mapping, storage_meta=StorageMeta())
    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    if version is not None:  # older releases number nothing
        metadata.version = version
    return files, DcpMetadata(metadata, files, aliases)


def _chunks(value: Stored | torch.Tensor) -> Iterator[tuple[ChunkStorageMetadata, Stored | torch.Tensor]]:
    """A tensor cut into runs of rows, each a blob of its own. Small tensors that are there already stay whole."""
    shape = torch.Size(value.shape)
    if not isinstance(value, Stored) or value.nbytes <= CHUNK_BYTES:
        yield ChunkStorageMetadata(torch.Size([0] * len(shape)), shape), value
        return
    row = math.prod(shape[1:])
    rows = max(1, CHUNK_BYTES // (row * value.dtype.itemsize))
    for first in range(0, shape[0], rows):
        sizes = torch.Size((min(rows, shape[0] - first), *shape[1:]))
        offsets = torch.Size((first, *([0] * (len(shape) - 1))))
        yield ChunkStorageMetadata(offsets, sizes), _part(value, tuple(sizes), first * row)


def _part(whole_one: Stored, shape: tuple[int, ...], start: int) -> Stored:
    """Elements from ``start`` of a planned tensor that is one whole parameter, as a tensor of their own."""
    (placed,) = whole_one.placed
    fragment = placed.fragment
    return Stored(shape, whole_one.dtype, (Placed(Fragment(fragment.fqn, fragment.slot, start, math.prod(shape)), 0),))


def _shared_out(items: list[Item], file_bytes: int) -> list[list[Item]]:
    """Files of about ``file_bytes``, at least one, plain values in the first."""
    parts: list[list[Item]] = [[]]
    size = 0
    for item in sorted(items, key=lambda one: isinstance(one.value, Stored)):
        if parts[-1] and size + item.nbytes > file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(item)
        size += item.nbytes
    return parts


def _extra(checkpoint: Checkpoint) -> Mapping[str, Any]:
    state = checkpoint.framework_state
    ranks = {
        rank: {"rng": portable(one.rng), "user": portable(one.user)} for rank, one in checkpoint.run_states.items()
    }
    return {
        "save": checkpoint.certificate.save,
        "step": checkpoint.step,
        "counters": portable(state.get("counters")),
        "lr_scheduler": portable(state.get("lr_scheduler")),
        "loss_scaler": portable(state.get("loss_scaler")),
        "client_state": portable(checkpoint.client_state),
        "ranks": ranks,
    }
