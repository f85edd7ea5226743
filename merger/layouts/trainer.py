"""Write the checkpoint folder of a Hugging Face Trainer: ``checkpoint-N``, for ``train(resume_from_checkpoint=...)``.

Stock transformers and DeepSpeed load it without Driftpoint. The framework's own layout writes the state; the Trainer's
other files come from a folder of the run, brought to the state's step: growing numbers are scaled, later entries
dropped, and what cannot be is left out with a note. Unpickles nothing, and copies no file that would then run code."""

import io
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from merger.checkpoint import Checkpoint
from merger.io.output_file import OutFile, VerbatimFile
from merger.layouts.base import Layout, LayoutResult, Target, require_folder
from merger.layouts.huggingface import hf_weights, model_files, read_json, weight_files, weight_names
from merger.layouts.torch_dcp import optimizer_state
from merger.sources.torch_file import require_safe
from merger.writers.torch_zip import PtFile
from store.errors import DamagedError, MergeError, UnsupportedError, UsageError

STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"
_ARGUMENTS, _SCALER = "training_args.bin", "scaler.pt"

_ARGUMENT_CLASSES = (
    r"transformers\.training_args(_seq2seq)? (Seq2Seq)?TrainingArguments|transformers\.training_args OptimizerNames|"
    r"transformers\.trainer_utils (Interval|Save|Hub|Evaluation)Strategy|"
    r"transformers\.trainer_utils (SchedulerType|FSDPOption)|"
    r"transformers\.debug_utils DebugOption|transformers\.trainer_pt_utils AcceleratorConfig|"
    r"transformers\.integrations\.deepspeed Hf(Trainer)?DeepSpeedConfig|accelerate\.state PartialState|"
    r"accelerate\.utils\.dataclasses (DistributedType|DeepSpeedPlugin|FullyShardedDataParallelPlugin|ParallelismConfig)"
)
"""Module and name of the classes that transformers itself puts into ``training_args.bin``."""

_TOTALS = ("num_input_tokens_seen", "total_flos")
_BEST_KEYS = ("best_metric", "best_global_step", "best_model_checkpoint")
_CONTROL = "TrainerControl"
_ADAPTER_CONFIG = "adapter_config.json"
_Planned = tuple[Sequence[OutFile], str | None]  # files, and why some are left out


def trainer_layout(engine: Layout | None, checkpoint: Checkpoint, target: Target) -> LayoutResult:
    """Plan a Trainer's folder. UsageError without a Trainer's folder to start from.

    ``engine``: the layout of DeepSpeed's files; None for a run without DeepSpeed."""
    if not checkpoint.framework_state.get("param_groups"):
        raise MergeError(f"{checkpoint.origin} has no optimizer state, so no Trainer resumes from it; write layout hf")
    folder = _trainer_folder(checkpoint)
    rescaled = rescale_state(folder, checkpoint.step)
    state = _plain(checkpoint, folder) if engine is None else engine(checkpoint, target)
    with_engine, world_size, notes = engine is not None, _world_size(checkpoint, target), list[str]()
    out = [*state.files, OutFile(STATE, VerbatimFile(rescaled.document)), *model_files(folder, None)]
    for more, note in (
        _copy(folder, (_ARGUMENTS,), _ARGUMENT_CLASSES),
        rng_files(checkpoint, folder, world_size, same_step=rescaled.same_step, distributed=with_engine),
        _scheduler(checkpoint, folder, rescaled, with_engine=with_engine),
        _scaler(folder, rescaled),
        _weights_beside(checkpoint, target, folder) if with_engine else ((), None),
    ):
        out += more
        notes += [note] if note else []
    tag = f"checkpoint-{checkpoint.step}"
    files = {file.path: file for file in out}
    placed = tuple(replace(file, path=f"{tag}/{path}") for path, file in files.items())
    load = (f"trainer.train(resume_from_checkpoint={{out:{tag}}})",)
    return LayoutResult(tag, placed, load, (*state.notes, *rescaled.notes, *notes), state.certificate)


def _plain(checkpoint: Checkpoint, folder: Path) -> LayoutResult:
    if (folder / _ADAPTER_CONFIG).exists():
        raise UnsupportedError(
            f"{folder} is of a run that trained adapters only, which is not supported for a Trainer's folder; "
            "merge it with layout hf or torch"
        )
    weights = weight_files(hf_weights(checkpoint, Target()), Target().file_bytes)
    files = (*weights, OutFile("optimizer.pt", PtFile(optimizer_state(checkpoint))))
    return LayoutResult(f"step{checkpoint.step}", files, ())


def _trainer_folder(checkpoint: Checkpoint) -> Path:
    folder = checkpoint.files
    if folder is None:
        raise UsageError(
            "a Trainer's folder needs more than weights and optimizer: name a checkpoint-N folder of the run with "
            "trainer_state.json (--files)"
        )
    require_folder(folder)
    if not (folder / STATE).is_file():
        inside = sorted(path.name for path in folder.glob("checkpoint-*") if (path / STATE).is_file())
        hint = f"name one of those in it: {', '.join(inside)}" if inside else "name a checkpoint-N folder of the run"
        raise UsageError(f"{folder} is not a checkpoint folder of a Trainer: it has no {STATE}; {hint} (--files)")
    return folder


def _weights_beside(checkpoint: Checkpoint, target: Target, folder: Path) -> _Planned:
    """Return (``model.safetensors`` beside DeepSpeed's files, why there is none).

    At stages 1 and 2 the Trainer writes it always, at stage 3 only if the engine gathers the weights."""
    without = "is not written: the Trainer resumes from DeepSpeed's files without it"
    if (folder / _ADAPTER_CONFIG).exists():
        return (), f"adapter_model.safetensors {without}"
    if checkpoint.facts.get("frozen_left_out"):
        return (), f"model.safetensors {without}, and the checkpoint lacks the frozen parameters"
    stage = target.zero_stage or checkpoint.facts.get("zero_stage")
    if stage == 3 and not weight_names(folder):
        return (), f"model.safetensors {without}, and {folder} has none either; --layout hf writes the weights alone"
    return weight_files(hf_weights(checkpoint, Target()), Target().file_bytes), None


def _scheduler(checkpoint: Checkpoint, folder: Path, rescaled: "RescaledState", *, with_engine: bool) -> _Planned:
    groups = checkpoint.framework_state["param_groups"]
    file, note = scheduler_file(folder, rescaled, [group["hyper"].get("lr") for group in groups])
    if file is not None:
        return (file,), note
    if with_engine and checkpoint.framework_state.get("lr_scheduler") is not None:
        return (), None  # in DeepSpeed's own files
    if with_engine:
        return (), note or (
            f"{folder} has no scheduler.pt and the run's state has no scheduler: the Trainer refuses to resume if it "
            "makes the scheduler itself; name a folder that has one (--files)"
        )
    # Without it the Trainer silently ignores the optimizer's state as well.
    raise MergeError(note or f"{folder} has no scheduler.pt, without which a Trainer does not load optimizer.pt either")


def _scaler(folder: Path, rescaled: "RescaledState") -> _Planned:
    if not (folder / _SCALER).is_file():
        return (), None
    if rescaled.same_step:
        return _copy(folder, (_SCALER,))
    return (), f"{_SCALER} is left out, since that of {folder} is of step {rescaled.was}: loss scaling starts anew"


def _copy(folder: Path, names: Sequence[str], classes: str = "") -> tuple[list[OutFile], str | None]:
    """Return (copies of the files that exist, why they are left out). ``classes``: as in :func:`require_safe`."""
    there = [name for name in names if (folder / name).is_file()]
    for name in there:
        try:
            require_safe(folder / name, classes)
        except (UnsupportedError, DamagedError) as error:
            return [], f"{', '.join(there)}: left out, since programs that resume may unpickle it: {error}"
    return [OutFile(name, VerbatimFile((folder / name).read_bytes())) for name in there], None


def _world_size(checkpoint: Checkpoint, target: Target) -> int:
    facts: Mapping[str, object] = checkpoint.facts
    found = target.world_size or facts.get("world_size") or len(checkpoint.run_states)
    return found if isinstance(found, int) and found > 0 else 1


@dataclass(frozen=True)
class RescaledState:
    """A Trainer's state at ``step``, made from that of step ``was``. ``document``: content of the file."""

    was: int
    step: int
    document: bytes
    notes: tuple[str, ...]

    @property
    def same_step(self) -> bool:
        return self.was == self.step


def rescale_state(folder: Path, step: int) -> RescaledState:
    """Bring the folder's ``trainer_state.json`` to a step. MergeError if it does not name its own."""
    path = folder / STATE
    state = read_json(path)
    was = state.get("global_step")
    if not isinstance(was, int) or isinstance(was, bool) or was < 0:
        raise MergeError(f"{path} has no valid global_step; name another checkpoint folder of the run (--files)")
    if was == step:
        return RescaledState(was, step, path.read_bytes(), ())
    notes = [f"{STATE} is that of step {was}, brought to step {step}: its epoch and totals are scaled"]
    state["global_step"] = step
    for key in ("epoch", *_TOTALS) if was else ():
        if isinstance(state.get(key), int | float):
            scaled = state[key] * step / was
            state[key] = scaled if key == "epoch" else type(state[key])(scaled)
    _forget_later(state, step, notes)
    if step > was:
        notes.append(f"the log has nothing of steps {was + 1} to {step}")
    return RescaledState(was, step, (json.dumps(state, indent=2, sort_keys=True) + "\n").encode(), tuple(notes))


def rng_files(checkpoint: Checkpoint, folder: Path, world_size: int, *, same_step: bool, distributed: bool) -> _Planned:
    """Return (``rng_state*.pth`` of each rank, why there are none), of the run state or else of the folder.

    ``distributed``: whether a single rank counts as a distributed run, for which the Trainer keeps all devices'
    generators. ``same_step``: whether the folder is of the checkpoint's step."""
    names = ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    states = [checkpoint.run_states[rank].rng for rank in range(world_size) if rank in checkpoint.run_states]
    known = [one for one in states if isinstance(one, Mapping) and {"torch", "numpy", "python"} <= one.keys()]
    if len(checkpoint.run_states) == len(known) == world_size:
        every_device = distributed or world_size > 1
        found = [_trainer_rng(state, every_device=every_device) for state in known]
        return [_saved(name, state) for name, state in zip(names, found, strict=True)], None
    there = len(list(folder.glob("rng_state*.pth")))
    if same_step and there == world_size and all((folder / name).is_file() for name in names):
        return _copy(folder, names)
    return (), (
        f"there are no random-number states of this step for {world_size} rank(s): dropout, and shuffling that is not "
        "seeded by itself, will draw other numbers than the run would have"
    )


def _trainer_rng(state: Mapping[str, Any], *, every_device: bool) -> dict[str, Any]:
    kind, words, *rest = state["numpy"]
    out = {"python": state["python"], "numpy": (kind, np.asarray(words, dtype=np.uint32), *rest), "cpu": state["torch"]}
    if devices := list(state.get("cuda") or ()):
        out["cuda"] = devices if every_device else devices[0]
    return out


def _saved(name: str, value: Any) -> OutFile:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return OutFile(name, VerbatimFile(buffer.getvalue()))


def scheduler_file(folder: Path, rescaled: RescaledState, rates: Sequence[Any]) -> tuple[OutFile | None, str | None]:
    """Return (``scheduler.pt`` at the step, the change or why there is none).

    Only schedulers whose rate is a function of the step can be brought to another one: torch's LambdaLR, as nearly all
    of transformers' schedulers are. ``rates``: learning rate of each param group at the step."""
    path = folder / SCHEDULER
    if not path.is_file():
        return None, None
    if rescaled.same_step:
        files, note = _copy(folder, (SCHEDULER,))
        return (files[0] if files else None), note
    state = _read(path)
    if state is None or not _is_function_of_step(state, rates):
        return None, (
            f"{SCHEDULER} is left out: that of {folder} is of step {rescaled.was} and cannot be brought to step "
            f"{rescaled.step}; name a folder of that step (--files), or the Trainer refuses to resume"
        )
    by = rescaled.step - rescaled.was
    moved = {key: state[key] + by for key in ("last_epoch", "_step_count")}
    state = {**state, **moved, "_last_lr": [float(rate) for rate in rates]}
    return _saved(SCHEDULER, state), f"{SCHEDULER} is that of step {rescaled.was}, brought along"


def _forget_later(state: dict[str, Any], step: int, notes: list[str]) -> None:
    log = state.get("log_history")
    if isinstance(log, list):
        steps = [entry.get("step") if isinstance(entry, Mapping) else None for entry in log]
        pairs = zip(log, steps, strict=True)
        state["log_history"] = [entry for entry, at in pairs if not (isinstance(at, int) and at > step)]
    best = state.get("best_global_step")
    known = isinstance(best, int) and best <= step
    if state.get("best_metric") is not None and not known:
        state.update(dict.fromkeys((key for key in _BEST_KEYS if key in state), None))
        notes.append("the best metric so far is forgotten: it may be of a later step")
    callbacks = state.get("stateful_callbacks")
    control = callbacks.get(_CONTROL) if isinstance(callbacks, dict) else None
    if isinstance(control, dict) and isinstance(control.get("args"), dict):  # the Trainer's next actions
        control["args"] = {key: False if value is True else value for key, value in control["args"].items()}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _is_function_of_step(state: Mapping[str, Any], rates: Sequence[Any]) -> bool:
    bases = state.get("base_lrs")
    return (
        {"lr_lambdas", "last_epoch", "_step_count", "_last_lr"} <= state.keys()
        and isinstance(bases, list)
        and len(bases) == len(rates)
        and all(isinstance(rate, int | float | torch.Tensor) and math.isfinite(float(rate)) for rate in rates)
    )
