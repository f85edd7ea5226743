"""Translate MergeKit's YAML form into a recipe: ``slices`` of ``sources``, ``pre_weights``, ``post_weights``.

Layer-wise checkpoint tools (LLMTailor) write such files, which are accepted as they are. Everything that would change a
number or a layer's place (other methods than passthrough, weights, scaling, reordered slices) is refused by name,
because optimizer state belongs to the weights it was made with. Without ``pre_weights`` and ``post_weights`` embeddings
come from the first slice, and norm and head from the last, as in MergeKit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BeforeValidator, Field

from merger.recipe.model import Auxiliary, Blocks, Recipe, Rule
from merger.recipe.schema import EVERY, Section, Text, dtype_at, recipe_path, source_at, validate
from store.config_file import Loc, YamlFile
from store.errors import ConfigError, UnsupportedError

_HARMLESS_PARAMETERS = ("int8_mask", "normalize", "rescale")
_NEUTRAL_PARAMETERS = ("weight", "scale", "density")
_UNSUPPORTED = {
    "models": "it merges whole models; give `slices:` with a `layer_range` for each model",
    "modules": "only one stack of blocks can be named this way; write a recipe with `take:`",
    "tokenizer": "name one place for the tokenizer with `tokenizer_source:` or `files:`",
    "chat_template": "a template is copied from `files:` as it is; leave it out",
}
_MODEL = ("model", "source", "sources", "path")  # keys under which a model is named


def _model_path(given: Any) -> str:
    """Return the path in ``PATH``, ``{model: …}``, ``{source: …}``, ``{path: …}`` or ``{sources: [{model: …}]}``."""
    value = given
    while not isinstance(value, str):
        inner = [value[key] for key in _MODEL if key in value] if isinstance(value, dict) else value
        if not isinstance(inner, list) or len(inner) != 1:
            raise ValueError(f"must name one `model`, a directory, not {given!r}")
        value = inner[0]
    if not value:
        raise ValueError("names no directory")
    return value


def _layer_range(given: Any) -> Any:
    numbers = given if isinstance(given, list) and all(type(one) is int for one in given) else []
    if given is not None and not (len(numbers) == 2 and 0 <= numbers[0] <= numbers[1]):
        raise ValueError(f"must be two numbers, the first block and one after the last, such as [0, 8], not {given!r}")
    return given


def _weights(given: Any) -> Any:
    """Return one model for all weights, or a mapping of names to models, as the list that it stands for."""
    if isinstance(given, str) or (isinstance(given, Mapping) and given.keys() <= {*_MODEL}):
        return [{"name": EVERY, "model": given}]
    return [{"name": name, "model": model} for name, model in given.items()] if isinstance(given, Mapping) else given


ModelPath = Annotated[str, BeforeValidator(_model_path)]
Parameters = dict[str, Any] | None


class SliceSource(Section):
    """A source of a slice."""

    model: ModelPath
    layer_range: Annotated[tuple[int, int] | None, BeforeValidator(_layer_range)] = None
    parameters: Parameters = None


class Slice(Section):
    """An entry of ``slices``."""

    sources: tuple[SliceSource, ...]
    parameters: Parameters = None


class Weight(Section):
    """An entry of ``pre_weights`` or ``post_weights``."""

    name: Text = Field(validation_alias=AliasChoices("name", "weight", "layer"))
    model: ModelPath = Field(validation_alias=AliasChoices("model", "source", "sources"))
    is_embed: Any = None


class MergeKitFile(Section):
    """A recipe in MergeKit's form. ``run_state`` and ``files`` are ours."""

    sections: ClassVar = {"slices": Slice, "sources": SliceSource, "pre_weights": Weight, "post_weights": Weight}

    slices: Annotated[tuple[Slice, ...], Field(min_length=1)]
    pre_weights: Annotated[tuple[Weight, ...] | None, BeforeValidator(_weights)] = None
    post_weights: Annotated[tuple[Weight, ...] | None, BeforeValidator(_weights)] = None
    base_model: ModelPath | None = None
    tokenizer_source: ModelPath | None = None
    run_state: ModelPath | None = None
    files: ModelPath | None = None
    out_dtype: Text | None = None
    dtype: Text | None = None
    parameters: Parameters = None
    merge_method: Any = None
    name: Any = None
    description: Any = None
    metadata: Any = None


def from_mergekit(file: YamlFile) -> Recipe:
    """Build the recipe. ConfigError for an invalid file, UnsupportedError for a merge that changes the state."""
    if (method := file.values.get("merge_method", "passthrough")) != "passthrough":
        raise UnsupportedError(
            f"{file.at(('merge_method',))}: merge_method {method!r} changes weights, which then no longer fit their "
            "optimizer state; only passthrough is supported"
        )
    for key, why in _UNSUPPORTED.items():
        if key in file.values:
            raise UnsupportedError(f"{file.at((key,))}: {key!r} is not supported: {why}")
    if file.values.get("tokenizer_source") == "union":
        raise UnsupportedError(
            f"{file.at(('tokenizer_source',))}: a union of tokenizers changes rows of the embeddings; name one model"
        )
    values, notes = validate(file, MergeKitFile), list[str]()
    _require_neutral(file, ("parameters",), values.parameters)
    blocks = _blocks(file, values)
    rules = [
        *blocks,
        *_outside(file, "pre_weights", values.pre_weights, blocks[0].source),
        *_outside(file, "post_weights", values.post_weights, blocks[-1].source),
    ]
    where = dict[str, str]()  # place in the file of each source
    for rule in rules:
        where.setdefault(rule.source, rule.where)
    run_state = _run_state(values, where, notes)
    where |= {} if run_state is None else {run_state: where.get(run_state, file.at(("run_state",)))}
    files = _files(values, where, notes)
    ends = {path: path.rstrip("/").rpartition("/")[2] or path for path in where}
    name = {path: end if list(ends.values()).count(end) == 1 else path for path, end in ends.items()}
    key = "dtype" if values.out_dtype is None else "out_dtype"
    return Recipe(
        {name[path]: source_at(place, *split_step(path)) for path, place in where.items()},
        tuple(replace(rule, source=name[rule.source]) for rule in rules),
        run_state=None if run_state is None else name[run_state],
        files=name[files] if isinstance(files, str) else files,
        dtype=dtype_at(file.at((key,)), values.out_dtype or values.dtype),
        where=file.name,
        notes=tuple(notes),
    )


def _require_neutral(file: YamlFile, loc: Loc, parameters: Parameters) -> None:
    for key, value in (parameters or {}).items():
        neutral = key in _NEUTRAL_PARAMETERS and not isinstance(value, bool) and value in (1, 1.0)
        if key not in _HARMLESS_PARAMETERS and not neutral:
            raise UnsupportedError(
                f"{file.at((*loc, key))}: parameter {key!r} ({value!r}) changes weights, which then no longer fit "
                "their optimizer state; leave it out"
            )


def _blocks(file: YamlFile, values: MergeKitFile) -> list[Rule]:
    """Return the rules of the slices with a block. Those without one, such as [0, 0], must not contradict the rest."""
    rules, empty, end = list[Rule](), list[tuple[int, int, str]](), 0
    for index, one in enumerate(values.slices):
        loc = ("slices", index)
        where = f"slices[{index}] ({file.at(loc)})"
        if len(one.sources) != 1:
            raise UnsupportedError(
                f"{file.at(loc)}: slices[{index}] has {len(one.sources)} sources; a passthrough has one: layers are "
                "taken from one checkpoint, never mixed"
            )
        source = one.sources[0]
        _require_neutral(file, (*loc, "parameters"), one.parameters)
        _require_neutral(file, (*loc, "sources", 0, "parameters"), source.parameters)
        if source.layer_range is None and len(values.slices) > 1:
            raise ConfigError(f"{file.at(loc)}: slices[{index}] needs a `layer_range`, such as [0, 8]")
        first, stop = source.layer_range or (0, None)
        if first == stop:
            empty.append((index, first, source.model))
            continue
        _require_place(file, index, first, end)
        end = stop or end
        rules.append(Rule(source.model, Blocks(first, None if stop is None else stop - 1), where))
    if not rules:
        raise ConfigError(f"{file.at(('slices',))}: no slice takes a block; every `layer_range` is empty")
    _require_agreeing(file, values, empty, end)
    return rules


def _require_place(file: YamlFile, index: int, first: int, end: int) -> None:
    if first == end:
        return
    where = file.at(("slices", index))
    problem = f"{where}: slices[{index}] begins at block {first}, and the slices before end at block {end}"
    if first > end:
        raise ConfigError(f"{problem}: blocks {end} to {first - 1} are in no slice; every block is needed once")
    raise UnsupportedError(
        f"{problem}: every block must be used once, at its own place, because optimizer state and schedule do not "
        "fit a model with repeated or reordered blocks; use MergeKit itself for weights alone"
    )


def _require_agreeing(file: YamlFile, values: MergeKitFile, empty: Sequence[tuple[int, int, str]], blocks: int) -> None:
    """Raise ConfigError if slices without a block contradict the sources of the layers outside the blocks.

    LLMTailor writes such slices: number 0 stands for the norm, those behind the blocks for head and embeddings, whose
    names and sources follow in ``pre_weights`` and ``post_weights``. ``empty``: (index, number, source) of each."""
    meant = {0: ("norm",), blocks + 1: ("lm_head", "embed"), blocks + 2: ("embed",)}
    weights = (("pre_weights", values.pre_weights), ("post_weights", values.post_weights))
    for index, number, source in empty:
        named = {
            f"{key}[{position}]": one.model
            for key, given in weights
            for position, one in enumerate(given or ())
            if any(word in one.name for word in meant.get(number, ()))
        }
        if named and source not in named.values():
            raise ConfigError(
                f"{file.at(('slices', index))}: the empty slices[{index}] means {' or '.join(meant[number])} of "
                f"{source}, but {next(iter(named))} names another model; give both the same model, or leave the empty "
                "slice out"
            )


def _outside(file: YamlFile, key: str, given: Sequence[Weight] | None, default: str) -> Iterator[Rule]:
    """Yield the rules for layers before or after the blocks; ``default``: their source if none is given."""
    roles, side = (("embeddings",), "first") if key == "pre_weights" else (("norm", "head"), "last")
    for index, one in enumerate(given or ()):
        where = f"{key}[{index}] ({file.at((key, index))})"
        names = roles if one.name == EVERY else (one.name,)
        yield from (Rule(one.model, Auxiliary(name, required=one.name != EVERY), where) for name in names)
    for role in roles if given is None else ():  # a tied head is no layer
        yield Rule(default, Auxiliary(role, required=False), f"the {side} slice ({key} is not given)")


def _run_state(values: MergeKitFile, sources: Mapping[str, str], notes: list[str]) -> str | None:
    """Return the source of the run state: by name, else the base model; None: the newest step."""
    if len(sources) == 1:
        return next(iter(sources))
    if values.run_state is None and values.base_model in sources:
        notes.append(f"run state (counters, schedule, random generators) is of base_model, {values.base_model}")
        return values.base_model
    return values.run_state


def _files(values: MergeKitFile, sources: Mapping[str, str], notes: list[str]) -> str | Path | None:
    """Return the place of configuration and tokenizer: ``files``, ``tokenizer_source`` or ``base_model``."""
    named = next((one for one in (values.files, values.tokenizer_source) if one not in (None, "base")), None)
    path = named or values.base_model
    if path is None or path in sources:
        return path
    if named is None:
        notes.append(f"configuration and tokenizer files are of base_model, {path}")
    return recipe_path(path)


def split_step(path: str) -> tuple[Path | None, int | str | None]:
    """Split ``PATH@STEP``, as MergeKit writes revisions, unless a directory of the whole name exists."""
    where, at, step = path.rpartition("@")
    whole = recipe_path(path)
    if not at or not where or not step or (whole is not None and whole.exists()):
        return whole, None
    return recipe_path(where), int(step) if step.isascii() and step.isdigit() else step
