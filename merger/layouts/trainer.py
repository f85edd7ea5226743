"""The checkpoint folder of a Hugging Face Trainer: ``checkpoint-N``, as ``train(resume_from_checkpoint=...)`` takes it.

The framework's own files hold the state; around them goes what the Trainer keeps beside it, taken from a folder that
the run left and brought to the step of the state. Stock transformers and DeepSpeed load it, with nothing of ours.
It does not know how DeepSpeed's files are laid out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from merger.checkpoint import Checkpoint
from merger.containers.base import OutFile
from merger.containers.pt import PtFile
from merger.containers.verbatim import Verbatim
from merger.layouts.base import Laid, Layout
from merger.layouts.hf import hf_weights, weight_files
from merger.layouts.hf_files import model_files, require_folder, weight_names
from merger.layouts.plain import optimizer_state
from merger.layouts.trainer_rng import rng_files
from merger.layouts.trainer_state import STATE, Moved, moved_state, scheduler_file
from merger.target import Target
from store.errors import MergeError, UnsupportedError, UsageError

_ADAPTER_CONFIG = "adapter_config.json"
_ARGUMENTS, _SCALER = "training_args.bin", "scaler.pt"


class TrainerLayout:
    """A Trainer's folder. engine: the layout of DeepSpeed's files; None for a run without DeepSpeed."""

    def __init__(self, engine: Layout | None) -> None:
        self._engine = engine

    def lay_out(self, checkpoint: Checkpoint, target: Target) -> Laid:
        """See :class:`merger.layouts.base.Layout`. UsageError where there is no Trainer's folder to go by."""
        if not checkpoint.framework_state.get("param_groups"):
            raise MergeError(f"{checkpoint.origin} has no optimizer state, so no Trainer can resume from it; try hf")
        folder = _trainer_folder(checkpoint)
        moved = moved_state(folder, checkpoint.step)
        state = self._plain(checkpoint, folder) if self._engine is None else self._engine.lay_out(checkpoint, target)
        around, notes = _around(checkpoint, target, folder, moved, with_engine=self._engine is not None)
        tag = f"checkpoint-{checkpoint.step}"
        files = {file.path: file for file in (*state.files, *around)}
        return Laid(
            tag,
            tuple(replace(file, path=f"{tag}/{path}") for path, file in files.items()),
            (f"trainer.train(resume_from_checkpoint={{out:{tag}}})",),
            (*state.notes, *moved.notes, *notes),
            state.certificate,
        )

    def _plain(self, checkpoint: Checkpoint, folder: Path) -> Laid:
        """Weights and optimizer of a run in which every rank held both whole."""
        if (folder / _ADAPTER_CONFIG).exists():
            raise UnsupportedError(
                f"{folder} is of a run that trained adapters only, which cannot be written as a Trainer's folder yet; "
                "merge it with layout hf or torch"
            )
        weights = weight_files(hf_weights(checkpoint, Target()), Target().file_bytes)
        files = (*weights, OutFile("optimizer.pt", PtFile(optimizer_state(checkpoint))))
        return Laid(f"step{checkpoint.step}", files, ())


def _trainer_folder(checkpoint: Checkpoint) -> Path:
    folder = checkpoint.files
    if folder is None:
        raise UsageError(
            "a Trainer's folder cannot be made of weights and optimizer alone: name a checkpoint-N folder of the run, "
            "with trainer_state.json in it (--files)"
        )
    require_folder(folder)
    if not (folder / STATE).is_file():
        inside = sorted(path.name for path in folder.glob("checkpoint-*") if (path / STATE).is_file())
        hint = f"name one of those in it: {', '.join(inside)}" if inside else "name a checkpoint-N folder of the run"
        raise UsageError(f"{folder} is no checkpoint folder of a Trainer: it has no {STATE}; {hint} (--files)")
    return folder


def _around(
    checkpoint: Checkpoint, target: Target, folder: Path, moved: Moved, *, with_engine: bool
) -> tuple[list[OutFile], list[str]]:
    """What lies beside the framework's files, and what to know about it."""
    notes: list[str] = []
    files = [OutFile(STATE, Verbatim(moved.document)), *model_files(folder, None), *_copied(folder, (_ARGUMENTS,))]
    world_size = _world_size(checkpoint, target)
    for found, note in (
        rng_files(checkpoint, folder, world_size, same_step=moved.same_step, distributed=with_engine),
        _scheduler(checkpoint, folder, moved, with_engine=with_engine),
        _scaler(folder, moved),
    ):
        files += found
        notes += [note] if note else []
    if with_engine and weight_names(folder):
        files += weight_files(hf_weights(checkpoint, Target()), Target().file_bytes)
    if with_engine and (folder / _ADAPTER_CONFIG).exists():
        notes.append("adapter_model.safetensors is not written: the Trainer resumes from DeepSpeed's files without it")
    return files, notes


def _scheduler(
    checkpoint: Checkpoint, folder: Path, moved: Moved, *, with_engine: bool
) -> tuple[Sequence[OutFile], str | None]:
    groups = checkpoint.framework_state["param_groups"]
    file, note = scheduler_file(folder, moved, [group["hyper"].get("lr") for group in groups])
    if file is not None:
        return (file,), note
    if with_engine and checkpoint.framework_state.get("lr_scheduler") is not None:
        return (), None  # it is in DeepSpeed's own files
    if with_engine:
        return (), note or (
            f"{folder} has no scheduler.pt and the run's state has no scheduler: the Trainer refuses to resume if it "
            "makes the scheduler itself; name a folder that has one (--files)"
        )
    # Without it the Trainer leaves the optimizer's state aside as well, and says nothing.
    raise MergeError(note or f"{folder} has no scheduler.pt, without which a Trainer does not load optimizer.pt either")


def _scaler(folder: Path, moved: Moved) -> tuple[Sequence[OutFile], str | None]:
    if not (folder / _SCALER).is_file():
        return (), None
    if moved.same_step:
        return _copied(folder, (_SCALER,)), None
    return (), f"{_SCALER} is left out, since that of {folder} is of step {moved.was}: loss scaling starts anew"


def _copied(folder: Path, names: Sequence[str]) -> list[OutFile]:
    """Files as they are: none of them is unpickled."""
    return [OutFile(name, Verbatim((folder / name).read_bytes())) for name in names if (folder / name).is_file()]


def _world_size(checkpoint: Checkpoint, target: Target) -> int:
    facts: Mapping[str, object] = checkpoint.facts
    found = target.world_size or facts.get("world_size") or len(checkpoint.run_states)
    return found if isinstance(found, int) and found > 0 else 1
