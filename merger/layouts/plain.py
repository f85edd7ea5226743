"""State dicts of plain PyTorch: ``model.pt`` and ``optimizer.pt``.

``model.load_state_dict(torch.load("model.pt"))`` and ``optimizer.load_state_dict(torch.load("optimizer.pt"))``
take them, with nothing of ours installed. Random-number states and the user's own objects, by rank, are in
``extra.pt``.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from merger.layouts.base import Written
from merger.plan import SLOT_OF_KIND, MergePlan
from merger.ptfile import write_pt
from merger.read import Reader
from merger.runstate import portable
from store.errors import MergeError


class PlainLayout:
    """The layout of a model and an optimizer that every rank held whole."""

    def write(self, plan: MergePlan, reader: Reader, folder: Path) -> Written:
        """See :class:`merger.layouts.base.Layout`."""
        total = write_pt(folder / "model.pt", partial(model_state, plan, reader), ())
        total += write_pt(folder / "optimizer.pt", partial(optimizer_state, plan, reader), ())
        total += write_pt(folder / "extra.pt", partial(_extra, plan), ())
        return Written(f"step{plan.save.step}", total)


def _extra(plan: MergePlan) -> dict[str, Any]:
    ranks = {rank: {"rng": portable(one.rng), "user": portable(one.user)} for rank, one in plan.run_states.items()}
    return {"save": plan.save.name, "step": plan.save.step, "ranks": ranks}


def model_state(plan: MergePlan, reader: Reader) -> OrderedDict[str, torch.Tensor]:
    """``model.state_dict()``: tied tensors under each of their names."""
    canonical = {alias: fqn for fqn, record in plan.tensors.items() for alias in record.aliases}
    found: dict[str, torch.Tensor] = {}
    out: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name in plan.facts.get("state_dict_names", [*plan.tensors, *canonical]):
        fqn = canonical.get(name, name)
        if fqn not in found:
            reader.shape(fqn)
            found[fqn] = reader.tensor(fqn, SLOT_OF_KIND[plan.tensors[fqn].kind])
        out[name] = found[fqn]
    return out


def optimizer_state(plan: MergePlan, reader: Reader) -> dict[str, Any]:
    """``optimizer.state_dict()``: parameters numbered in the order of the param groups."""
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group in plan.framework_state["param_groups"]:
        members = range(number, number + len(group["params"]))
        number = members.stop
        for index, fqn in zip(members, group["params"], strict=True):
            found = _state_of(plan, reader, fqn)
            if found:
                state[index] = found
        groups.append({**portable(group["hyper"]), "params": list(members)})
    return {"state": state, "param_groups": groups}


def _state_of(plan: MergePlan, reader: Reader, fqn: str) -> dict[str, Any]:
    out = dict(portable(plan.framework_state["scalars"].get(fqn, {})))
    for slot in plan.framework_state["slots"].get(fqn, ()):
        if not reader.has(fqn, slot):
            raise MergeError(
                f"the optimizer had {slot} of {fqn}, which commit {plan.save} does not hold; name a save that does "
                "(a full one)"
            )
        out[slot] = reader.tensor(fqn, slot)
    return out
