"""Write a configuration file from the models: every setting with its default and meaning, and the JSON schema.

``driftpoint init`` and docs/configuration.md show this text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from monitor.config.load import Config

SCHEMA_FILE: Final = "driftpoint.schema.json"
TITLE: Final = "Driftpoint configuration"

_COLUMN = 34
"""Where comments begin, in characters."""

COMMON: Final = ("store", "every", "policy", "encoding", "staging", "memory", "metrics", "retention")
"""Settings that most jobs look at, in the order in which they are shown."""

ADVANCED: Final = tuple(key for key in Config.model_fields if key not in COMMON)

_WRITTEN = ("store", "every", "policy")
"""Settings that a new file holds even where they are the defaults."""

_HEAD = """\
# Settings of Driftpoint. `driftpoint doctor -c {name}` tries them on this machine.
# Lines that begin with # show defaults. To change one, remove its #, and that of its section.
"""


def documented(keys: Iterable[str]) -> str:
    """Return settings with their defaults and meanings, as docs/configuration.md shows them."""
    return "".join(f"{line}\n" for key in keys for line in _lines(key, None))


def written(values: Mapping[str, Any], name: str, *, schema: bool) -> str:
    """Return a configuration file: the common settings, then the advanced ones; defaults are commented out.

    Args:
        values: settings that the file sets.
        name: of the file.
        schema: whether the schema for editors lies beside it.
    """
    told = {key: getattr(Config(), key) for key in _WRITTEN} | dict(values)
    text = f"# yaml-language-server: $schema=./{SCHEMA_FILE}\n" if schema else ""
    text += _HEAD.format(name=name) + "\n"
    text += "".join(f"{line}\n" for key in COMMON for line in _lines(key, told))
    return text + "\n# Advanced\n\n" + "".join(f"{line}\n" for key in ADVANCED for line in _lines(key, told))


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file (draft 2020-12)."""
    found = Config.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": TITLE}


def _lines(key: str, told: Mapping[str, Any] | None) -> Iterator[str]:
    """A setting, or a section with its own. told: what is not commented out, and its values; None: everything."""
    field = Config.model_fields[key]
    if told is not None and isinstance(field.default, BaseModel):
        yield ""
    yield from _shown(key, field, Config().model_dump() if told is None else told, "")


def _shown(key: str, field: FieldInfo, told: Mapping[str, Any], indent: str) -> Iterator[str]:
    if not isinstance(field.default, BaseModel):
        yield _line(f"{indent}{key}", told.get(key, field.default), field.description, shown=key in told)
        return
    section = type(field.default)
    yield _line(f"{indent}{key}", None, _said(section), shown=key in told, value_too=False)
    for name, one in section.model_fields.items():
        yield from _shown(name, one, told.get(key, {}), f"{indent}  ")


def _line(key: str, value: Any, comment: str | None, *, shown: bool, value_too: bool = True) -> str:
    setting = f"{'' if shown else '#'}{key}:{f' {_yaml(value)}' if value_too else ''}"
    return f"{setting:<{_COLUMN - 1}} # {comment}"


def _said(section: type[BaseModel]) -> str:
    text = " ".join((section.__doc__ or "").replace("``", "`").split()).removesuffix(".")
    return text[0].lower() + text[1:]


def _yaml(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    dumped: str = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return dumped.removesuffix("\n").removesuffix("\n...")
