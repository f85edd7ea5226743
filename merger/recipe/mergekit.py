"""Translate MergeKit's YAML form into a recipe: ``slices`` of ``sources``, ``pre_weights``, ``post_weights``.

Layer-wise checkpoint tools (LLMTailor) write such files, which are accepted as they are. Everything that would change a
number or a layer's place (other methods than passthrough, weights, scaling, reordered slices) is refused by name,
because optimizer state belongs to the weights it was made with. Without ``pre_weights`` and ``post_weights`` embeddings
come from the first slice, and norm and head from the last, as in MergeKit."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from merger.recipe.model import Auxiliary, Blocks, Recipe, Rule, SourceRef, parse_dtype
from merger.recipe.schema import mistakes_at, recipe_path, unknown_key
from merger.recipe.sources import check_step
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
_NO_EFFECT = ("name", "description", "metadata")
_KNOWN = (
    "slices", "pre_weights", "post_weights", "merge_method", "dtype", "out_dtype", "base_model", "tokenizer_source",
    "parameters", "run_state", "files", *_NO_EFFECT,
)  # fmt: skip


def require_passthrough(file: YamlFile) -> None:
    """Raise UnsupportedError for anything that changes weights, ConfigError for an unknown key."""
    values = file.values
    method = values.get("merge_method", "passthrough")
    if method != "passthrough":
        raise UnsupportedError(
            f"{file.at(('merge_method',))}: merge_method {method!r} changes weights, which then no longer fit their "
            "optimizer state; only passthrough is supported"
        )
    for key in values:
        if key in _UNSUPPORTED:
            raise UnsupportedError(f"{file.at((key,))}: {key!r} is not supported: {_UNSUPPORTED[key]}")
        if key not in _KNOWN:
            raise ConfigError(unknown_key(file.at((key,)), key, _KNOWN))
    require_neutral(file, ("parameters",), values.get("parameters"))
    if "slices" not in values:
        raise ConfigError(
            f"{file.name}: a recipe in MergeKit's form needs `slices:`, each with a model and a layer_range"
        )


def require_neutral(file: YamlFile, loc: Loc, parameters: Any) -> None:
    """Raise UnsupportedError for a parameter that would change weights."""
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise ConfigError(f"{file.at(loc)}: {name_of(loc)} must be a mapping")
    for key, value in parameters.items():
        neutral = key in _NEUTRAL_PARAMETERS and not isinstance(value, bool) and value in (1, 1.0)
        if key not in _HARMLESS_PARAMETERS and not neutral:
            raise UnsupportedError(
                f"{file.at((*loc, key))}: parameter {key!r} ({value!r}) changes weights, which then no longer fit "
                "their optimizer state; leave it out"
            )


def path_of(file: YamlFile, loc: Loc, given: Any) -> str:
    """Return the path in ``PATH``, ``{model: …}``, ``{source: …}``, ``{path: …}`` or ``{sources: [{model: …}]}``."""
    value = given
    while not isinstance(value, str):
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
            continue
        inner = [value[key] for key in ("model", "source", "sources", "path") if key in value] if value else []
        if not isinstance(value, dict) or len(inner) != 1:
            raise ConfigError(f"{file.at(loc)}: {name_of(loc)} must name one `model`, a directory, not {given!r}")
        value = inner[0]
    if not value:
        raise ConfigError(f"{file.at(loc)}: {name_of(loc)} names no directory")
    return value


def split_step(path: str) -> tuple[Path | None, int | str | None]:
    """Split ``PATH@STEP``, as MergeKit writes revisions, unless a directory of the whole name exists."""
    where, at, step = path.rpartition("@")
    whole = recipe_path(path)
    if not at or not where or not step or (whole is not None and whole.exists()):
        return whole, None
    return recipe_path(where), int(step) if step.isascii() and step.isdigit() else step


def name_of(loc: Loc) -> str:
    """Return a location in the file as text, such as ``slices[0].sources``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc).lstrip(".")


def from_mergekit(file: YamlFile) -> Recipe:
    """Build the recipe. ConfigError for an invalid file, UnsupportedError for a merge that changes the state."""
    require_passthrough(file)
    build = _Translation(file)
    rules = [*build.slices(), *build.weights("pre_weights", 0), *build.weights("post_weights", -1)]
    run_state, files = build.run_state(), build.files()
    name = _short_names(build.sources)
    return Recipe(
        {name[path]: ref for path, ref in build.sources.items()},
        tuple(replace(rule, source=name[rule.source]) for rule in rules),
        run_state=None if run_state is None else name[run_state],
        files=name[files] if isinstance(files, str) else files,
        dtype=build.dtype(),
        where=file.name,
        notes=tuple(build.notes),
    )


@dataclass
class _Translation:
    """State of the translation: sources seen so far by their path as written, notes, and empty slices."""

    file: YamlFile
    sources: dict[str, SourceRef] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _of_slices: list[str] = field(default_factory=list)
    _empty: list[tuple[int, int, str]] = field(default_factory=list)
    """Slices without a block, such as [0, 0]: (index, number, source)."""

    def slices(self) -> Iterator[Rule]:
        slices = self._list(("slices",), self.file.values.get("slices"))
        if not slices:
            raise ConfigError(f"{self.file.at(('slices',))}: `slices` names no slice")
        end = 0
        for index, one in enumerate(slices):
            loc = ("slices", index)
            given = self._mapping(loc, one, ("sources", "parameters"))
            require_neutral(self.file, (*loc, "parameters"), given.get("parameters"))
            sources = self._list((*loc, "sources"), given.get("sources"))
            if len(sources) != 1:
                raise UnsupportedError(
                    f"{self.file.at(loc)}: slices[{index}] has {len(sources)} sources; a passthrough has one: layers "
                    "are taken from one checkpoint, never mixed"
                )
            source, first, stop = self._slice_source((*loc, "sources", 0), sources[0], len(slices))
            if first == stop:
                self._empty.append((index, first, source))
                continue
            self._require_place(loc, first, end)
            end = stop or end
            self._of_slices.append(source)
            where = f"slices[{index}] ({self.file.at(loc)})"
            yield Rule(source, Blocks(first, None if stop is None else stop - 1), where)
        if not self._of_slices:
            raise ConfigError(f"{self.file.at(('slices',))}: no slice takes a block; every `layer_range` is empty")
        self._require_agreeing(end)

    def weights(self, key: str, default: int) -> Iterator[Rule]:
        """Yield the rules for layers before or after the blocks; by default of the first or last slice's source."""
        given, where = self.file.values.get(key), f"{key} ({self.file.at((key,))})"
        named = isinstance(given, str) or (isinstance(given, Mapping) and set(given) <= {"model", "source", "sources"})
        if given is None or named:  # one model for all of them
            source = self._model((key,), given) if named else self._of_slices[default]
            side = "first" if default == 0 else "last"
            for role in ("embeddings",) if key == "pre_weights" else ("norm", "head"):
                selection = Auxiliary(role, required=False)  # a tied head is no layer
                yield Rule(source, selection, where if named else f"the {side} slice ({key} is not given)")
        elif isinstance(given, Mapping):
            for name, value in given.items():
                place = f"{key}.{name} ({self.file.at((key,))})"
                yield Rule(self._model((key, name), value), Auxiliary(str(name)), place)
        else:
            for index, entry in enumerate(self._list((key,), given)):
                yield self._weight((key, index), entry)

    def run_state(self) -> str | None:
        """Return the source of the run state: by name, else the base model; None: the newest step."""
        values = self.file.values
        if len(self.sources) == 1:
            return next(iter(self.sources))
        if "run_state" in values:
            return self._model(("run_state",), values["run_state"])
        base = self._base()
        if base in self.sources:
            self.notes.append(f"run state (counters, schedule, random generators) is of base_model, {base}")
            return base
        return None

    def files(self) -> str | Path | None:
        """Return the place of configuration and tokenizer: ``files``, ``tokenizer_source`` or ``base_model``."""
        values = self.file.values
        tokenizer = values.get("tokenizer_source")
        if tokenizer == "union":
            raise UnsupportedError(
                f"{self.file.at(('tokenizer_source',))}: a union of tokenizers changes the rows of the embeddings; "
                "name one model"
            )
        for key, given in (("files", values.get("files")), ("tokenizer_source", tokenizer)):
            if given is not None and given != "base":
                path = path_of(self.file, (key,), given)
                return path if path in self.sources else recipe_path(path)
        base = self._base()
        if base is None or base in self.sources:
            return base
        self.notes.append(f"configuration and tokenizer files are of base_model, {base}")
        return recipe_path(base)

    def _base(self) -> str | None:
        given = self.file.values.get("base_model")
        return None if given is None else path_of(self.file, ("base_model",), given)

    def dtype(self) -> str | None:
        """Return the dtype of exported weights."""
        for key in ("out_dtype", "dtype"):
            given = self.file.values.get(key)
            if given is not None:
                with mistakes_at(self.file.at((key,))):
                    return parse_dtype(str(given))
        return None

    def _slice_source(self, loc: Loc, entry: Any, slices: int) -> tuple[str, int, int | None]:
        given = self._mapping(loc, entry, ("model", "layer_range", "parameters"))
        require_neutral(self.file, (*loc, "parameters"), given.get("parameters"))
        source, bounds = self._model(loc, given), given.get("layer_range")
        if bounds is None and slices == 1:
            return source, 0, None
        found = bounds if isinstance(bounds, list) and all(type(one) is int for one in bounds) else []
        if len(found) != 2 or not 0 <= found[0] <= found[1]:
            raise ConfigError(
                f"{self.file.at((*loc, 'layer_range'))}: `layer_range` must be two numbers, the first block and "
                f"the one after the last, such as [0, 8], not {bounds!r}"
            )
        return source, found[0], found[1]

    def _require_agreeing(self, blocks: int) -> None:
        """Raise ConfigError if slices without a block contradict the sources of the layers outside the blocks.

        LLMTailor writes such slices: number 0 stands for the norm, and those behind the blocks for head and embeddings,
        whose names and sources follow in ``pre_weights`` and ``post_weights``."""
        meant = {0: ("norm",), blocks + 1: ("lm_head", "embed"), blocks + 2: ("embed",)}
        for index, number, source in self._empty:
            named = [
                (key, position, entry)
                for key in ("pre_weights", "post_weights")
                if isinstance(entries := self.file.values.get(key), list)
                for position, entry in enumerate(entries)
                if isinstance(entry, dict) and any(one in str(entry.get("name")) for one in meant.get(number, ()))
            ]
            others = [(k, i) for k, i, entry in named if path_of(self.file, (k, i), entry) == source]
            if named and not others:
                key, position, _ = named[0]
                raise ConfigError(
                    f"{self.file.at(('slices', index))}: the empty slices[{index}] means "
                    f"{' or '.join(meant[number])} of {source}, but {key}[{position}] names another model; give "
                    "both the same model, or leave the empty slice out"
                )

    def _require_place(self, loc: Loc, first: int, end: int) -> None:
        if first == end:
            return
        problem = (
            f"{self.file.at(loc)}: slices[{loc[1]}] begins at block {first}, and the slices before end at block {end}"
        )
        if first > end:
            raise ConfigError(f"{problem}: blocks {end} to {first - 1} are in no slice; every block is needed once")
        raise UnsupportedError(
            f"{problem}: every block must be used once, at its own place, because optimizer state and schedule do not "
            "fit a model with repeated or reordered blocks; use MergeKit itself for weights alone"
        )

    def _weight(self, loc: Loc, entry: Any) -> Rule:
        given = self._mapping(loc, entry, ("name", "weight", "layer", "model", "source", "sources", "is_embed"))
        names = [given[key] for key in ("name", "weight", "layer") if key in given]
        if len(names) != 1 or not isinstance(names[0], str):
            raise ConfigError(f"{self.file.at(loc)}: {loc[0]}[{loc[1]}] needs a `name`, such as embed_tokens")
        return Rule(self._model(loc, given), Auxiliary(names[0]), f"{loc[0]}[{loc[1]}] ({self.file.at(loc)})")

    def _model(self, loc: Loc, given: Any) -> str:
        path = path_of(self.file, loc, given)
        if path not in self.sources:
            where, step = split_step(path)
            with mistakes_at(self.file.at(loc)):
                check_step(step)
            self.sources[path] = SourceRef(where, step)
        return path

    def _mapping(self, loc: Loc, value: Any, known: tuple[str, ...]) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise ConfigError(f"{self.file.at(loc)}: {name_of(loc)} must be a mapping with {', '.join(known)}")
        for key in value:
            if key not in known:
                raise ConfigError(unknown_key(f"{self.file.at((*loc, key))}: {name_of(loc)}", str(key), known))
        return value

    def _list(self, loc: Loc, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise ConfigError(f"{self.file.at(loc)}: {name_of(loc)} must be a list")
        return value


def _short_names(paths: Iterable[str]) -> dict[str, str]:
    """Return a name for each source: the last part of its path if that is unique."""
    ends = {path: path.rstrip("/").rpartition("/")[2] or path for path in paths}
    return {path: end if list(ends.values()).count(end) == 1 else path for path, end in ends.items()}
