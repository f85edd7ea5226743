"""torch DCP (FSDP2).

The optimizer's hyperparameters and counters as torch's own optimizers have them, whatever was training.

DeepSpeed's Adam variants keep fewer hyperparameters than torch's and count steps in plain numbers; torch's AdamW
refuses or ignores such a state. What is added are torch's defaults, which mean the same. It does not know files.

``torch.distributed.checkpoint``, as stock PyTorch with FSDP2 (``fully_shard``) saves and loads it.

Keys are those of ``{"model": ..., "optim": ...}`` with what ``get_state_dict(model, optimizer)`` of
``torch.distributed.checkpoint.state_dict`` gives: ``model.FQN``, ``optim.state.FQN.SLOT``,
``optim.param_groups.N.NAME``. Any number of ranks loads it. Weights are in the dtype of the master weights, which a
load casts to the model's. Counters, random-number states and the user's own objects, by rank, are in ``extra.pt``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
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

from merger.checkpoint import (
    SLOT_OF_KIND,
    Checkpoint,
    ChosenStep,
    Placed,
    Stored,
    changed_steps,
    chosen_steps,
    portable,
    whole,
    with_steps,
)
from merger.io.output_file import OutFile
from merger.layouts.base import LayoutResult, Target, bare_names, model_names
from merger.writers.dcp import DcpFile, DcpMetadata, Item
from merger.writers.torch_zip import PtFile
from store.errors import UnsupportedError
from store.names import Fragment

_ADAMS = frozenset({"FusedAdam", "DeepSpeedCPUAdam"})
"""They compute what torch's AdamW does, or its Adam, by their ``adam_w_mode``."""

_UNTOLD = frozenset({"adam", "adamw", "unknown"})
"""What a foreign checkpoint may call them: it has the configuration's word for it, or none."""

STEP = "step"

CHUNK_BYTES = 1 << 26
"""Tensors are cut along their first dimension into blobs of about this size: a rank reads every blob that it has a
part of, whole."""

_LOAD = (
    "from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict",
    "state = dict(zip(('model', 'optim'), get_state_dict(model, optimizer)))",
    "torch.distributed.checkpoint.load(state, checkpoint_id={out!r})",
    "set_state_dict(model, optimizer, model_state_dict=state['model'], optim_state_dict=state['optim'])",
)


def torch_hyper(checkpoint: Checkpoint) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """(hyperparameters of each param group, what was assumed). UnsupportedError where torch's has no such setting."""
    groups = [dict(portable(group["hyper"])) for group in checkpoint.framework_state["param_groups"]]
    if not _is_theirs(checkpoint):
        return groups, ()
    kind = torch.optim.AdamW if _decoupled(checkpoint.facts) else torch.optim.Adam
    defaults = kind([torch.zeros(1)]).defaults
    filled = []
    for group in groups:
        if not group.pop("bias_correction", True):
            raise UnsupportedError(
                "the run used Adam without bias correction, which torch's optimizers cannot do; merge it with layout "
                "deepspeed"
            )
        group.pop(STEP, None)
        filled.append({**defaults, **group})
    note = (
        f"the run used one of DeepSpeed's own Adams: its state is laid out for torch.optim.{kind.__name__}, which "
        "computes the same up to rounding; load it with that one"
    )
    if not _says_type(checkpoint.facts):
        note += ". The configuration names no optimizer, so nothing says whether its weight decay was decoupled "
        note += "(adam_w_mode): it is taken to be, as it is by default"
    return filled, (note,)


def with_torch_steps(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint with step counts as torch's optimizers have them, a float32 tensor for each parameter; notes.

    Each parameter keeps its own, but where FusedAdam counted for a whole param group in one parameter: there all get
    the group's, and in a composite, to which that parameter may have come from another save, the run's; then the
    certificate says so (:class:`merger.checkpoint.StepsCertificate`).
    """
    if not _is_theirs(checkpoint):
        return checkpoint, ()
    scalars = {fqn: dict(kept) for fqn, kept in checkpoint.framework_state["scalars"].items()}
    chosen: list[tuple[int, float, list[tuple[str, float]]]] = []
    for number, group in enumerate(checkpoint.framework_state["param_groups"]):
        own = {fqn: float(scalars[fqn][STEP]) for fqn in group["params"] if STEP in scalars.get(fqn, {})}
        if own and _counts_in_one(checkpoint, group["hyper"]):
            run = [float(checkpoint.run_steps[fqn]) for fqn in group["params"] if fqn in checkpoint.run_steps]
            common = max(run or own.values())
            if run:
                had = [(checkpoint.record(fqn).layer, step) for fqn, step in own.items()]
                chosen.append((number, common, had))
            own = {fqn: common for fqn in group["params"] if scalars.get(fqn)}
        for fqn, step in own.items():
            scalars[fqn][STEP] = torch.tensor(step)
    state = {**checkpoint.framework_state, "scalars": scalars}
    certificate = with_steps(checkpoint.certificate, chosen_steps(chosen)) if chosen else checkpoint.certificate
    found = replace(checkpoint, framework_state=state, certificate=certificate)
    return found, tuple(_note_on_steps(one) for one in changed_steps(certificate))


def _note_on_steps(one: ChosenStep) -> str:
    return (
        f"FusedAdam counts the steps of a param group in one of its parameters: all those of param group "
        f"{one.param_group} get the run's, {one.chosen:g}, whichever save they are of. Only Adam's bias correction "
        "depends on it"
    )


def _is_theirs(checkpoint: Checkpoint) -> bool:
    name = _name(checkpoint)
    if name in _ADAMS:
        return True
    # A configuration says AdamW for DeepSpeed's and for torch's alike, and nothing of an optimizer that the user made.
    # Hyperparameters tell: torch's have no bias_correction, Lamb's have more.
    return (name or "unknown").lower() in _UNTOLD and any(
        "bias_correction" in group["hyper"] and "max_coeff" not in group["hyper"]
        for group in checkpoint.framework_state["param_groups"]
    )


def _counts_in_one(checkpoint: Checkpoint, hyper: Mapping[str, Any]) -> bool:
    """Whether one parameter has the count of the whole group: FusedAdam's way, where ZeRO does not give it one flat
    partition at a time. DeepSpeedCPUAdam, which alone has ``amsgrad``, counts for each parameter."""
    name = _name(checkpoint)
    fused = name == "FusedAdam" if name in _ADAMS else "amsgrad" not in hyper
    return fused and not checkpoint.facts.get("zero_stage")


def _name(checkpoint: Checkpoint) -> str | None:
    name = checkpoint.framework_state.get("optimizer") or checkpoint.facts.get("optimizer")
    return None if name is None else str(name)


def _says_type(facts: Mapping[str, Any]) -> bool:
    section = _section(facts)
    return section is not None and section.get("type") is not None


def _section(facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What DeepSpeed's configuration says of the optimizer."""
    config = facts.get("ds_config")
    section = config.get("optimizer") if isinstance(config, Mapping) else None
    return section if isinstance(section, Mapping) else None


def _decoupled(facts: Mapping[str, Any]) -> bool:
    """Whether weight decay was decoupled: DeepSpeed takes both ``Adam`` and ``AdamW`` for it unless told otherwise."""
    section = _section(facts)
    if section is None or str(section.get("type", "")).lower() == "adamw":
        return True
    params = section.get("params")
    return bool(params.get("adam_w_mode", True)) if isinstance(params, Mapping) else True


class DcpLayout:
    """One directory for any world size."""

    def lay_out(self, checkpoint: Checkpoint, target: Target) -> LayoutResult:
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
        return LayoutResult(f"step{checkpoint.step}", tuple(out), _LOAD, notes, checkpoint.certificate)


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
