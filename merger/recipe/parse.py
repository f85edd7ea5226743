"""Parse a recipe file into a :class:`Recipe`: our own form with its short form, or MergeKit's.

Checks everything that does not need a model: names of sources, patterns, bounds."""

import re
from collections.abc import Iterator
from pathlib import Path

from merger.recipe import model
from merger.recipe.mergekit import from_mergekit
from merger.recipe.schema import EVERY, RecipeFile, TakeSection, dtype_at, recipe_path, source_at, validate
from store.config_file import YamlFile, read_yaml
from store.errors import ConfigError
from store.text import listed

_MERGEKIT = ("slices", "models", "modules", "merge_method")  # keys of MergeKit's form only


def read_recipe(path: Path) -> model.Recipe:
    """Read a YAML recipe in our form or MergeKit's. ConfigError names the line of a mistake."""
    return recipe_from(read_yaml(path, "recipe"))


def recipe_from(file: YamlFile) -> model.Recipe:
    """Build the recipe of a parsed YAML file."""
    if not file.values:
        raise ConfigError(f"{file.name} must be a YAML mapping with `sources:`, or with `slices:` in MergeKit's form")
    return from_mergekit(file) if any(key in file.values for key in _MERGEKIT) else _own(file)


def _own(file: YamlFile) -> model.Recipe:
    values = validate(file, RecipeFile)
    if not values.sources:
        raise ConfigError(f"{file.name}: `sources` is missing; give each a name, a `path` and optionally a `step`")
    sources = {
        name: source_at(file.at(("sources", name, "step")), recipe_path(one.path), one.step)
        for name, one in values.sources.items()
    }
    recipe = model.Recipe(
        sources,
        rules=tuple(_rules(file, values)),
        rest=values.rest,
        run_state=values.run_state or (next(iter(sources)) if len(sources) == 1 else None),
        files=values.files if values.files in sources else recipe_path(values.files),
        dtype=dtype_at(file.at(("dtype",)), values.dtype),
        where=file.name,
    )
    _require_known(file, values, sources)
    if recipe.run_state is None:
        raise ConfigError(
            f"{file.name}: the source of the run state (counters, schedule, random generators) is not given: add "
            f"`run_state:` with one of {listed(sources, 6)}"
        )
    return recipe


def _rules(file: YamlFile, values: RecipeFile) -> Iterator[model.Rule]:
    for index, entry in enumerate(values.take):
        where = f"take[{index}] ({file.at(('take', index))})"
        for selection in _selections(file, index, entry):
            yield model.Rule(entry.source, selection, where, entry.but or ())
    for turn, source in enumerate(values.parity or ()):
        yield model.Rule(source, model.EveryKth(len(values.parity or ()), turn), f"parity ({file.at(('parity',))})")
    for name, source in (values.auxiliary or {}).items():
        loc = _auxiliary_loc(name)
        yield model.Rule(source, model.Auxiliary(None if name == EVERY else name), f"{'.'.join(loc)} ({file.at(loc)})")


def _selections(file: YamlFile, index: int, entry: TakeSection) -> list[model.Selection]:
    if entry.layers is not None:
        return [model.Layers(entry.layers)]
    if entry.parameters is not None:
        return [model.Parameters(entry.parameters)]
    if entry.regex is not None:
        for pattern in entry.regex:
            try:
                re.compile(pattern)
            except re.error as error:
                where = file.at(("take", index, "regex"))
                raise ConfigError(f"{where}: {pattern!r} is not a regular expression: {error}") from error
        return [model.Parameters(entry.regex, regex=True)]
    found: list[model.Selection] = []
    for text in entry.blocks or ():
        first, _, last = text.partition("-")
        if last and int(last) < int(first):
            raise ConfigError(f"{file.at(('take', index, 'blocks'))}: blocks {text} end before they begin")
        found.append(model.Blocks(int(first), int(last or first)))
    return found


def _require_known(file: YamlFile, values: RecipeFile, sources: dict[str, model.SourceRef]) -> None:
    named: list[tuple[tuple[str | int, ...], str | None]] = [
        (("rest",), values.rest),
        (("run_state",), values.run_state),
        *((("take", index, "from"), entry.source) for index, entry in enumerate(values.take)),
        *((("parity", index), name) for index, name in enumerate(values.parity or ())),
        *((_auxiliary_loc(key), name) for key, name in (values.auxiliary or {}).items()),
    ]
    for loc, name in named:
        if name is not None and name not in sources:
            where = ".".join(map(str, loc))
            raise ConfigError(
                f"{file.at(loc)}: {where} names the source {name!r}, which is not among `sources`: {listed(sources, 6)}"
            )
    if repeated := [name for name in values.parity or () if (values.parity or ()).count(name) > 1]:
        raise ConfigError(f"{file.at(('parity',))}: parity names the source {repeated[0]!r} twice")


def _auxiliary_loc(key: str) -> tuple[str, ...]:
    return ("auxiliary",) if key == EVERY else ("auxiliary", key)
