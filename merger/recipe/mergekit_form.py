"""What a file in MergeKit's form may say: its keys, the parameters that change nothing, ranges and paths.

Only what can be known of one value by itself; what the values mean together is :mod:`merger.recipe.mergekit`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merger.recipe.records import folder, unknown_key
from store.config_file import Loc, YamlFile
from store.errors import ConfigError, UnsupportedError

_HARMLESS_PARAMETERS = ("int8_mask", "normalize", "rescale")
_NEUTRAL_PARAMETERS = ("weight", "scale", "density")
_ELSEWHERE = {
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
    """UnsupportedError for what would change weights, ConfigError for a key that MergeKit has not."""
    values = file.values
    method = values.get("merge_method", "passthrough")
    if method != "passthrough":
        raise UnsupportedError(
            f"{file.at(('merge_method',))}: merge_method {method!r} changes weights, and optimizer state would not fit "
            "them any more; only passthrough is carried out"
        )
    for key in values:
        if key in _ELSEWHERE:
            raise UnsupportedError(f"{file.at((key,))}: {key!r} is not carried out: {_ELSEWHERE[key]}")
        if key not in _KNOWN:
            raise ConfigError(unknown_key(file.at((key,)), key, _KNOWN))
    require_neutral(file, ("parameters",), values.get("parameters"))
    if "slices" not in values:
        raise ConfigError(
            f"{file.name}: a recipe in MergeKit's form needs `slices:`, each with a model and a layer_range"
        )


def require_neutral(file: YamlFile, loc: Loc, parameters: Any) -> None:
    """UnsupportedError, naming it, for a parameter that would change weights."""
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise ConfigError(f"{file.at(loc)}: {name_of(loc)} must be a mapping")
    for key, value in parameters.items():
        neutral = key in _NEUTRAL_PARAMETERS and not isinstance(value, bool) and value in (1, 1.0)
        if key not in _HARMLESS_PARAMETERS and not neutral:
            raise UnsupportedError(
                f"{file.at((*loc, key))}: parameter {key!r} ({value!r}) changes weights, and optimizer state would not "
                "fit them any more; leave it out"
            )


def names_model(given: Mapping[str, Any]) -> bool:
    """Whether a mapping names a model and nothing else, so that it is no mapping of layers to models."""
    return set(given) <= {"model", "source", "sources"}


def path_of(file: YamlFile, loc: Loc, given: Any) -> str:
    """The path in ``PATH``, ``{model: …}``, ``{source: …}``, ``{path: …}`` or ``{sources: [{model: …}]}``."""
    value = given
    while not isinstance(value, str):
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
            continue
        inner = [value[key] for key in ("model", "source", "sources", "path") if key in value] if value else []
        if not isinstance(value, dict) or len(inner) != 1:
            raise ConfigError(f"{file.at(loc)}: {name_of(loc)} must name one `model`, a directory (it is {given!r})")
        value = inner[0]
    if not value:
        raise ConfigError(f"{file.at(loc)}: {name_of(loc)} names no directory")
    return value


def split_step(path: str) -> tuple[Path | None, int | str | None]:
    """``PATH@STEP``, as MergeKit writes revisions, where there is no directory of that whole name."""
    where, at, step = path.rpartition("@")
    whole = folder(path)
    if not at or not where or not step or (whole is not None and whole.exists()):
        return whole, None
    return folder(where), int(step) if step.isascii() and step.isdigit() else step


def is_range(bounds: list[Any]) -> bool:
    """Whether it is the first block and the one after the last."""
    return (
        len(bounds) == 2
        and all(isinstance(one, int) and not isinstance(one, bool) for one in bounds)
        and 0 <= bounds[0] <= bounds[1]
    )


def name_of(loc: Loc) -> str:
    """A place in the file, as in ``slices[0].sources``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc).lstrip(".")
