"""A recipe as the merger uses it: sources by name, rules that give each parameter its source, where the rest is from.

Every way to write one (our own, the short forms, MergeKit's) ends here. It knows no file and opens no source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from merger.recipe.selections import Selection

SINGLE = "source"
"""Name of the one source of a merge without a recipe."""


@dataclass(frozen=True)
class SourceRef:
    """A checkpoint to take from.

    path: of a store or a checkpoint; None: the SOURCE of the command line. step: a step, a save's name, a tag, or a
    bound such as ``<= 120``; None: the newest.
    """

    path: Path | None
    step: int | str | None = None


@dataclass(frozen=True)
class Rule:
    """``selection``, less what ``but`` (globs) names, comes from ``source``. where: what to call it in errors."""

    source: str
    selection: Selection
    where: str
    but: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """What a checkpoint is put together from.

    rest: the source of what no rule names. run_state: of counters, schedule, random generators and layout facts;
    None: of the source at the newest step, as long as that is one. files: a source's name, or a directory; None: the
    run state's. dtype: of exported weights, a safetensors name. notes: what to tell the user about it.
    """

    sources: Mapping[str, SourceRef]
    rules: tuple[Rule, ...] = ()
    rest: str | None = None
    run_state: str | None = None
    files: str | Path | None = None
    dtype: str | None = None
    where: str = "the recipe"
    notes: tuple[str, ...] = field(default=())


def single(path: Path, step: int | str | None) -> Recipe:
    """Everything from one source: a merge without a recipe."""
    return Recipe({SINGLE: SourceRef(path, step)}, rest=SINGLE, run_state=SINGLE)
