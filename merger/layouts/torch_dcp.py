"""Write state dicts of stock PyTorch: ``torch.distributed.checkpoint``, and ``model.pt`` with ``optimizer.pt``.

DCP is as FSDP2 (``fully_shard``) and torchtitan load it. Keys are those of ``get_state_dict(model, optimizer)`` as
``{"model": ..., "optim": ...}``: ``model.FQN``, ``optim.state.FQN.SLOT``, ``optim.param_groups.N.NAME``. torchtitan's
keys are further names of the same bytes: ``FQN``, ``optimizer.state.FQN.SLOT``, ``optimizer.param_groups.FQN.NAME``.
Any number of ranks loads it. Weights are in the dtype of the master weights, which a load casts to the model's.
Counters, random-number states and the user's objects, by rank and name, are in ``extra.pt``. Hyperparameters and step
counts of DeepSpeed's Adam variants become those of torch's optimizers, which otherwise refuse or ignore them. The other
two files are for ``load_state_dict``, where every rank holds everything. Neither needs Driftpoint installed."""

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from merger import checkpoint as checkpoints
from merger.checkpoint import Checkpoint, Placement, PlannedTensor, plan_parameter, to_portable
from merger.io.output_file import OutFile, VerbatimFile
from merger.layouts.base import LayoutResult, Target, canonical_names, grouped, model_names, share_tied, strip_wrappers
from merger.writers.dcp import DcpFile, DcpMetadata, Item
from merger.writers.torch_zip import PtFile
from store.errors import UnsupportedError
from store.state_tree import PACKED

_ADAMS = frozenset({"FusedAdam", "DeepSpeedCPUAdam"})  # torch's AdamW or Adam, by their `adam_w_mode`
_AMBIGUOUS = frozenset({"adam", "adamw", "unknown"})  # what foreign checkpoints call them, after the configuration
STEP = "step"
CHUNK_BYTES = 1 << 26  # size of the blobs that tensors are cut into along their first dimension: ranks read whole ones
_TORCHTITAN = (
    "torchtitan loads it under the name step-N in its checkpoint folder, with exclude_from_loading=[dataloader]; the "
    "schedule continues at the step, and ntokens_seen starts at 0"
)
_LOAD = (
    "from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict",
    "state = dict(zip(('model', 'optim'), get_state_dict(model, optimizer)))",
    "torch.distributed.checkpoint.load(state, checkpoint_id={out!r})",
    "set_state_dict(model, optimizer, model_state_dict=state['model'], optim_state_dict=state['optim'])",
)


def dcp_layout(checkpoint: Checkpoint, target: Target) -> LayoutResult:
    """Plan one directory for any world size."""
    model = share_tied(model_names(checkpoint), lambda fqn: plan_parameter(checkpoint, fqn))
    state: dict[str, Any] = {"model": model}
    notes: tuple[str, ...] = ("there is no optimizer state to write: load the model only",)
    if checkpoint.framework_state.get("param_groups"):
        hyper, notes = torch_hyper(checkpoint)
        checkpoint, more = with_torch_steps(checkpoint)
        notes = (*notes, *more)
        state["optim"] = _optimizer(checkpoint, hyper)
        state |= _of_torchtitan(checkpoint, model, state["optim"])
        notes = (*notes, _TORCHTITAN)
    files, metadata = _plan_files(state, target.file_bytes)
    out = [OutFile(name, file) for name, file in files.items()]
    engine = {key: checkpoint.framework_state.get(key) for key in ("counters", "lr_scheduler", "loss_scaler")}
    extra, load = _extra(checkpoint, to_portable({**engine, "client_state": checkpoint.client_state}))
    out += [OutFile(".metadata", metadata), extra]
    return LayoutResult(f"step{checkpoint.step}", tuple(out), (*_LOAD, *load), notes, checkpoint.certificate)


def _optimizer(checkpoint: Checkpoint, hyper: list[dict[str, Any]]) -> dict[str, Any]:
    """Return ``get_optimizer_state_dict``: state by fqn, and param groups with fqns."""
    names = dict.fromkeys([*canonical_names(checkpoint), *checkpoint.tensors])  # as the model's are stripped
    bare = dict(zip(names, strip_wrappers(names), strict=True))
    state: dict[str, dict[str, Any]] = {}
    groups = []
    for group, values in zip(checkpoint.framework_state["param_groups"], hyper, strict=True):
        for fqn in group["params"]:
            if found := parameter_state(checkpoint, fqn):
                state[bare[fqn]] = found
        groups.append({**values, "params": [bare[fqn] for fqn in group["params"]]})
    return {"state": state, "param_groups": groups}


def _of_torchtitan(checkpoint: Checkpoint, model: Mapping[str, Any], optim: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values under torchtitan's names; nothing if a parameter already has one of them."""
    flat = {f"state.{fqn}.{key}": value for fqn, kept in optim["state"].items() for key, value in kept.items()}
    for group in optim["param_groups"]:
        hyper = {"initial_lr": group.get("lr"), **group}  # which torchtitan's schedules always have
        del hyper["params"]
        flat |= {f"param_groups.{fqn}.{key}": value for fqn in group["params"] for key, value in hyper.items()}
    trained = {"step": checkpoint.step, "ntokens_seen": 0}
    named = {"optimizer": flat, "lr_scheduler": {"last_epoch": checkpoint.step}, "train_state": trained}
    taken = {"model", "optim", *named, *(f"model.{fqn}" for fqn in model)}
    return {} if taken & model.keys() else {**model, **named}


def _plan_files(state: dict[str, Any], file_bytes: int) -> tuple[dict[str, DcpFile], DcpMetadata]:
    """Plan all files of a nested state dict, with ``.metadata``; a value under several names is written once."""
    flat, mapping = flatten_state_dict(state)
    described: dict[str, dcp.BytesStorageMetadata | dcp.TensorStorageMetadata] = {}
    items: list[Item] = []
    aliases: dict[dcp.MetadataIndex, dcp.MetadataIndex] = {}
    names: dict[int, str] = {}
    for name, value in flat.items():
        blobs: list[tuple[tuple[Any, ...], Any]] = [((), value)]
        if isinstance(value, PlannedTensor | torch.Tensor):
            chunks = list(_chunks(value))
            described[name] = dcp.TensorStorageMetadata(
                dcp.TensorProperties(dtype=value.dtype), torch.Size(value.shape), [chunk for chunk, _ in chunks]
            )
            blobs = [((chunk.offsets, number), part) for number, (chunk, part) in enumerate(chunks)]
        else:
            described[name] = dcp.BytesStorageMetadata()
        first = names.setdefault(id(value), name)
        for place, blob in blobs:
            if first == name:
                items.append(Item(dcp.MetadataIndex(name, *place), blob))
            else:
                aliases[dcp.MetadataIndex(name, *place)] = dcp.MetadataIndex(first, *place)
    items.sort(key=lambda one: isinstance(one.value, PlannedTensor))  # plain values are in the first file
    parts = grouped(items, lambda item: item.nbytes, file_bytes)
    files = {f"__{number}_0.distcp": DcpFile(part) for number, part in enumerate(parts)}
    metadata = dcp.Metadata(described, planner_data=mapping, storage_meta=dcp.StorageMeta())
    if (version := getattr(filesystem, "CURRENT_DCP_VERSION", None)) is not None:  # older releases have no version
        metadata.version = version
    return files, DcpMetadata(metadata, files, aliases)


def _chunks(value: PlannedTensor | torch.Tensor) -> Iterator[tuple[dcp.ChunkStorageMetadata, Any]]:
    """Cut a tensor into runs of rows, one blob each. Tensors with values stay whole."""
    shape = torch.Size(value.shape)
    if not isinstance(value, PlannedTensor) or value.nbytes <= CHUNK_BYTES:
        yield dcp.ChunkStorageMetadata(torch.Size([0] * len(shape)), shape), value
        return
    row = math.prod(shape[1:])
    rows = max(1, CHUNK_BYTES // (row * value.dtype.itemsize))
    for first in range(0, shape[0], rows):
        sizes = torch.Size((min(rows, shape[0] - first), *shape[1:]))
        offsets = torch.Size((first, *([0] * (len(shape) - 1))))
        fragment = value.placed[0].fragment._replace(start=first * row, numel=math.prod(sizes))
        part = PlannedTensor(tuple(sizes), value.dtype, (Placement(fragment, 0),))
        yield dcp.ChunkStorageMetadata(offsets, sizes), part


def _extra(checkpoint: Checkpoint, more: Mapping[str, Any]) -> tuple[OutFile, tuple[str, ...]]:
    """Plan ``extra.pt``. Return also the line that loads the user's objects of rank 0, if there are any."""
    ranks = checkpoints.portable_run_states(checkpoint, checkpoint.run_states)
    extra = {"save": checkpoint.certificate.save, "step": checkpoint.step, **more, "ranks": ranks}
    key = next((key for key in ("state", "user") if ranks.get(0, {}).get(key)), None)
    load = () if key is None else (f"objects = torch.load({{out:extra.pt}})['ranks'][0]['{key}']",)
    return OutFile("extra.pt", PtFile(extra)), load


def torch_hyper(checkpoint: Checkpoint) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return (hyperparameters of each param group, notes). UnsupportedError if torch has no such setting."""
    groups = [dict(to_portable(group["hyper"])) for group in checkpoint.framework_state["param_groups"]]
    if not _uses_deepspeed_adam(checkpoint):
        return groups, ()
    optimizer = checkpoints.config_section(checkpoint.facts, "ds_config", "optimizer")
    # DeepSpeed's default for both ``Adam`` and ``AdamW`` is decoupled weight decay.
    decoupled = checkpoints.config_section(optimizer, "params").get("adam_w_mode", True)
    named = str(optimizer.get("type", "")).lower()
    kind = torch.optim.AdamW if decoupled or named == "adamw" else torch.optim.Adam
    defaults = kind([torch.zeros(1)]).defaults
    filled = []
    for group in groups:
        if not group.pop("bias_correction", True):
            raise UnsupportedError(
                "the run used Adam without bias correction, which torch's optimizers lack; merge it with layout "
                "deepspeed"
            )
        group.pop(STEP, None)
        filled.append({**defaults, **group})
    note = (
        f"the run used one of DeepSpeed's own Adams: its state is laid out for torch.optim.{kind.__name__}, which "
        "computes the same up to rounding; load it with that one"
    )
    if optimizer.get("type") is None:
        note += ". The configuration names no optimizer, so nothing says whether its weight decay was decoupled "
        note += "(adam_w_mode): it is taken to be, as it is by default"
    return filled, (note,)


def with_torch_steps(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return the checkpoint with step counts as in torch's optimizers, a float32 tensor per parameter, and notes.

    Each parameter keeps its own step, unless FusedAdam counted for a whole param group in one parameter. Then all get
    the group's step; in a composite, where that parameter may be of another save, they get the run's, which the
    certificate records (:class:`merger.checkpoint.StepsCertificate`)."""
    if not _uses_deepspeed_adam(checkpoint):
        return checkpoint, ()
    scalars = {fqn: dict(kept) for fqn, kept in checkpoint.framework_state["scalars"].items()}
    chosen: list[tuple[int, float, list[tuple[str, float]]]] = []
    for number, group in enumerate(checkpoint.framework_state["param_groups"]):
        steps = {fqn: float(scalars[fqn][STEP]) for fqn in group["params"] if STEP in scalars.get(fqn, {})}
        if steps and _counts_in_one(checkpoint, group["hyper"]):
            in_run = [float(checkpoint.run_steps[fqn]) for fqn in group["params"] if fqn in checkpoint.run_steps]
            common = max(in_run or steps.values())
            if in_run:
                chosen.append((number, common, [(checkpoint.record(fqn).layer, step) for fqn, step in steps.items()]))
            steps = {fqn: common for fqn in group["params"] if scalars.get(fqn)}
        for fqn, step in steps.items():
            scalars[fqn][STEP] = torch.tensor(step)
    state = {**checkpoint.framework_state, "scalars": scalars}
    certificate = checkpoints.with_steps(checkpoint.certificate, chosen) if chosen else checkpoint.certificate
    notes = (
        f"FusedAdam counts the steps of a param group in one of its parameters: all those of param group "
        f"{one.param_group} get the run's, {one.chosen:g}, whichever save they are of. Only Adam's bias correction "
        "depends on it"
        for one in checkpoints.changed_steps(certificate)
    )
    return replace(checkpoint, framework_state=state, certificate=certificate), tuple(notes)


def _uses_deepspeed_adam(checkpoint: Checkpoint) -> bool:
    name = _name(checkpoint)
    if name in _ADAMS:
        return True
    # A configuration names DeepSpeed's and torch's AdamW alike, and no optimizer of the user's. The hyperparameters
    # distinguish them: torch's have no bias_correction, Lamb's have more.
    return (name or "unknown").lower() in _AMBIGUOUS and any(
        "bias_correction" in group["hyper"] and "max_coeff" not in group["hyper"]
        for group in checkpoint.framework_state["param_groups"]
    )


def _counts_in_one(checkpoint: Checkpoint, hyper: Mapping[str, Any]) -> bool:
    """Return whether one parameter has the step count of the whole group, as FusedAdam does without ZeRO.

    DeepSpeedCPUAdam, which alone has ``amsgrad``, counts for each parameter."""
    name = _name(checkpoint)
    fused = name == "FusedAdam" if name in _ADAMS else "amsgrad" not in hyper
    return fused and not checkpoint.facts.get("zero_stage")


def _name(checkpoint: Checkpoint) -> str | None:
    name = checkpoint.framework_state.get("optimizer") or checkpoint.facts.get("optimizer")
    return None if name is None else str(name)


def torch_layout(checkpoint: Checkpoint, _: Target) -> LayoutResult:
    """Plan the files of a model and an optimizer that every rank holds whole."""
    # As in ``model.state_dict()``, tied tensors are under each of their names.
    model = OrderedDict(share_tied(canonical_names(checkpoint), lambda fqn: plan_parameter(checkpoint, fqn)))
    extra, more = _extra(checkpoint, {})
    members = sorted({group.get("member", 0) for group in checkpoint.framework_state["param_groups"]})
    names = {member: f"optimizer.{member}" if len(members) > 1 else "optimizer" for member in members}
    files = [OutFile(f"{name}.pt", PtFile(optimizer_state(checkpoint, member))) for member, name in names.items()]
    if len(members) == 1:  # for an import
        groups = [list(group["params"]) for group in checkpoint.framework_state["param_groups"]]
        files.append(OutFile("param_names.json", VerbatimFile(json.dumps(groups).encode())))
    objects = {"model": "model", **{name: name.replace(".", "[") + "]" * ("." in name) for name in names.values()}}
    load = tuple(f"{item}.load_state_dict(torch.load({{out:{name}.pt}}))" for name, item in objects.items())
    return LayoutResult(f"step{checkpoint.step}", (OutFile("model.pt", PtFile(model)), *files, extra), (*load, *more))


def optimizer_state(checkpoint: Checkpoint, member: int = 0) -> dict[str, Any]:
    """Return ``state_dict()`` of an optimizer: parameters numbered in the order of its param groups."""
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group in checkpoint.framework_state["param_groups"]:
        if group.get("member", 0) != member:
            continue
        members = range(number, number + len(group["params"]))
        number = members.stop
        for index, fqn in zip(members, group["params"], strict=True):
            if found := parameter_state(checkpoint, fqn):
                state[index] = found
        groups.append({**to_portable(group["hyper"]), "params": list(members)})
    return {"state": state, "param_groups": groups}


def parameter_state(checkpoint: Checkpoint, fqn: str) -> dict[str, Any]:
    """Return the optimizer's state of a parameter: its scalars, then its slots."""
    scalars = checkpoint.framework_state["scalars"].get(fqn, {})
    for key, value in scalars.items():
        if isinstance(value, Mapping) and PACKED in value:
            raise UnsupportedError(
                f"optimizer state {key!r} of {fqn} is a {'.'.join(value[PACKED])}, which only a resume makes again: "
                "write layout hf"
            )
    slots = {slot: checkpoints.plan_whole(checkpoint, fqn, slot) for slot in checkpoint.slots(fqn)}
    return {**to_portable(scalars), **slots}
