"""A Trainer's own records, brought to another step: ``trainer_state.json`` and ``scheduler.pt``.

Numbers that grow with training are scaled, what was not yet known is dropped, and nothing is made up: what cannot be
brought to another step is left out and told. It does not know weights or optimizers.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from merger.containers.base import OutFile
from merger.containers.verbatim import Verbatim
from merger.layouts.hf_files import read_json
from store.errors import MergeError

STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"

_GROWING = ("num_input_tokens_seen", "total_flos")
_BEST = ("best_metric", "best_global_step", "best_model_checkpoint")
_CONTROL = "TrainerControl"


@dataclass(frozen=True)
class Moved:
    """A Trainer's state at ``step``, made from that of step ``was``. document: the file. notes: what was changed."""

    was: int
    step: int
    document: bytes
    notes: tuple[str, ...]

    @property
    def same_step(self) -> bool:
        """Whether nothing had to change."""
        return self.was == self.step


def moved_state(folder: Path, step: int) -> Moved:
    """The folder's ``trainer_state.json`` at a step. MergeError where it does not say of which step it is."""
    path = folder / STATE
    state = read_json(path)
    was = state.get("global_step")
    if not isinstance(was, int) or isinstance(was, bool) or was < 0:
        raise MergeError(f"{path} names no global_step; name another checkpoint folder of the run (--files)")
    if was == step:
        return Moved(was, step, path.read_bytes(), ())
    notes = [f"{STATE} is that of step {was}, brought to step {step}: its epoch and totals are scaled"]
    state["global_step"] = step
    if was:
        _scale(state, step / was)
    _forget_later(state, step, notes)
    if step > was:
        notes.append(f"the log has nothing of steps {was + 1} to {step}")
    return Moved(was, step, (json.dumps(state, indent=2, sort_keys=True) + "\n").encode(), tuple(notes))


def scheduler_file(folder: Path, moved: Moved, rates: Sequence[Any]) -> tuple[OutFile | None, str | None]:
    """(``scheduler.pt`` at the step, what was done to it or why there is none).

    rates: the learning rate of each param group at that step. Only schedulers whose rate is a function of the step
    can be brought to another one: torch's LambdaLR, as nearly all of transformers' schedulers are.
    """
    path = folder / SCHEDULER
    if not path.is_file():
        return None, None
    if moved.same_step:
        return OutFile(SCHEDULER, Verbatim(path.read_bytes())), None
    state = _read(path)
    if state is None or not _is_function_of_step(state, rates):
        return None, (
            f"{SCHEDULER} is left out: that of {folder} is of step {moved.was} and cannot be brought to step "
            f"{moved.step}; name a folder of that step (--files), or the Trainer refuses to resume"
        )
    by = moved.step - moved.was
    state = {
        **state,
        "last_epoch": state["last_epoch"] + by,
        "_step_count": state["_step_count"] + by,
        "_last_lr": [float(rate) for rate in rates],
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return OutFile(SCHEDULER, Verbatim(buffer.getvalue())), f"{SCHEDULER} is that of step {moved.was}, brought along"


def _scale(state: dict[str, Any], by: float) -> None:
    epoch = state.get("epoch")
    if isinstance(epoch, int | float):
        state["epoch"] = epoch * by
    for key in _GROWING:
        if isinstance(state.get(key), int | float):
            state[key] = type(state[key])(state[key] * by)


def _forget_later(state: dict[str, Any], step: int, notes: list[str]) -> None:
    """Drop what happened after the step."""
    log = state.get("log_history")
    if isinstance(log, list):
        state["log_history"] = [one for one in log if not _is_later(one, step)]
    best = state.get("best_global_step")
    known = isinstance(best, int) and best <= step
    if state.get("best_metric") is not None and not known:
        state.update(dict.fromkeys((key for key in _BEST if key in state), None))
        notes.append("the best metric so far is forgotten: it may be of a later step")
    callbacks = state.get("stateful_callbacks")
    control = callbacks.get(_CONTROL) if isinstance(callbacks, dict) else None
    if isinstance(control, dict) and isinstance(control.get("args"), dict):  # what the Trainer meant to do next
        control["args"] = {key: False if value is True else value for key, value in control["args"].items()}


def _is_later(entry: Any, step: int) -> bool:
    at = entry.get("step") if isinstance(entry, Mapping) else None
    return isinstance(at, int) and at > step


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
