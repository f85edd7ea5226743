"""One checkpoint out of several: each parameter, with its optimizer's slots and scalars, from the one source chosen.

Counters, schedule, loss scaler, hyperparameters, random generators, client state and layout facts are those of the
run state's source, whole. Reads no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from merger.blocks import Extent
from merger.checkpoint import SLOT_OF_KIND, Checkpoint
from merger.recipe.agree import Named, disagreements, optimizer_disagreements
from merger.recipe.certificate import Part, composite_certificate, held_slots
from store.coverage import FragmentIndex
from store.errors import MergeError
from store.text import counted, listed


@dataclass(frozen=True)
class Wanted:
    """What to put together.

    source_of: fqn -> source, for every tensor. run_state: a source. files: a directory, or None.
    weights_only: optimizer state is neither needed nor taken.
    """

    source_of: Mapping[str, str]
    run_state: str
    files: Path | None
    weights_only: bool = False


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
    certificate = composite_certificate(parts, wanted.source_of, taken, wanted.run_state, problems)
    composed = replace(
        reference,
        origin=listed((checkpoints[name].origin for name in used), 3, " and "),
        index=FragmentIndex(_extents(checkpoints, wanted.source_of, taken)),
        framework_state=_framework_state(checkpoints, wanted),
        certificate=certificate,
        files=wanted.files,
        problems=problems,
        run_steps=_run_steps(reference),
    )
    return Composed(composed, tuple(_newer(composed, wanted.run_state)))


def _taken(source: Checkpoint, fqn: str, wanted: Wanted) -> Sequence[str]:
    return [SLOT_OF_KIND[source.tensors[fqn].kind]] if wanted.weights_only else held_slots(source, fqn)


def _extents(
    checkpoints: Mapping[str, Checkpoint], source_of: Mapping[str, str], taken: Mapping[str, Sequence[str]]
) -> Iterator[Extent]:
    for fqn, name in source_of.items():
        names = checkpoints[name].index.names()
        for slot in taken[fqn]:
            yield from names[fqn, slot]


def _framework_state(checkpoints: Mapping[str, Checkpoint], wanted: Wanted) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {"scalars": {}, "slots": {}}
    for fqn, name in () if wanted.weights_only else wanted.source_of.items():
        for kind, by_fqn in found.items():
            theirs = checkpoints[name].framework_state.get(kind) or {}
            if fqn in theirs:
                by_fqn[fqn] = theirs[fqn]
    return {**checkpoints[wanted.run_state].framework_state, **found}


def _run_steps(reference: Checkpoint) -> dict[str, Any]:
    scalars = reference.framework_state.get("scalars") or {}
    return {fqn: kept["step"] for fqn, kept in scalars.items() if "step" in kept}


def _newer(checkpoint: Checkpoint, run_state: str) -> Iterator[str]:
    newer = [unit for unit in checkpoint.certificate.units if unit.moving and unit.staleness < 0]
    if newer:
        layers = listed(dict.fromkeys(unit.layer for unit in newer))
        yield (
            f"{layers}: up to {counted(-min(unit.staleness for unit in newer), 'step')} newer than the run state of "
            f"{run_state!r} (step {checkpoint.step}): counters and schedule go on from the older step"
        )
