"""Whether two checkpoints hold the state of one model: what a composite needs before it may mix them.

Tensors, their shapes, dtypes, kinds and ties, the param groups, and for each parameter that is taken the optimizer's
slots and scalars. Pure: records only. Each disagreement is a MergeError that names the parameter and both sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from merger.checkpoint import SLOT_OF_KIND, Checkpoint
from store.errors import MergeError
from store.schema import TensorRecord
from store.text import listed

_PARTS: Mapping[str, Callable[[TensorRecord], Any]] = {
    "shape": lambda record: list(record.shape),
    "dtype": lambda record: record.dtype,
    "kind": lambda record: record.kind,
    "tied names": lambda record: sorted(record.aliases),
}


@dataclass(frozen=True)
class Named:
    """A checkpoint and what the recipe calls its source."""

    name: str
    checkpoint: Checkpoint

    def __str__(self) -> str:
        return f"{self.name!r} ({self.checkpoint.origin})"


def disagreements(reference: Named, other: Named) -> Iterator[MergeError]:
    """How two models differ. reference: the source of the run state."""
    yield from _tensors(reference, other)
    yield from _groups(reference, other)


def optimizer_disagreements(
    reference: Named, other: Named, fqns: Iterable[str], *, weights_only: bool
) -> Iterator[MergeError]:
    """What of the parameters ``fqns`` cannot be taken from ``other`` beside the reference's run state."""
    found: dict[str, list[str]] = {}
    for fqn in fqns:
        for problem in _problems(reference, other, fqn, weights_only=weights_only):
            found.setdefault(problem, []).append(fqn)
    for problem, affected in found.items():
        yield MergeError(f"{listed(affected)}: {problem}")


def _problems(reference: Named, other: Named, fqn: str, *, weights_only: bool) -> Iterator[str]:
    ours, theirs = reference.checkpoint, other.checkpoint
    slots = (SLOT_OF_KIND[ours.tensors[fqn].kind], *(() if weights_only else _slots(ours, fqn)))
    # Nothing is stored of a tensor without elements.
    missing = [slot for slot in slots if not theirs.has(fqn, slot) and theirs.numel(fqn)]
    for slot in missing:
        yield _missing(reference, other, slot)
    for slot in slots:
        if slot not in missing and ours.has(fqn, slot) and ours.dtype(fqn, slot) != theirs.dtype(fqn, slot):
            yield (
                f"{slot} is {ours.dtype(fqn, slot)} in {reference} and {theirs.dtype(fqn, slot)} in {other}; take "
                "checkpoints of runs with the same precision"
            )
    if not weights_only and not missing:
        yield from _kept(reference, other, fqn)


def _tensors(reference: Named, other: Named) -> Iterator[MergeError]:
    ours, theirs = reference.checkpoint.tensors, other.checkpoint.tensors
    for one, two, more in ((reference, other, ours.keys() - theirs.keys()), (other, reference, theirs.keys() - ours)):
        if more:
            names = [fqn for fqn in one.checkpoint.tensors if fqn in more]
            yield MergeError(
                f"{listed(names)}: in {one}, and not in {two}: they hold different models; take checkpoints of one "
                "model"
            )
    for what, part in _PARTS.items():
        differing = [fqn for fqn in ours if fqn in theirs and part(ours[fqn]) != part(theirs[fqn])]
        if differing:
            first = differing[0]
            yield MergeError(
                f"{listed(differing)}: {what} {part(ours[first])} in {reference} and {part(theirs[first])} in {other}; "
                "take checkpoints of one model, saved by runs with the same precision and the same frozen parameters"
            )


def _groups(reference: Named, other: Named) -> Iterator[MergeError]:
    ours, theirs = (_group_of(one.checkpoint) for one in (reference, other))
    if not ours or not theirs:
        return  # weights only; what that means for each parameter is told where it is taken
    met: dict[tuple[str, int], tuple[int, str]] = {}
    for fqn, number in ours.items():
        if fqn not in theirs:
            yield MergeError(
                f"{fqn}: in a param group of the optimizer in {reference}, and in none in {other}; take checkpoints "
                "of runs with the same optimizer"
            )
            return
        for side, one, two in (("ours", number, theirs[fqn]), ("theirs", theirs[fqn], number)):
            partner, first = met.setdefault((side, one), (two, fqn))
            if partner != two:
                together, apart = (reference, other) if side == "ours" else (other, reference)
                yield MergeError(
                    f"{first} and {fqn}: in one param group in {together}, in two in {apart}; take checkpoints of runs "
                    "with the same param groups"
                )
                return


def _group_of(checkpoint: Checkpoint) -> dict[str, int]:
    groups = checkpoint.framework_state.get("param_groups") or ()
    return {fqn: number for number, group in enumerate(groups) for fqn in group["params"]}


def _slots(checkpoint: Checkpoint, fqn: str) -> tuple[str, ...]:
    return tuple((checkpoint.framework_state.get("slots") or {}).get(fqn, ()))


def _scalars(checkpoint: Checkpoint, fqn: str) -> set[str]:
    return set((checkpoint.framework_state.get("scalars") or {}).get(fqn, {}))


def _kept(reference: Named, other: Named, fqn: str) -> Iterator[str]:
    """The optimizer's own names for what it keeps of a parameter."""
    both = (reference.checkpoint, other.checkpoint)
    for what, (ours, theirs) in (
        ("slots", [sorted(_slots(one, fqn)) for one in both]),
        ("scalars", [sorted(_scalars(one, fqn)) for one in both]),
    ):
        if ours != theirs and not ours:
            yield (
                f"{other} has the optimizer's {what} {theirs}, and {reference}, the source of the run state, has none; "
                "take the run state from a source with optimizer state, or write weights alone with `--layout hf`"
            )
        elif ours != theirs:
            yield (
                f"the optimizer keeps the {what} {ours} in {reference} and {theirs} in {other}; take checkpoints of "
                "runs with the same optimizer"
            )


def _missing(reference: Named, other: Named, slot: str) -> str:
    if slot in SLOT_OF_KIND.values():
        return f"{other} holds no {slot} values of it; take it from a source that does"
    return (
        f"{other} holds no {slot} of it, which the optimizer of {reference} keeps. Weights go with their optimizer "
        "state: take them from a source that has it (a full save), or write weights alone with `--layout hf`"
    )
