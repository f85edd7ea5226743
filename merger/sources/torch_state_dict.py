"""Read training states of plain PyTorch: files of ``torch.save``, and folders of the Trainer and of Accelerate.

``optimizer.state_dict()`` numbers the parameters. Their names are taken from ``param_names`` in its param groups (an
optimizer made of named parameters), else from ``param_names.json`` beside it, else, in a folder of the Trainer, from
transformers' own model and the Trainer's own rule for param groups. Without any of these the checkpoint is refused. A
state dict does not tell buffers from parameters outside the param groups; a resume takes either for the other."""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from merger.checkpoint import SLOT_OF_KIND, Checkpoint, RankState
from merger.io.blocks import Block, Unchecked
from merger.layouts.base import strip_wrappers
from merger.layouts.huggingface import read_json
from merger.sources.base import FileTensor, Nest, StoredTensor, checked_name, read_values
from merger.sources.certificates import NamedTensor, apply_merge_certificates, assemble_checkpoint
from merger.sources.deepspeed import run_states
from merger.sources.deepspeed_files import CHUNK, RankFiles, read_elements, stored_step
from merger.sources.deepspeed_zero import OptimizerContents
from merger.sources.torch_file import read_pt
from merger.tensors import memory_of, torch_dtype
from merger.writers.safetensors import read_header
from store.errors import DamagedError, MergeError, UnsupportedError
from store.storage.local import LocalFiles
from store.text import counted, listed

STATE, NAMES = "trainer_state.json", "param_names.json"
MODEL_KEYS = ("model", "model_state_dict", "state_dict")
OPTIMIZER_KEYS = ("optim", "optimizer", "optimizer_state_dict")
_OBJECTS = ("scheduler", "lr_scheduler", "scaler")
_ANOTHER = re.compile(r"(model|pytorch_model|pytorch_model_fsdp|optimizer|scheduler)_[1-9]\d*(\.\w+)?")  # Accelerate's
_PARAMETER_SHAPED = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass
class TrainingState:
    """A model and an optimizer by fqn. ``others``: further values of the checkpoint by name."""

    place: Path
    framework: str
    model: Mapping[str, StoredTensor]
    groups: Sequence[Mapping[str, Any]]  # {params: fqns, hyper: {...}}
    states: Mapping[str, Mapping[str, Any]]  # optimizer state of each parameter
    others: dict[str, Any]
    step: int | None = None  # as the checkpoint says
    files: Path | None = None  # directory with the Trainer's files
    objects: dict[str | None, tuple[str | None, Any]] = field(default_factory=dict)  # (class, state) by name
    notes: list[str] = field(default_factory=list)


def build_checkpoint(state: TrainingState) -> Checkpoint:
    """Build the checkpoint of a training state. MergeError if its parts are of different saves, UnsupportedError."""
    optimized, place = _optimizer(state), state.place
    ties, named = _ties(state, optimized.slots), dict[str, NamedTensor]()
    for fqn, tensor in state.model.items():
        if fqn not in ties:
            dtype = torch_dtype(tensor.dtype)
            untrained = "frozen" if dtype.is_floating_point or dtype.is_complex else "buffer"
            aliases = tuple(alias for alias, other in ties.items() if other == fqn)
            kind = "trainable" if fqn in optimized.slots else untrained
            named[fqn] = NamedTensor(tensor.shape, tensor.dtype, kind, aliases)
            optimized.extents += tensor.extents(fqn, SLOT_OF_KIND[kind])
    if guessed := [alias for alias, fqn in ties.items() if state.model[alias].place() != state.model[fqn].place()]:
        state.notes.append(f"{listed(guessed)}: tied, since it equals a trained parameter to the last bit")
    step, objects = _step(state, optimized), state.objects
    ours = {key: state.others.pop(key) for key in ("driftpoint",) if key in state.others}
    files = RankFiles(place if place.is_dir() else place.parent, (Nest(ours, str(place)),), (), 0, 1, bf16=False)
    user = [read_values(value) for _, value in objects.values()]
    rank_state = RankState(None, user, objects=[[name, kind] for name, (kind, _) in objects.items()])
    built = assemble_checkpoint(
        place,
        step,
        named,
        optimized,
        framework=state.framework,
        framework_state={"counters": {}, **dict.fromkeys(("optimizer", "loss_scaler", "lr_scheduler"))},
        facts={"framework": state.framework},
        run_states={0: rank_state} if objects else run_states(files),
        files=state.files,
        client_state=read_values(state.others),
        notes=tuple(state.notes),
    )
    return apply_merge_certificates(built, files)


def _optimizer(state: TrainingState) -> OptimizerContents:
    """Return the optimizer's state: slots are tensors of their parameter's shape, as the adapters have it."""
    members = [fqn for group in state.groups for fqn in group["params"]]
    out = OptimizerContents(slots={fqn: [] for fqn in members}, scalars={fqn: {} for fqn in members})
    other = sorted(state.states.keys() - out.slots.keys() | (out.slots.keys() - state.model.keys()))
    if other or len(out.slots) < len(members):
        raise MergeError(f"{state.place}: the optimizer holds {listed(other) or 'a parameter twice'}, unlike the model")
    for fqn, slots in out.slots.items():
        shape = state.model[fqn].shape
        for key, value in sorted(state.states.get(fqn, {}).items(), key=str):
            if isinstance(value, StoredTensor) and value.shape == shape and key != "step":
                slots.append(key)
                out.extents += value.extents(fqn, key)
            elif isinstance(value, StoredTensor) and key in _PARAMETER_SHAPED:
                raise MergeError(f"{state.place}: {key} of {fqn} has the shape {value.shape}, but {fqn} has {shape}")
            else:
                out.scalars[fqn][key] = read_values(value)
    for group in state.groups:
        hyper = {key: value for key, value in group["hyper"].items() if key not in ("params", "param_names")}
        out.groups.append({"params": list(group["params"]), "hyper": read_values(hyper)})
    return out


def _ties(state: TrainingState, trained: Collection[str]) -> dict[str, str]:
    """Return the fqn of every further name of a tensor: one of the same record, or, where a file repeats tied tensors,
    one outside the param groups that equals, bit for bit, exactly one tensor inside them."""
    ties, places, by_shape = dict[str, str](), dict[object, str](), dict[object, list[str]]()
    for fqn in sorted(state.model, key=lambda fqn: fqn not in trained):
        tensor = state.model[fqn]
        place, alike = tensor.place(), by_shape.setdefault(tensor.shape, [])
        if fqn in trained:
            places[place] = fqn
            alike.append(fqn)
            continue
        same = [places[place]] if place in places else [one for one in alike if _equal(state.model[one], tensor)]
        if len(same) == 1 and tensor.numel > 1:
            ties[fqn] = same[0]
        places.setdefault(place, ties.get(fqn, fqn))
    return ties


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Compare two tensors of one shape bit for bit: checksums first, so that different ones are hardly ever read."""
    parts = one.parts(), other.parts()
    mine, theirs = ([(at, x.shape, x.dtype, x.offset, x.block.digest) for at, x in boxes] for boxes in parts)
    if mine != theirs or not all(digest for *_, digest in mine):
        return False
    pairs = ([part.extent("", "", 0, part.numel) for _, part in two] for two in zip(*parts, strict=True))
    return all(
        memory_of(read_elements(a, start, min(start + CHUNK, a.stop)))
        == memory_of(read_elements(b, start, min(start + CHUNK, a.stop)))
        for a, b in pairs
        for start in range(0, a.stop, CHUNK)
    )


def _step(state: TrainingState, optimized: OptimizerContents) -> int:
    """Return the step: as the checkpoint says, else as the optimizer counts, else as a script noted."""
    found = (stored_step(one, {}) for one in optimized.scalars.values())
    counts, told = {int(count) for count in found if count is not None and math.isfinite(count)}, state.step
    if told is None and len(counts) < 2:  # a script's own note may be of a batch, or of an epoch
        noted = (state.others.get(key) for key in ("global_step", "step"))
        told = next((one for one in (*counts, *noted) if type(one) is int and one >= 0), None)
    if told is None and not optimized.groups:
        raise MergeError(f"{state.place} holds a model without an optimizer's state, and does not say its step")
    if told is None:
        raise UnsupportedError(f"{state.place} does not say its step, and its optimizer counts {counts or 'none'}")
    line = f"{state.place} is of step {told}, but its optimizer counts {max(counts, default=told)}"
    if max(counts, default=told) > told:
        raise MergeError(f"{line}, so parts of it are of different saves")
    scaled = any(name == "scaler" or kept.get("scaler") for name, (_, kept) in state.objects.items())
    if max(counts, default=told) < told and not scaled:  # a scaler skips steps
        optimized.problems.append(line)
    return told


def model_tensors(found: Nest) -> dict[str, StoredTensor]:
    """Return a state dict's tensors without the prefixes of wrappers. UnsupportedError for other values in it."""
    items = dict(found.items())
    for name, value in items.items():
        if not isinstance(value.value, StoredTensor):
            raise UnsupportedError(f"{found.where}: {name} is not a tensor: extra state of a module is not supported")
    return dict(zip(strip_wrappers(items), (value.value for value in items.values()), strict=True))


def named_groups(
    found: Nest, model: Collection[str], names: Callable[[], Sequence[Sequence[str]] | None] = lambda: None
) -> tuple[list[dict[str, Any]], dict[str, Mapping[str, Any]]]:
    """Return (param groups, state by fqn) of ``optimizer.state_dict()``. ``names``: called for names if needed.

    UnsupportedError if nothing says which parameter is which; MergeError if the names do not fit."""
    groups, named_all, all_names = found.at("param_groups").entries(), list[Any](), list[str]()
    known: Sequence[Sequence[str]] | None = None
    for index, group in enumerate(groups):
        numbers, named = [one.value for one in group.at("params").entries()], group.get("param_names")
        if all(isinstance(one, str) for one in numbers):
            fqns = numbers
        elif named is not None:
            fqns = [name.text() for name in named.entries()]
        elif (known := known or names()) is not None:
            fqns = list(known[index]) if len(known) == len(groups) else []
        else:
            raise UnsupportedError(
                f"{found.where} numbers its parameters, and nothing says which is which; their order is not guessed. "
                "Make the optimizer of model.named_parameters(), or write the names beside it, in the script that "
                f"saved it: names = {{id(p): n for n, p in model.named_parameters()}}; json.dump([[names[id(p)] for p "
                f"in g['params']] for g in optimizer.param_groups], open('{NAMES}', 'w'))"
            )
        if len(fqns) != len(numbers):
            raise MergeError(
                f"{found.where}: param group {index} of {len(groups)} has {counted(len(numbers), 'parameter')}, and "
                f"{len(fqns)} are named: the names are of another optimizer"
            )
        named_all += numbers
        all_names += fqns
    bare = all_names if {*all_names} <= {*model} else strip_wrappers(all_names)  # a model may have a module `module`
    fqn_of = dict(zip(named_all, bare, strict=True))
    state = Nest(found.mapping().get("state", {}), found.where).mapping()
    if not state.keys() <= fqn_of.keys():
        raise DamagedError(f"{found.where} has the state of parameters that are in no param group")
    return [{"params": [fqn_of[one] for one in group.at("params").value], "hyper": group.value} for group in groups], {
        fqn_of[number]: Nest(kept, found.where).mapping() for number, kept in state.items()
    }


def _known_names(folder: Path, notes: list[str]) -> list[list[str]] | None:
    """Return the names in each param group: of ``param_names.json``, or as ``Trainer.create_optimizer`` has them.

    transformers builds the model without memory from ``config.json``, by a class of its own: no code of the folder
    runs. None if there is neither, or another transformers made the folder."""
    if (folder / NAMES).is_file():
        try:
            found = Nest(json.loads((folder / NAMES).read_bytes()), str(folder / NAMES))
        except ValueError as error:
            raise DamagedError(f"{folder / NAMES} is not JSON: {error}") from error
        return [[name.text() for name in group.entries()] for group in found.entries()]
    if not (folder / STATE).is_file():
        return None
    try:
        import transformers
        from transformers.conversion_mapping import WeightConverter, get_model_conversion_mapping

        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        kind = getattr(transformers, config.architectures[0])
        if not issubclass(kind, transformers.PreTrainedModel):
            return None
        with torch.device("meta"):
            model = kind(config)
        if any(isinstance(one, WeightConverter) for one in get_model_conversion_mapping(model, add_legacy=False)):
            return None  # its files hold other tensors than its memory, some under the same name and transposed
        decay = set(transformers.Trainer.get_decay_parameter_names(None, model))
    except (ImportError, OSError, ValueError, TypeError, AttributeError, LookupError, RuntimeError):
        return None
    notes.append(
        f"the optimizer in {folder} does not name its parameters: they are taken in the order of the Trainer's own. If "
        f"it was given another one, write {NAMES} beside it and import again"
    )
    names = [name for name, _ in model.named_parameters()]
    return [[name for name in names if name in decay], [name for name in names if name not in decay]]


def optimizer_file(folder: Path) -> str | None:
    """Return the optimizer's file in a folder of the Trainer or of Accelerate; None if there is none."""
    return next((name for name in ("optimizer.pt", "optimizer.bin") if (folder / name).is_file()), None)


def read_state(path: Path) -> TrainingState:
    """Read a file of ``torch.save`` with model and optimizer, or a folder with the optimizer beside the weights."""
    if path.is_file():
        return _read_file(path)
    name, model, notes = optimizer_file(path) or "", _weights(path, LocalFiles(path)), list[str]()
    nest = Nest(read_pt(LocalFiles(path), name)[0], str(path / name))
    found = named_groups(nest, model, lambda: _known_names(path, notes))
    state = TrainingState(path, "torch", model, *found, {}, notes=notes)
    add_folder_values(state)
    return state


def _read_file(path: Path) -> TrainingState:
    nest = Nest(read_pt(LocalFiles(path.parent), path.name)[0], str(path))
    others = {str(key): value for key, value in nest.mapping().items()}
    keys = [next((key for key in keys if key in others), keys[0]) for keys in (MODEL_KEYS, OPTIMIZER_KEYS)]
    if not others.keys() >= set(keys):
        raise UnsupportedError(
            f"{path} holds {listed(others, 8)}, but not both a model ({listed(MODEL_KEYS)}) and an optimizer "
            f"({listed(OPTIMIZER_KEYS)})"
        )
    model, notes, rest = model_tensors(nest.at(keys[0])), list[str](), {k: others[k] for k in others if k not in keys}
    found = named_groups(nest.at(keys[1]), model, lambda: _known_names(path.parent, notes))
    state = TrainingState(path, "torch", model, *found, rest, notes=notes)
    _take_objects(state)
    return state


def _take_objects(state: TrainingState) -> None:
    """Turn the states of schedulers and of a scaler among the other values into those of named objects."""
    for key in list(state.others):
        name = key.removesuffix("_state_dict")
        if name in _OBJECTS and isinstance(state.others[key], Mapping):
            state.objects[name] = None, state.others.pop(key)


def _weights(folder: Path, files: LocalFiles) -> Mapping[str, StoredTensor]:
    """Return the weights in a folder; of the file that the Trainer itself loads, if there are several."""
    if (folder / "model.safetensors").is_file():
        return dict(_safetensors(files, "model.safetensors"))
    for name in ("pytorch_model.bin", "pytorch_model_fsdp.bin", "model.pt"):  # the last one: of a merge
        if (folder / name).is_file():
            return model_tensors(Nest(read_pt(files, name)[0], str(folder / name)))
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise UnsupportedError(f"{folder} has an optimizer, but no weights in model.safetensors; adapters are not read")
    table = {fqn: part.text() for fqn, part in Nest(read_json(index).get("weight_map"), str(index)).items()}
    parts = sorted({checked_name(part, str(index)) for part in table.values()})
    if gone := [part for part in parts if not (folder / part).is_file()]:
        raise MergeError(f"{index} names {listed(gone, 3)}, which the folder lacks: copy all files of the checkpoint")
    found = [(fqn, part, tensor) for part in parts for fqn, tensor in _safetensors(files, part)]
    if sorted((fqn, part) for fqn, part, _ in found) != sorted(table.items()):
        raise MergeError(f"{index} does not list the tensors that its files hold: files of different saves are mixed")
    return {fqn: tensor for fqn, _, tensor in found}


def add_folder_values(state: TrainingState) -> None:
    """Add what lies beside weights and optimizer: the Trainer's state, schedule and scaler, and what a merge left."""
    folder, files = state.place, LocalFiles(state.place)
    if more := [path.name for path in sorted(folder.iterdir()) if _ANOTHER.fullmatch(path.name)]:
        raise UnsupportedError(f"{folder} is of several models or optimizers ({listed(more)}), which is not supported")
    for name, key in (("scheduler", "lr_scheduler"), ("scaler", "scaler"), ("extra", "driftpoint")):
        for path in (f"{name}.pt", f"{name}.bin"):
            if (folder / path).is_file():
                state.others[key] = read_pt(files, path)[0]
    if "driftpoint" in state.others:
        ours = Nest(state.others["driftpoint"], str(folder / "extra.pt"))
        state.step = ours.at("step").natural()
        state.others |= {} if (client := ours.get("client_state")) is None else client.mapping()
    if not (folder / STATE).is_file():
        _take_objects(state)
        return
    found, state.files = Nest(read_json(folder / STATE), str(folder / STATE)), folder
    state.step = step = found.at("global_step").natural()
    epoch, most, epochs = found.mapping().get("epoch"), found.at("max_steps").natural(), found.at("num_train_epochs")
    per_epoch = round(step / epoch) if isinstance(epoch, int | float) and epoch > 0 else 0
    progress = {  # as monitor.huggingface.trainer_state saves it
        "kind": "transformers.Trainer",
        "step": step,
        "at_epoch": not per_epoch or step % per_epoch == 0,
        "epoch_began": None,
        "length": {"epochs": float(epochs.natural()), "steps": most, "beyond": max(most, per_epoch * epochs.natural())},
        "trainer": json.dumps(found.value),
        **{key: state.others.pop(key, None) for key in ("lr_scheduler", "scaler")},
    }
    state.objects[None] = "TrainerProgress", progress


def _safetensors(files: LocalFiles, name: str) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a safetensors file, which has no checksums. DamagedError if it is cut off."""
    where, size = str(files.root / name), files.size(name)
    try:
        begin, table = read_header(files.root / name)
    except ValueError as error:
        raise DamagedError(f"{where} is no safetensors file, or is cut off: {error}") from error
    for fqn, one in Nest(table, where).items():
        shape, dtype = one.at("shape").naturals(), one.at("dtype").text()
        start, stop = one.at("data_offsets").naturals()
        block = Block(files, name, begin + start, stop - start, Unchecked, "", f"{where}, {fqn}")
        found = FileTensor(block, 0, dtype, shape, True, block.name)
        if found.numel * torch_dtype(dtype).itemsize != stop - start or begin + stop > size:
            raise DamagedError(f"{block.name} has other bytes than {shape} values of {dtype} need")
        yield fqn, found
