"""Render the settings as a commented YAML file and as a JSON schema, for ``driftpoint init`` and the docs."""

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
"""Column at which comments begin."""

COMMON: Final = ("store", "every", "policy", "encoding", "staging", "memory", "metrics", "retention")
"""Settings that most jobs use, in the order in which they are shown."""

ADVANCED: Final = tuple(key for key in Config.model_fields if key not in COMMON)

_WRITTEN = ("store", "every", "policy")
"""Settings that a new file sets even if they have their default values."""

_HEAD = """\
# Settings of Driftpoint. `driftpoint doctor -c {name}` tries them on this machine.
# Lines that begin with # show defaults. To change one, remove its #, and that of its section.
"""


_LATER = "# After the first start, which makes the store, refuse to begin without it: store: {store}"


def documented(keys: Iterable[str]) -> str:
    """Return settings with their defaults and meanings, as docs/configuration.md shows them."""
    return "".join(f"{line}\n" for key in keys for line in _lines(key, None))


def written(values: Mapping[str, Any], name: str, *, schema: bool) -> str:
    """Return a configuration file: the common settings, then the advanced ones; defaults are commented out.

    Args:
        values: settings that the file sets.
        name: file name.
        schema: whether the file refers to a JSON schema in the same directory.
    """
    active = {key: getattr(Config(), key) for key in _WRITTEN} | dict(values)
    text = f"# yaml-language-server: $schema=./{SCHEMA_FILE}\n" if schema else ""
    text += _HEAD.format(name=name) + "\n"
    common = [line for key in COMMON for line in _lines(key, active)]
    if isinstance(active["store"], str):
        common.insert(1, _LATER.format(store=_yaml({"path": active["store"], "create": False})))
    text += "".join(f"{line}\n" for line in common)
    return text + "\n# Advanced\n\n" + "".join(f"{line}\n" for key in ADVANCED for line in _lines(key, active))


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file (draft 2020-12)."""
    schema = Config.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": TITLE}


def _lines(key: str, active: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the lines of a setting or section. Settings outside ``active`` are commented out; None: no setting is."""
    field = Config.model_fields[key]
    if active is not None and isinstance(field.default, BaseModel):
        yield ""
    yield from _setting(key, field, Config().model_dump() if active is None else active, "")


def _setting(key: str, field: FieldInfo, active: Mapping[str, Any], indent: str) -> Iterator[str]:
    mark = "" if key in active else "#"
    if not isinstance(field.default, BaseModel):
        value = _yaml(active.get(key, field.default))
        yield f"{f'{mark}{indent}{key}: {value}':<{_COLUMN - 1}} # {field.description}"
        return
    section = type(field.default)
    summary = " ".join((section.__doc__ or "").replace("``", "`").split()).removesuffix(".")
    yield f"{f'{mark}{indent}{key}:':<{_COLUMN - 1}} # {summary[0].lower()}{summary[1:]}"
    for name, inner in section.model_fields.items():
        yield from _setting(name, inner, active.get(key, {}), f"{indent}  ")


def _yaml(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    dumped: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return dumped.removesuffix("\n").removesuffix("\n...")
