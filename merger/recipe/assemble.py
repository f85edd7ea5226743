"""From the open sources of a recipe to the one checkpoint that it describes, or to everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

from merger.blocks import Flaw
from merger.checkpoint import Checkpoint
from merger.recipe.certificate import Part
from merger.recipe.choice import choose
from merger.recipe.compose import Wanted, compose, model_errors, state_errors
from merger.recipe.model import Model
from merger.recipe.opened import OpenSources
from merger.recipe.recipe import Recipe
from merger.report import SourceUse
from store.errors import ConfigError, DriftpointError, UsageError
from store.text import listed


@dataclass(frozen=True)
class Assembled:
    """What came of a recipe.

    checkpoint: None where there are errors. source_of: fqn -> source. uses: of all sources whose checkpoint was found.
    """

    checkpoint: Checkpoint | None
    source_of: Mapping[str, str]
    uses: tuple[SourceUse, ...]
    notes: tuple[str, ...]
    errors: tuple[DriftpointError, ...]


def assemble(sources: OpenSources, flaws: Set[Flaw], *, weights_only: bool) -> Assembled:
    """Find each source's checkpoint, choose, compare, compose. Raises nothing of its own: see ``errors``."""
    recipe = sources.recipe
    found, missing = sources.parts(flaws)
    uses = tuple(_use(sources, name, part.checkpoint) for name, part in found.items())
    errors = [*sources.errors, *missing]
    if not found:
        return Assembled(None, {}, uses, (), tuple(errors))
    run_state, notes = _run_state(recipe, found, errors)
    # With its source missing, another one's model can still tell what the recipe leaves open.
    reference = found.get(run_state) or next(iter(found.values()))
    choice = choose(recipe, Model.of(reference.checkpoint))
    errors += choice.errors
    taken = {run_state, *choice.source_of.values()}
    # A source that nothing comes from need not agree; where the choice went wrong, its model may tell why.
    parts = {name: part for name, part in found.items() if choice.errors or name in taken}
    if run_state in parts:
        errors += model_errors(parts, run_state)
    if errors:
        return Assembled(None, choice.source_of, uses, notes, tuple(errors))
    wanted = Wanted(choice.source_of, run_state, _files(recipe, found, run_state, errors), weights_only)
    errors += state_errors(parts, wanted)
    if errors:
        return Assembled(None, choice.source_of, uses, notes, tuple(errors))
    uses = tuple(use for use in uses if use.name in taken)
    if taken == {run_state}:
        checkpoint = replace(parts[run_state].checkpoint, files=wanted.files)
        return Assembled(checkpoint, choice.source_of, uses, notes, ())
    composed = compose(parts, wanted)
    return Assembled(composed.checkpoint, choice.source_of, uses, (*notes, *composed.notes), ())


def _run_state(recipe: Recipe, parts: Mapping[str, Part], errors: list[DriftpointError]) -> tuple[str, tuple[str, ...]]:
    """The source of the run state: as named, else the one at the newest step."""
    if recipe.run_state is not None:
        return recipe.run_state, recipe.notes
    newest = max(part.checkpoint.step for part in parts.values())
    found = [name for name, part in parts.items() if part.checkpoint.step == newest]
    if len(found) > 1:
        errors.append(
            ConfigError(
                f"{recipe.where}: {listed(found, 3, ' and ')} are all at step {newest}, so it has to say whose "
                "counters, schedule and random generators to take: add `run_state:` with one of them"
            )
        )
    return found[0], (
        *recipe.notes,
        f"run state (counters, schedule, random generators) is of {found[0]}, step {newest}",
    )


def _files(recipe: Recipe, parts: Mapping[str, Part], run_state: str, errors: list[DriftpointError]) -> Path | None:
    if recipe.files is None:
        return parts[run_state].checkpoint.files
    if isinstance(recipe.files, str):
        found = parts[recipe.files].checkpoint.files
        if found is None:
            errors.append(
                UsageError(
                    f"{recipe.where}: `files: {recipe.files}`, but that source keeps no configuration and tokenizer "
                    "files; name a directory that has them"
                )
            )
        return found
    if not recipe.files.is_dir():
        errors.append(UsageError(f"{recipe.where}: `files: {recipe.files}` is neither a source nor a directory"))
    return recipe.files


def _use(sources: OpenSources, name: str, checkpoint: Checkpoint) -> SourceUse:
    one = sources.by_name[name]
    path = str(one.path.absolute())
    return SourceUse(name, one.source.kind, path, checkpoint.origin, checkpoint.step, checkpoint.certificate.save)
