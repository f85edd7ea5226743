"""Validate our own form of recipe files; errors name the line and the nearest known key."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic

from merger.recipe.model import SourceRef, parse_dtype
from merger.recipe.sources import step_bound
from store.config_file import YamlFile
from store.errors import ConfigError, UsageError
from store.location import place_of
from store.text import listed, suggestion

EVERY = "(all)"  # key of `auxiliary` for all auxiliary layers
Text = Annotated[pydantic.StrictStr, pydantic.StringConstraints(min_length=1)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | int) else value


def _step(value: Any) -> int | str | None:
    if isinstance(value, str) and value.strip():
        text = value.strip()
        return int(text) if text.isascii() and text.isdigit() else text
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ValueError(f"a step must be a number, a save's name, a tag or a bound such as '<= 120', not {value!r}")


Texts = Annotated[tuple[Text, ...], pydantic.BeforeValidator(_as_list), pydantic.Field(min_length=1)]  # one or several
Ranges = Annotated[
    tuple[Annotated[str, pydantic.StringConstraints(pattern=r"^\d+(-\d+)?$")], ...],
    pydantic.BeforeValidator(lambda given: given if isinstance(given, dict) else [str(one) for one in _as_list(given)]),
    pydantic.Field(min_length=1),
]

Step = Annotated[int | str | None, pydantic.PlainValidator(_step)]


class Section(pydantic.BaseModel):
    """Base of all sections: frozen, without unknown keys. ``sections``: those in a file, by the key above them."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    sections: ClassVar[Mapping[str, "type[Section]"]] = {}


_Section = TypeVar("_Section", bound=Section)


class SourceSection(Section):
    """An entry of ``sources``."""

    path: Text | None = None
    step: Step = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class TakeSection(Section):
    """An entry of ``take``: parts of the model, and the source that they come from."""

    source: Text = pydantic.Field(alias="from")
    layers: Texts | None = None
    blocks: Ranges | None = None
    parameters: Texts | None = None
    regex: Texts | None = None
    but: Texts | None = pydantic.Field(default=None, alias="except")

    @pydantic.model_validator(mode="after")
    def _one_kind(self) -> "TakeSection":
        given = [kind for kind in ("layers", "blocks", "parameters", "regex") if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(
                "an entry of `take` needs one of `layers`, `blocks`, `parameters`, `regex`"
                + (f", and has {' and '.join(given)}: write an entry for each" if given else "")
            )
        return self


class RecipeFile(Section):
    """A recipe in our own form."""

    sections: ClassVar = {"sources": SourceSection, "take": TakeSection}

    sources: dict[Text, SourceSection] = {}
    take: tuple[TakeSection, ...] = ()
    parity: Annotated[tuple[Text, ...], pydantic.Field(min_length=2)] | None = None
    auxiliary: Annotated[
        dict[Text, Text] | None,
        pydantic.BeforeValidator(lambda value: {EVERY: value} if isinstance(value, str) else value),
    ] = None
    rest: Text | None = None
    run_state: Text | None = None
    files: Text | None = None
    dtype: Text | None = None


def validate(file: YamlFile, kind: type[_Section]) -> _Section:
    """Return the file's values. ConfigError lists everything that is wrong with them."""
    try:
        return kind.model_validate(dict(file.values))
    except pydantic.ValidationError as error:
        texts = dict.fromkeys(_message(file, kind, item) for item in error.errors())
        raise ConfigError(listed(texts, 3, "; ")) from error


def source_at(where: str, path: Path | None, step: int | str | None) -> SourceRef:
    """Build a source. ConfigError, naming the place ``where`` in the recipe, for an invalid bound."""
    try:
        step_bound(step)
    except UsageError as error:
        raise ConfigError(f"{where}: {error}") from error
    return SourceRef(path, step)


def dtype_at(where: str, text: str | None) -> str | None:
    """Return the safetensors name of an export dtype. ConfigError, naming the place ``where``, for any other."""
    try:
        return None if text is None else parse_dtype(text)
    except UsageError as error:
        raise ConfigError(f"{where}: {error}") from error


def recipe_path(path: str | None) -> Path | None:
    """Return a path of a recipe: relative to the current directory, with ``~`` expanded."""
    return None if path is None else place_of(path).expanduser()


def _message(file: YamlFile, kind: type[Section], item: Any) -> str:
    loc, where = item["loc"], file.at(item["loc"])
    if item["type"] == "extra_forbidden":
        above = next((kind.sections[step] for step in map(str, reversed(loc[:-1])) if step in kind.sections), kind)
        key, known = str(loc[-1]), [field.alias or name for name, field in above.model_fields.items()]
        return f"{where}: unknown key {key!r}: {suggestion(key, known)} Known here: {', '.join(sorted(known))}"
    name = ".".join(str(step) for step in loc)
    if item["type"] == "missing":
        return f"{where}: {name} is missing"
    message = item["msg"].removeprefix("Value error, ")
    message = (message[:1].lower() + message[1:]).replace("dictionary", "mapping")
    shown = "" if item["type"] == "value_error" else f" (it is {item['input']!r})"
    return f"{where}: {name}: {message}{shown}"
