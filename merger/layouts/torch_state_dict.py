"""State dicts of plain PyTorch: ``model.pt`` and ``optimizer.pt``.

``model.load_state_dict(torch.load("model.pt"))`` and ``optimizer.load_state_dict(torch.load("optimizer.pt"))``
take them, with nothing of ours installed. Random-number states and the user's own objects, by rank, are in
``extra.pt``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from merger.checkpoint import SLOT_OF_KIND, Checkpoint, Stored, portable, whole
from merger.io.output_file import OutFile
from merger.layouts.base import LayoutResult, Target
from merger.writers.torch_zip import PtFile


class StateDictLayout:
    """The layout of a model and an optimizer that every rank held whole."""

    def lay_out(self, checkpoint: Checkpoint, _: Target) -> LayoutResult:
        files = (
            OutFile("model.pt", PtFile(model_state(checkpoint))),
            OutFile("optimizer.pt", PtFile(optimizer_state(checkpoint))),
            OutFile("extra.pt", PtFile(_extra(checkpoint))),
        )
        load = tuple(f"{name}.load_state_dict(torch.load({{out:{name}.pt}}))" for name in ("model", "optimizer"))
        return LayoutResult(f"step{checkpoint.step}", files, load)


def _extra(checkpoint: Checkpoint) -> dict[str, Any]:
    ranks = {
        rank: {"rng": portable(one.rng), "user": portable(one.user)} for rank, one in checkpoint.run_states.items()
    }
    return {"save": checkpoint.certificate.save, "step": checkpoint.step, "ranks": ranks}


def model_state(checkpoint: Checkpoint) -> OrderedDict[str, Stored]:
    """``model.state_dict()``: tied tensors under each of their names."""
    canonical = {alias: fqn for fqn, record in checkpoint.tensors.items() for alias in record.aliases}
    found: dict[str, Stored] = {}
    out: OrderedDict[str, Stored] = OrderedDict()
    for name in checkpoint.facts.get("state_dict_names", [*checkpoint.tensors, *canonical]):
        fqn = canonical.get(name, name)
        if fqn not in found:
            found[fqn] = whole(checkpoint, fqn, SLOT_OF_KIND[checkpoint.record(fqn).kind])
        out[name] = found[fqn]
    return out


def optimizer_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """``optimizer.state_dict()``: parameters numbered in the order of the param groups."""
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group in checkpoint.framework_state["param_groups"]:
        members = range(number, number + len(group["params"]))
        number = members.stop
        for index, fqn in zip(members, group["params"], strict=True):
            found = _state_of(checkpoint, fqn)
            if found:
                state[index] = found
        groups.append({**portable(group["hyper"]), "params": list(members)})
    return {"state": state, "param_groups": groups}


def _state_of(checkpoint: Checkpoint, fqn: str) -> dict[str, Any]:
    out = dict(portable(checkpoint.framework_state["scalars"].get(fqn, {})))
    for slot in checkpoint.slots(fqn):
        out[slot] = whole(checkpoint, fqn, slot)
    return out
