"""Write state dicts of plain PyTorch: ``model.pt`` and ``optimizer.pt``.

``load_state_dict`` takes both, without Driftpoint installed. Random-number states and the user's objects, by rank, are
in ``extra.pt``."""

from collections import OrderedDict
from typing import Any

from merger.checkpoint import Checkpoint, plan_parameter, plan_whole, portable_run_states, to_portable
from merger.io.output_file import OutFile
from merger.layouts.base import LayoutResult, Target, canonical_names, share_tied
from merger.writers.torch_zip import PtFile


def torch_layout(checkpoint: Checkpoint, _: Target) -> LayoutResult:
    """Plan the files of a model and an optimizer that every rank holds whole."""
    # As in ``model.state_dict()``, tied tensors are under each of their names.
    model = OrderedDict(share_tied(canonical_names(checkpoint), lambda fqn: plan_parameter(checkpoint, fqn)))
    ranks = portable_run_states(checkpoint, checkpoint.run_states)
    extra = {"save": checkpoint.certificate.save, "step": checkpoint.step, "ranks": ranks}
    files = (
        OutFile("model.pt", PtFile(model)),
        OutFile("optimizer.pt", PtFile(optimizer_state(checkpoint))),
        OutFile("extra.pt", PtFile(extra)),
    )
    load = tuple(f"{name}.load_state_dict(torch.load({{out:{name}.pt}}))" for name in ("model", "optimizer"))
    return LayoutResult(f"step{checkpoint.step}", files, load)


def optimizer_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return ``optimizer.state_dict()``: parameters numbered in the order of the param groups."""
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group in checkpoint.framework_state["param_groups"]:
        members = range(number, number + len(group["params"]))
        number = members.stop
        for index, fqn in zip(members, group["params"], strict=True):
            found = parameter_state(checkpoint, fqn)
            if found:
                state[index] = found
        groups.append({**to_portable(group["hyper"]), "params": list(members)})
    return {"state": state, "param_groups": groups}


def parameter_state(checkpoint: Checkpoint, fqn: str) -> dict[str, Any]:
    """Return the optimizer's state of a parameter: its scalars, then its slots."""
    out = dict(to_portable(checkpoint.framework_state["scalars"].get(fqn, {})))
    for slot in checkpoint.slots(fqn):
        out[slot] = plan_whole(checkpoint, fqn, slot)
    return out
