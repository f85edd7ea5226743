"""Compose one checkpoint from several: choose each parameter's source, check that the models agree, combine.

Each parameter comes with its optimizer slots and scalars from one source. Counters, schedule, loss scaler,
hyperparameters, random generators, client state and layout facts come from the run state's source. Reads no tensor."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from merger.checkpoint import SLOT_OF_KIND, Checkpoint
from merger.io.blocks import Damage
from merger.io.output_dir import SourceUse
from merger.recipe.certificate import Part, composite_certificate, held_slots, unvouched_tensors
from merger.recipe.model import Model, Recipe, Rule, exclude
from merger.recipe.sources import OpenSources
from store.errors import ConfigError, DriftpointError, MergeError, UsageError
from store.fragments import FragmentIndex
from store.names import group_by_key
from store.schema import TensorRecord
from store.text import counted, listed

_COMPARED: Mapping[str, Callable[[TensorRecord], Any]] = {
    "shape": lambda record: list(record.shape),
    "dtype": lambda record: record.dtype,
    "kind": lambda record: record.kind,
    "tied names": lambda record: sorted(record.aliases),
}


@dataclass(frozen=True)
class Assembly:
    """Result of a recipe."""

    checkpoint: Checkpoint | None  # None if there are errors
    source_of: Mapping[str, str]  # source of each fqn
    uses: tuple[SourceUse, ...]  # all sources whose checkpoint was found
    notes: tuple[str, ...]
    errors: tuple[DriftpointError, ...]


def assemble(sources: OpenSources, flaws: Set[Damage], *, weights_only: bool) -> Assembly:
    """Find each source's checkpoint, choose, compare, compose. Returns errors instead of raising them."""
    recipe = sources.recipe
    found, missing = sources.parts(flaws, weights_only=weights_only)
    uses = tuple(_use(sources, name, part.checkpoint) for name, part in found.items())
    errors = [*sources.errors, *missing]
    if not found:
        return Assembly(None, {}, uses, (), tuple(errors))
    run_state, notes = _run_state(recipe, found, errors)
    # With its source missing, another one's model can still tell aspect the recipe leaves open.
    reference = found.get(run_state) or next(iter(found.values()))
    choice = choose_sources(recipe, Model(reference.checkpoint.tensors, reference.checkpoint.layers))
    errors += choice.errors
    taken = {run_state, *choice.source_of.values()}
    # An unused source need not agree; after a wrong choice, its model may explain the mistake.
    parts = {name: part for name, part in found.items() if choice.errors or name in taken}
    for name, part in parts.items() if run_state in parts else ():
        errors += model_differences(parts[run_state], part) if name != run_state else ()
    if errors:
        return Assembly(None, choice.source_of, uses, notes, tuple(errors))
    files = _files(recipe, found, run_state, errors)
    for name, part in parts.items():
        fqns = [fqn for fqn, source in choice.source_of.items() if source == name]
        errors += optimizer_differences(parts[run_state], part, fqns, weights_only=weights_only)
    if errors:
        return Assembly(None, choice.source_of, uses, notes, tuple(errors))
    uses = tuple(use for use in uses if use.name in taken)
    if taken == {run_state}:
        return Assembly(replace(parts[run_state].checkpoint, files=files), choice.source_of, uses, notes, ())
    composed = replace(_compose(parts, choice.source_of, run_state, weights_only=weights_only), files=files)
    return Assembly(composed, choice.source_of, uses, (*notes, *_newer(composed, run_state)), ())


def _run_state(recipe: Recipe, parts: Mapping[str, Part], errors: list[DriftpointError]) -> tuple[str, tuple[str, ...]]:
    """Return the source of the run state: as named, else the one at the newest step."""
    if recipe.run_state is not None:
        return recipe.run_state, recipe.notes
    newest = max(part.checkpoint.step for part in parts.values())
    found = [name for name, part in parts.items() if part.checkpoint.step == newest]
    if len(found) > 1:
        text = (
            f"{recipe.where}: {listed(found, 3, ' and ')} are all at step {newest}, so the source of counters, "
            "schedule and random generators is ambiguous: add `run_state:` with one of them"
        )
        errors.append(ConfigError(text))
    note = f"run state (counters, schedule, random generators) is of {found[0]}, step {newest}"
    return found[0], (*recipe.notes, note)


def _files(recipe: Recipe, parts: Mapping[str, Part], run_state: str, errors: list[DriftpointError]) -> Path | None:
    if recipe.files is None:
        return parts[run_state].checkpoint.files
    if isinstance(recipe.files, str):
        found = parts[recipe.files].checkpoint.files
        if found is None:
            text = (
                f"{recipe.where}: the source `files: {recipe.files}` has no configuration and tokenizer files; "
                "name a directory that has them"
            )
            errors.append(UsageError(text))
        return found
    if not recipe.files.is_dir():
        errors.append(UsageError(f"{recipe.where}: `files: {recipe.files}` is neither a source nor a directory"))
    return recipe.files


def _use(sources: OpenSources, name: str, checkpoint: Checkpoint) -> SourceUse:
    one = sources.by_name[name]
    path = str(one.path.absolute())
    return SourceUse(name, one.source.kind, path, checkpoint.origin, checkpoint.step, checkpoint.certificate.save)


@dataclass(frozen=True)
class SourceChoice:
    """Source of each fqn, in model order. With errors, ``source_of`` is incomplete."""

    source_of: Mapping[str, str]
    errors: tuple[ConfigError, ...]


def choose_sources(recipe: Recipe, model: Model) -> SourceChoice:
    """Choose the source of every parameter of a model by a recipe."""
    claims, errors = _claims(recipe, model)
    aside = " apart from rules with mistakes," if errors else ""
    errors += _named_twice(recipe, model, claims)
    chosen = {fqn: rules[0].source for fqn, rules in claims.items() if rules}
    if recipe.rest is not None:
        chosen = {fqn: chosen.get(fqn, recipe.rest) for fqn in model.tensors}
    if left := [fqn for fqn in model.tensors if fqn not in chosen]:
        layers = listed(dict.fromkeys(model.tensors[fqn].layer for fqn in left))
        text = (
            f"{recipe.where}:{aside} no rule names {listed(left)} ({len(left)} of "
            f"{counted(len(model.tensors), 'tensor')}, of {layers}); add a rule, or `rest:` with a source for "
            "everything that is not named"
        )
        errors.append(ConfigError(text))
    return SourceChoice({fqn: chosen[fqn] for fqn in model.tensors if fqn in chosen}, tuple(errors))


def _claims(recipe: Recipe, model: Model) -> tuple[dict[str, list[Rule]], list[ConfigError]]:
    """Return the rules that name each parameter, and the mistakes of each place in the recipe."""
    claims: dict[str, list[Rule]] = {fqn: [] for fqn in model.tensors}
    mistakes: dict[str, dict[str, None]] = {}
    for rule in recipe.rules:
        try:
            named = exclude(rule.selection.fqns(model), rule.but, model)
        except ConfigError as error:
            mistakes.setdefault(rule.where, {})[str(error)] = None
            continue
        for fqn in named:
            if all(other.where != rule.where for other in claims[fqn]):  # two patterns of one entry may name it
                claims[fqn].append(rule)
    return claims, [ConfigError(f"{where}: {listed(texts, 2, '; ')}") for where, texts in mistakes.items()]


def _named_twice(recipe: Recipe, model: Model, claims: Mapping[str, list[Rule]]) -> list[ConfigError]:
    by_pair: dict[tuple[str, str], list[str]] = {}
    for fqn, rules in claims.items():
        # A tied tensor has several names, which may all be named with the same source.
        if len(rules) < 2 or (model.tensors[fqn].aliases and len({rule.source for rule in rules}) == 1):
            continue
        by_pair.setdefault((rules[0].where, rules[1].where), []).append(fqn)
    out = []
    for fqns in by_pair.values():
        one, other = claims[fqns[-1]][:2]
        tied = [fqn for fqn in fqns if model.tensors[fqn].aliases]
        why = f" ({tied[0]} is tied to {', '.join(model.tensors[tied[0]].aliases)}: one tensor)" if tied else ""
        error = (
            f"{recipe.where}: {listed(fqns)} {'is' if len(fqns) == 1 else 'are'} named twice{why}: by {one.where} from "
            f"{one.source!r} and by {other.where} from {other.source!r}; narrow one of the two, with `except:` for "
            "instance"
        )
        out.append(ConfigError(error))
    return out


def _compose(
    parts: Mapping[str, Part], source_of: Mapping[str, str], run_state: str, *, weights_only: bool
) -> Checkpoint:
    """Build the composite of parts that fit together. With ``weights_only``, no optimizer state is taken."""
    reference = parts[run_state].checkpoint
    checkpoints = {name: part.checkpoint for name, part in parts.items()}
    taken: dict[str, Sequence[str]] = {}
    for fqn, name in source_of.items():
        source = checkpoints[name]
        own = [SLOT_OF_KIND[source.tensors[fqn].kind]]
        taken[fqn] = own if weights_only else held_slots(source, fqn)
    used = [name for name in checkpoints if name == run_state or name in source_of.values()]
    problems = _common_problems({name: checkpoints[name] for name in used})
    certificate = composite_certificate(parts, source_of, taken, run_state, problems)
    scalars = reference.framework_state.get("scalars") or {}
    named = ((fqn, checkpoints[name].index.names()) for fqn, name in source_of.items())
    stored = ((fqn, checkpoints[name].stored_steps) for fqn, name in source_of.items())
    return replace(
        reference,
        origin=listed((checkpoints[name].origin for name in used), 3, " and "),
        index=FragmentIndex(extent for fqn, names in named for slot in taken[fqn] for extent in names[fqn, slot]),
        framework_state=_framework_state(checkpoints, {} if weights_only else source_of, run_state),
        certificate=certificate,
        problems=problems,
        unvouched=unvouched_tensors(parts, source_of, taken),
        stored_steps={fqn: steps[fqn] for fqn, steps in stored if fqn in steps},
        run_steps={fqn: kept["step"] for fqn, kept in scalars.items() if "step" in kept},
    )


def _common_problems(checkpoints: Mapping[str, Checkpoint]) -> tuple[str, ...]:
    """Return the problems of all sources; one that several have, apart from their paths, once."""
    found: dict[str, dict[str, str]] = {}
    for name, checkpoint in checkpoints.items():
        for text in checkpoint.problems:
            found.setdefault(text.replace(checkpoint.origin, ""), {}).setdefault(name, text)
    return tuple(
        f"{listed(texts, 6)}: {next(iter(texts.values()))}" + (" (and so in each of these)" if len(texts) > 1 else "")
        for texts in found.values()
    )


def _framework_state(parts: Mapping[str, Checkpoint], source_of: Mapping[str, str], run_state: str) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {"scalars": {}, "slots": {}}
    for fqn, name in source_of.items():
        for kind, by_fqn in found.items():
            theirs = parts[name].framework_state.get(kind) or {}
            if fqn in theirs:
                by_fqn[fqn] = theirs[fqn]
    return {**parts[run_state].framework_state, **found}


def _newer(checkpoint: Checkpoint, run_state: str) -> Iterator[str]:
    if newer := [unit for unit in checkpoint.certificate.units if unit.moving and unit.staleness < 0]:
        layers = listed(dict.fromkeys(unit.layer for unit in newer))
        yield (
            f"{layers}: up to {counted(-min(unit.staleness for unit in newer), 'step')} newer than the run state of "
            f"{run_state!r} (step {checkpoint.step}): counters and schedule go on from the older step"
        )


def model_differences(reference: Part, other: Part) -> Iterator[MergeError]:
    """Yield the differences of two models. ``reference``: the source of the run state."""
    ours, theirs = reference.checkpoint.tensors, other.checkpoint.tensors
    for one, two, more in ((reference, other, ours.keys() - theirs.keys()), (other, reference, theirs.keys() - ours)):
        if more:
            names = [fqn for fqn in one.checkpoint.tensors if fqn in more]
            yield MergeError(f"{listed(names)}: in {one}, but not in {two}; take checkpoints of one model")
    for aspect, part in _COMPARED.items():
        if differing := [fqn for fqn in ours if fqn in theirs and part(ours[fqn]) != part(theirs[fqn])]:
            first = differing[0]
            yield MergeError(
                f"{listed(differing)}: {aspect} {part(ours[first])} in {reference} and {part(theirs[first])} in "
                f"{other}; take checkpoints of one model, saved by runs with the same precision and the same frozen "
                "parameters"
            )
    yield from _groups(reference, other)


def optimizer_differences(first: Part, other: Part, fqns: Iterable[str], *, weights_only: bool) -> Iterator[MergeError]:
    """Yield why parameters ``fqns`` cannot be taken from ``other`` with the run state of ``first``."""
    problems = ((_problems(first, other, fqn, weights_only=weights_only), fqn) for fqn in fqns)
    for problem, affected in group_by_key((one, fqn) for found, fqn in problems for one in found).items():
        yield MergeError(f"{listed(affected)}: {problem}")


def _problems(reference: Part, other: Part, fqn: str, *, weights_only: bool) -> Iterator[str]:
    ours, theirs = reference.checkpoint, other.checkpoint
    slots = (SLOT_OF_KIND[ours.tensors[fqn].kind], *(() if weights_only else _keys(ours, "slots", fqn)))
    # Nothing is stored of a tensor without elements.
    missing = [slot for slot in slots if not theirs.has(fqn, slot) and theirs.numel(fqn)]
    for slot in missing:
        if slot in SLOT_OF_KIND.values():
            yield f"{other} holds no {slot} values of it; take it from a source that has them"
        else:
            yield (
                f"{other} holds no {slot} of it, which the optimizer of {reference} keeps; take it from a source that "
                "has its optimizer state (a full save), or write weights alone with `--layout hf`"
            )
    for slot in slots:
        if slot not in missing and ours.has(fqn, slot) and ours.dtype(fqn, slot) != theirs.dtype(fqn, slot):
            yield (
                f"{slot} is {ours.dtype(fqn, slot)} in {reference} and {theirs.dtype(fqn, slot)} in {other}; take "
                "checkpoints of runs with the same precision"
            )
    if not weights_only and not missing:
        yield from _key_problems(reference, other, fqn)


def _groups(reference: Part, other: Part) -> Iterator[MergeError]:
    groups = (one.checkpoint.framework_state.get("param_groups") or () for one in (reference, other))
    ours, theirs = ({fqn: number for number, group in enumerate(one) for fqn in group["params"]} for one in groups)
    if not ours or not theirs:
        return  # weights only: checked for each parameter that is taken
    if alone := next((fqn for fqn in ours if fqn not in theirs), None):
        yield MergeError(
            f"{alone}: in a param group of the optimizer in {reference}, but in none in {other}; take checkpoints of "
            "runs with the same optimizer"
        )
        return
    for joint, split, one, two in ((reference, other, ours, theirs), (other, reference, theirs, ours)):
        first: dict[int, str] = {}
        for fqn in ours:
            if two[partner := first.setdefault(one[fqn], fqn)] != two[fqn]:
                yield MergeError(
                    f"{partner} and {fqn}: in one param group in {joint}, in two in {split}; take checkpoints of runs "
                    "with the same param groups"
                )
                return


def _keys(checkpoint: Checkpoint, kind: str, fqn: str) -> Iterable[str]:
    """Return the names of the optimizer's ``slots`` or ``scalars`` of a parameter."""
    found: Mapping[str, Iterable[str]] = checkpoint.framework_state.get(kind) or {}
    return found.get(fqn, ())


def _key_problems(reference: Part, other: Part, fqn: str) -> Iterator[str]:
    for aspect in ("slots", "scalars"):
        ours, theirs = (sorted(set(_keys(one.checkpoint, aspect, fqn))) for one in (reference, other))
        if ours != theirs and not ours:
            yield (
                f"{other} has the optimizer's {aspect} {theirs}, but {reference}, the source of the run state, has "
                "none; take the run state from a source with optimizer state, or write weights alone with `--layout hf`"
            )
        elif ours != theirs:
            yield (
                f"the optimizer keeps the {aspect} {ours} in {reference} and {theirs} in {other}; take checkpoints of "
                "runs with the same optimizer"
            )
