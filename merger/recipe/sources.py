"""Open the sources of a recipe, each place once, and find the checkpoint meant in each.

A step is the source's own or the newest within a bound. Errors are collected: a plan can list all. Reads no tensor."""

import operator
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from merger.checkpoint import Checkpoint, refuse_weights_only
from merger.io.blocks import Damage
from merger.recipe.certificate import Part
from merger.recipe.model import Recipe
from merger.sources import open_source
from merger.sources.base import Source
from merger.sources.store import StoreSource
from store.errors import (
    DamagedError,
    DriftpointError,
    MergeError,
    NoStoreError,
    NothingToResumeError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from store.location import is_url
from store.names import JOURNAL, SaveId
from store.text import listed

_BOUND = re.compile(r"(?P<sign><=|<|>=|>|==|=)\s*(?P<step>.*)\Z")
_HOLDS: dict[str, Callable[[int, int], bool]] = {"<=": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class OpenSource:
    """A source of a recipe. ``path``: as written in the recipe."""

    name: str
    path: Path
    step: int | str | None
    source: Source

    def part(self, flaws: Set[Damage], *, weights_only: bool) -> Part:
        """Return the checkpoint meant. UsageError for a step that does not exist; raises what the source raises."""
        checkpoint, place = self._checkpoint(flaws, weights_only), str(self.path.resolve())
        # A save's name identifies a version within a store; a foreign checkpoint is comparable only to itself.
        return Part(checkpoint, place if self.source.kind == "store" else f"{place}#{checkpoint.origin}", self.name)

    def _checkpoint(self, flaws: Set[Damage], weights_only: bool) -> Checkpoint:
        passed: list[str] = []
        for step in self._candidates():
            try:
                found = self.source.checkpoint(step, flaws)
                if not weights_only:
                    refuse_weights_only(found)
            except (MergeError, DamagedError, StorageError, UnsupportedError) as error:
                if step == self.step:
                    raise
                passed.append(f"step {step}: {error}")
                continue
            return replace(found, problems=(*passed, *found.problems))
        raise MergeError(f"{self.path} has no complete checkpoint at a step {self.step}; {listed(passed, 3, '; ')}")

    def _candidates(self) -> Sequence[int | str | None]:
        """Return the steps to ask the source for, best first; only a bound has several.

        A checkpoint given by its tag need not have a step in its name."""
        bound = step_bound(self.step)
        if bound is None and (self.step is None or self.source.kind != "store"):
            return [self.step]
        steps = self.source.steps()  # newest first: a later epoch outranks a later step
        if self.source.kind == "store" and not steps:
            raise NothingToResumeError(f"the store {self.path} has no commit yet")
        if bound is None:
            leads = self.source.leads_to if isinstance(self.source, StoreSource) else lambda _: False
            if self.step is not None and _step_of(self.step) not in (None, *steps) and not leads(self.step):
                journal = ", and its journal does not lead there" if (self.path / JOURNAL).is_dir() else ""
                raise UsageError(f"{self.path} has no checkpoint {self.step}{journal}; {_newest_steps(steps)}")
            return [self.step]
        within = [one for one in steps if bound(one)]
        if not within:
            raise UsageError(f"{self.path} has no checkpoint at a step {self.step}; {_newest_steps(steps)}")
        return within


@dataclass(frozen=True)
class OpenSources:
    """The opened sources of a recipe by name, and the errors of those that could not be opened."""

    recipe: Recipe
    by_name: dict[str, OpenSource]
    errors: tuple[DriftpointError, ...]

    def parts(self, flaws: Set[Damage], *, weights_only: bool) -> tuple[dict[str, Part], list[DriftpointError]]:
        """Return the checkpoints, and the errors of those that are missing."""
        parts: dict[str, Part] = {}
        errors: list[DriftpointError] = []
        for name, one in self.by_name.items():
            try:
                parts[name] = one.part(flaws, weights_only=weights_only)
            except DriftpointError as error:
                errors.append(_with_source_name(self.recipe, name, error))
        return parts, errors

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(one.path for one in self.by_name.values()))


def open_sources(recipe: Recipe, default: Path | None) -> OpenSources:
    """Open the sources of a recipe. ``default``: the path of sources without one."""
    opened: dict[Path, Source] = {}
    by_name: dict[str, OpenSource] = {}
    errors: list[DriftpointError] = []
    for name, ref in recipe.sources.items():
        if (path := ref.path or default) is None:
            errors.append(UsageError(f"{recipe.where}: source {name!r} has no `path`: add one, or name SOURCE"))
            continue
        try:
            if path.resolve() not in opened:
                opened[path.resolve()] = _open(path)
        except DriftpointError as error:
            errors.append(_with_source_name(recipe, name, error))
            continue
        by_name[name] = OpenSource(name, path, ref.step, opened[path.resolve()])
    return OpenSources(recipe, by_name, tuple(errors))


def raise_all(errors: tuple[DriftpointError, ...] | list[DriftpointError]) -> None:
    """Raise the first error; its message includes the next ones, each once."""
    if not errors:
        return
    messages = list(dict.fromkeys(str(error) for error in errors))
    if len(messages) == 1:
        raise errors[0]
    raise type(errors[0])(listed(messages, 3, "; ") + (", which --plan lists" if len(messages) > 3 else ""))


def _open(path: Path) -> Source:
    if not path.exists() and not is_url(path):
        raise NoStoreError(f"{path.absolute()} does not exist: name the directory of a store or of a checkpoint")
    try:
        return open_source(path)
    except DamagedError as error:
        raise NothingToResumeError(f"{error}; no checkpoint can be read without it: restore it from a copy") from error


def _with_source_name(recipe: Recipe, name: str, error: DriftpointError) -> DriftpointError:
    """Prefix the error with the source's name if there are several; MergeKit's names are paths already."""
    if len(recipe.sources) == 1 or ("/" in name and name in str(error)):
        return error
    return type(error)(f"source {name!r}: {error}")


def step_bound(step: int | str | None) -> Callable[[int], bool] | None:
    """Return whether a step is within the bound; None if there is none. UsageError for an invalid bound."""
    match = _BOUND.match(step.strip()) if isinstance(step, str) else None
    if match is None:
        return None
    sign, limit = match["sign"], match["step"].strip()
    if sign not in _HOLDS or not (limit.isascii() and limit.isdigit()):
        raise UsageError(f"{step!r} is not a bound on a step; write '<= 120' or '< 120'")
    return lambda one: _HOLDS[sign](one, int(limit))


def _step_of(step: int | str) -> int | None:
    """Return the step in a number or save's name; None for a tag, which only its source understands."""
    try:
        return int(step) if str(step).isdecimal() else SaveId.parse(str(step)).step
    except ValueError:
        return None


def _newest_steps(steps: Sequence[int]) -> str:
    if not steps:
        return "there is none with a step in its name"
    return f"there are steps {listed(steps, 5, rest='older ones')}" if steps[1:] else f"there is step {steps[0]}"
