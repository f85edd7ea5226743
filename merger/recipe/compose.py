"""One checkpoint out of several: each parameter, with its optimizer's slots and scalars, from the one source chosen.

Counters, schedule, loss scaler, hyperparameters, random generators, client state and layout facts are those of the
run state's source, whole. Reads no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from merger.blocks import Extent
from merger.checkpoint import SLOT_OF_KIND, Checkpoint
from merger.recipe.agree import Named, disagreements, optimizer_disagreements
from merger.recipe.certificate import Part, composite_certificate, held_slots
from merger.recipe.model import listed
from store.coverage import FragmentIndex
from store.errors import MergeError


@dataclass(frozen=True)
class Wanted:
    """What to put together.

    source_of: fqn -> source, for every tensor. run_state: a source. files: a directory, or None.
    weights_only: optimizer state is neither needed nor taken. flat: whether what will load it keeps one set of
    scalars (step counts) for all parameters of a param group, as DeepSpeed's flat partitions do.
    """

    source_of: Mapping[str, str]
    run_state: str
    files: Path | None
    weights_only: bool = False
    flat: bool = False


@dataclass(frozen=True)
class Composed:
    """The checkpoint, and what to know about it. problems of the sources are in the checkpoint."""

    checkpoint: Checkpoint
    notes: tuple[str, ...]


def model_errors(parts: Mapping[str, Part], run_state: str) -> list[MergeError]:
    """Every way in which the sources' models differ from the run state's."""
    reference = Named(run_state, parts[run_state].checkpoint)
    others = [Named(name, part.checkpoint) for name, part in parts.items() if name != run_state]
    return [error for other in others for error in disagreements(reference, other)]


def state_errors(parts: Mapping[str, Part], wanted: Wanted) -> list[MergeError]:
    """Every parameter that cannot be taken from where the recipe has it, with its optimizer state."""
    reference = Named(wanted.run_state, parts[wanted.run_state].checkpoint)
    found: list[MergeError] = []
    for name, part in parts.items():
        fqns = [fqn for fqn, source in wanted.source_of.items() if source == name]
        other = Named(name, part.checkpoint)
        found += optimizer_disagreements(reference, other, fqns, weights_only=wanted.weights_only)
    return found


def compose(parts: Mapping[str, Part], wanted: Wanted) -> Composed:
    """The composite of parts between which :func:`model_errors` and :func:`state_errors` found nothing."""
    reference = parts[wanted.run_state].checkpoint
    checkpoints = {name: part.checkpoint for name, part in parts.items()}
    taken = {fqn: _taken(checkpoints[name], fqn, wanted) for fqn, name in wanted.source_of.items()}
    used = [name for name in checkpoints if name == wanted.run_state or name in wanted.source_of.values()]
    problems = tuple(f"{name}: {text}" for name in used for text in checkpoints[name].problems)
    state, notes = _framework_state(checkpoints, wanted)
    certificate = composite_certificate(parts, wanted.source_of, taken, wanted.run_state, problems)
    composed = replace(
        reference,
        origin=" and ".join(checkpoints[name].origin for name in used),
        index=FragmentIndex(_extents(checkpoints, wanted.source_of, taken)),
        framework_state=state,
        certificate=certificate,
        files=wanted.files,
        problems=problems,
    )
    return Composed(composed, (*notes, *_newer(composed, wanted.run_state)))


def _taken(source: Checkpoint, fqn: str, wanted: Wanted) -> Sequence[str]:
    return [SLOT_OF_KIND[source.tensors[fqn].kind]] if wanted.weights_only else held_slots(source, fqn)


def _extents(
    checkpoints: Mapping[str, Checkpoint], source_of: Mapping[str, str], taken: Mapping[str, Sequence[str]]
) -> Iterator[Extent]:
    for fqn, name in source_of.items():
        names = checkpoints[name].index.names()
        for slot in taken[fqn]:
            yield from names[fqn, slot]


def _framework_state(checkpoints: Mapping[str, Checkpoint], wanted: Wanted) -> tuple[dict[str, Any], list[str]]:
    reference = checkpoints[wanted.run_state].framework_state
    if wanted.weights_only:
        return {**reference, "scalars": {}, "slots": {}}, []
    scalars: dict[str, Any] = {}
    slots: dict[str, list[str]] = {}
    for fqn, name in wanted.source_of.items():
        theirs = checkpoints[name].framework_state
        for kind, found in (("scalars", scalars), ("slots", slots)):
            if fqn in (theirs.get(kind) or {}):
                found[fqn] = theirs[kind][fqn]
    notes = list(_flattened(reference, scalars)) if wanted.flat else []
    return {**reference, "scalars": scalars, "slots": slots}, notes


def _flattened(reference: Mapping[str, Any], scalars: dict[str, Any]) -> Iterator[str]:
    """Give parameters that will share a flat partition one set of scalars: the run state's."""
    changed: list[str] = []
    for group in reference.get("param_groups") or ():
        members = [fqn for fqn in group["params"] if fqn in scalars]
        if all(_equal(scalars[fqn], scalars[members[0]]) for fqn in members):
            continue
        own = reference["scalars"]
        if any(fqn not in own or own[fqn].keys() != scalars[fqn].keys() for fqn in members):
            raise MergeError(
                f"{listed(members)}: their param group has one step count in DeepSpeed's files, and the source of the "
                "run state keeps none for them; take the run state from a source that does"
            )
        changed += [fqn for fqn in members if not _equal(scalars[fqn], own[fqn])]
        scalars.update({fqn: own[fqn] for fqn in members})
    if changed:
        yield (
            f"DeepSpeed keeps one step count for all parameters of a param group: {listed(changed)} have the run "
            "state's, not that of the step they are of. It counts in Adam's bias correction alone, which hardly "
            "matters after some thousand steps"
        )


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one
    )


def _newer(checkpoint: Checkpoint, run_state: str) -> Iterator[str]:
    newer = [unit for unit in checkpoint.certificate.units if unit.moving and unit.staleness < 0]
    if newer:
        layers = listed(dict.fromkeys(unit.layer for unit in newer))
        yield (
            f"{layers}: up to {-min(unit.staleness for unit in newer)} steps newer than the run state of {run_state!r} "
            f"(step {checkpoint.step}): counters and schedule go on from the older step"
        )
