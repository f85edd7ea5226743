"""The sources of a recipe, opened: each place once, and from each the one checkpoint that the recipe means.

Collects what goes wrong instead of stopping at the first, so that a plan can tell all of it. Reads no tensor.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path

from merger.blocks import Flaw
from merger.checkpoint import Checkpoint
from merger.recipe.certificate import Part
from merger.recipe.recipe import Recipe
from merger.recipe.steps import candidates, is_bound, require_step
from merger.sources.base import Source
from merger.sources.select import open_source
from store.errors import (
    DamagedError,
    DriftpointError,
    MergeError,
    NoStoreError,
    NothingToResumeError,
    StorageError,
    UsageError,
)
from store.place import is_url
from store.text import listed


@dataclass(frozen=True)
class OpenSource:
    """A source of a recipe. path: as it was written."""

    name: str
    path: Path
    step: int | str | None
    source: Source

    def part(self, flaws: Set[Flaw]) -> Part:
        """The checkpoint meant. Raises what the source raises; UsageError for a step that is not there."""
        checkpoint = self._checkpoint(flaws)
        place = str(self.path.resolve())
        # A save's name means one version wherever in a store it stands; a foreign checkpoint is like itself alone.
        return Part(checkpoint, place if self.source.kind == "store" else f"{place}#{checkpoint.origin}")

    def _checkpoint(self, flaws: Set[Flaw]) -> Checkpoint:
        passed_over: list[str] = []
        for step in candidates(self.step, self._steps(), str(self.path)):
            try:
                found = self.source.checkpoint(step, flaws)
            except (MergeError, DamagedError, StorageError) as error:
                if step == self.step:
                    raise
                passed_over.append(f"step {step}: {error}")
                continue
            return replace(found, problems=(*passed_over, *found.problems))
        raise MergeError(
            f"{self.path} has no checkpoint at a step {self.step} that is whole; {listed(passed_over, 3, '; ')}"
        )

    def _steps(self) -> tuple[int, ...]:
        """Asked for where they count: a checkpoint that is named by its tag need not have a step in its name."""
        if self.step is None or not (self.source.kind == "store" or is_bound(self.step)):
            return ()
        steps = self.source.steps()
        if self.source.kind == "store" and not steps:
            raise NothingToResumeError(f"the store {self.path} holds no commit yet")
        if not is_bound(self.step):
            require_step(self.step, steps, str(self.path))
        return steps


@dataclass(frozen=True)
class OpenSources:
    """All sources of a recipe that could be opened, by name. errors: of those that could not."""

    recipe: Recipe
    by_name: dict[str, OpenSource]
    errors: tuple[DriftpointError, ...]

    def parts(self, flaws: Set[Flaw]) -> tuple[dict[str, Part], list[DriftpointError]]:
        """The checkpoints, and what was wrong with those that are missing."""
        parts: dict[str, Part] = {}
        errors: list[DriftpointError] = []
        for name, one in self.by_name.items():
            try:
                parts[name] = one.part(flaws)
            except DriftpointError as error:
                errors.append(_told(self.recipe, name, error))
        return parts, errors

    @property
    def paths(self) -> tuple[Path, ...]:
        """Where they lie, each once."""
        return tuple(dict.fromkeys(one.path for one in self.by_name.values()))


def open_sources(recipe: Recipe, default: Path | None) -> OpenSources:
    """Open the sources of a recipe. default: the path of those that name none."""
    opened: dict[Path, Source] = {}
    by_name: dict[str, OpenSource] = {}
    errors: list[DriftpointError] = []
    for name, ref in recipe.sources.items():
        path = ref.path or default
        if path is None:
            errors.append(UsageError(f"{recipe.where}: source {name!r} has no `path`: add one, or name SOURCE"))
            continue
        try:
            if path.resolve() not in opened:
                opened[path.resolve()] = _open(path)
        except DriftpointError as error:
            errors.append(_told(recipe, name, error))
            continue
        by_name[name] = OpenSource(name, path, ref.step, opened[path.resolve()])
    return OpenSources(recipe, by_name, tuple(errors))


def raise_all(errors: tuple[DriftpointError, ...] | list[DriftpointError]) -> None:
    """Raise the first error; where there are more, it tells the next ones as well, each once."""
    if not errors:
        return
    told = list(dict.fromkeys(str(error) for error in errors))
    if len(told) == 1:
        raise errors[0]
    raise type(errors[0])(listed(told, 3, "; ") + (", which --plan lists" if len(told) > 3 else ""))


def _open(path: Path) -> Source:
    if not path.is_dir() and not is_url(path):
        found = "is a file" if path.exists() else "does not exist"
        raise NoStoreError(f"{path.absolute()} {found}: name the directory of a store or of a checkpoint")
    try:
        return open_source(path)
    except DamagedError as error:
        raise NothingToResumeError(
            f"{error}; nothing can be read without it: put it back from a copy of {path}"
        ) from error


def _told(recipe: Recipe, name: str, error: DriftpointError) -> DriftpointError:
    """The error, with the source's name in front where there are several; one of MergeKit's form is a path already."""
    if len(recipe.sources) == 1 or ("/" in name and name in str(error)):
        return error
    return type(error)(f"source {name!r}: {error}")
