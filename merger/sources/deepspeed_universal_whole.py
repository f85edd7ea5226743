"""Whether the parameters' directories of a universal checkpoint belong together: the same slots, steps and save.

Each is a directory of its own, so that one may be missing, left from another save, or half copied. It reads no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from merger.sources.deepspeed_files import RankFiles, comparable
from merger.sources.deepspeed_one_save import step_in
from merger.sources.deepspeed_zero import Optimized
from merger.sources.nest import Nest
from store.errors import MergeError
from store.files import LocalFiles
from store.text import listed

CONVERTED = ("exp_avg", "exp_avg_sq")
"""What DeepSpeed's converter writes for every parameter; it fails where an optimizer keeps anything else."""


_UNFINISHED = "tmp"
"""Where the converter works, beside ``zero``. It removes it when all of ``zero`` is written."""


def require_converted(folder: Path) -> None:
    """MergeError where the converter did not come to its end: it writes over what an earlier conversion left."""
    if (folder / _UNFINISHED).is_dir():
        raise MergeError(
            f"{folder / _UNFINISHED} is where ds_to_universal works until it is done: the conversion was interrupted, "
            f"and {folder / 'zero'} may hold files of an earlier one. Convert the checkpoint again, into an empty "
            f"directory (or remove {_UNFINISHED} if you know that it was kept with --keep_temp_folder)"
        )


def require_one_save(found: Nest, own: Nest | None) -> None:
    """A file's own note of its save, where a merge wrote it. own: that of ``optimizer_state.pt``."""
    if own is None or not isinstance(found.value, dict):
        return
    noted, expected = found.get("driftpoint"), _told(own)
    if noted is None or _told(noted) != expected:
        told = "no save" if noted is None else f"step {noted.at('step').value} of {noted.at('save').value}"
        if noted is not None and _told(noted)[:2] == expected[:2]:
            told = f"another state that is called {told}, too"
        raise MergeError(
            f"{found.where} is of {told}, and {own.where} of step {expected[1]} of {expected[0]}: files of two saves "
            "are mixed; copy the checkpoint again"
        )


def _told(own: Nest) -> tuple[Any, ...]:
    """Save, step, and the checksum of what is in it, which early releases did not write."""
    return own.at("save").value, own.at("step").value, own.mapping().get("contents")


def require_whole(files: RankFiles, groups: Sequence[Sequence[str]], found: Optimized, own: Nest | None) -> list[str]:
    """MergeError, naming the parameter, unless all of a param group have the same slots and step, and nothing is left
    over. groups: parameters that have elements. Returns why what is there may not be one save."""
    _refuse_surplus(files, found)
    if own is not None and own.at("step").value != files.model.at("global_steps").natural():
        raise MergeError(
            f"{own.where} is of step {own.at('step').value}, and {files.model.where} of step "
            f"{files.model.at('global_steps').value}: files of two saves are mixed; copy the checkpoint again"
        )
    for i, group in enumerate(groups):
        expected = set(CONVERTED) if own is None else {slot.text() for slot in own.at("slots").at(i).entries()}
        _require_alike(files, group, expected.union(*(found.slots[fqn] for fqn in group)), found.scalars)
    return [] if own is not None else _doubts(files, found)


def _refuse_surplus(files: RankFiles, found: Optimized) -> None:
    """The converter gives whatever else is in the model (frozen parameters, buffers, other names of tied parameters)
    a directory with only its value. Those are read from the model states, which have them in their own dtype."""
    zero, local, module = files.folder / "zero", LocalFiles(files.folder), files.model.get("module")
    of_the_model = set(module.mapping()) if module is not None else set()
    for name in local.list_dir("zero"):
        value_only = name in of_the_model and list(local.list_dir(f"zero/{name}")) == ["fp32.pt"]
        if name not in found.slots and not value_only and (zero / name).is_dir():
            raise MergeError(
                f"{zero / name} is of no parameter that {files.model.where} names: it may be of another model or save; "
                "remove it if it does not belong there"
            )


def _require_alike(files: RankFiles, group: Sequence[str], slots: set[str], scalars: dict[str, dict[str, Any]]) -> None:
    held = {fqn: set(LocalFiles(files.folder).list_dir(f"zero/{fqn}")) for fqn in group}
    for fqn in group:
        missing = sorted(slot for slot in slots if f"{slot}.pt" not in held[fqn])
        if missing:
            raise MergeError(
                f"{files.folder / 'zero' / fqn} has no {', '.join(f'{slot}.pt' for slot in missing)}, which every "
                f"parameter of its param group has: the state of {fqn} is not whole; copy the checkpoint again"
            )
    first = group[0] if group else ""
    for fqn in group[1:]:
        if comparable(scalars[fqn]) != comparable(scalars[first]):
            raise MergeError(
                f"{files.folder / 'zero' / fqn} has the scalars {scalars[fqn]}, and {first} of the same param group "
                f"{scalars[first]}: one of them is of another save; copy the checkpoint again"
            )


def _doubts(files: RankFiles, found: Optimized) -> list[str]:
    """An optimizer that was not loaded with its model starts from 0 again, so that other steps prove nothing."""
    counted = files.model.at("global_steps").natural() - files.model.at("skipped_steps").natural()
    each = [step_in(found.scalars[fqn], group["hyper"]) for group in found.groups for fqn in group["params"]]
    steps = {step for step in each if step is not None}
    told = listed((f"{step:g}" for step in sorted(steps)), 6)
    if not steps and each and files.stage == 3:
        line = (
            "the optimizer counts no steps, and ZeRO-3 saves the weights once: nothing tells whether "
            f"{files.folder / 'zero'} and {files.model.where} are of one save"
        )
    elif steps <= {float(counted)}:
        return []
    else:
        line = (
            f"the optimizer in {files.folder / 'zero'} has made {told} steps, and {files.model.where} counts "
            f"{counted}: it was started anew in between, or is of another save"
        )
    return [line]
