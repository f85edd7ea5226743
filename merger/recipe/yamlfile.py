"""YAML files of recipes: plain values, and the line where each of them stands.

A key that is written twice is an error: YAML would keep the last one and say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from store.errors import ConfigError

Loc = Sequence[str | int]
"""Way to a value: keys of mappings and positions in lists."""


@dataclass(frozen=True)
class YamlFile:
    """One file. values: its mapping. name: as in messages."""

    name: str
    values: Mapping[str, Any]
    lines: Mapping[tuple[str | int, ...], int]

    def at(self, loc: Loc) -> str:
        """``FILE:LINE`` of a value, or of the nearest thing around it."""
        place = tuple(loc)
        while place and place not in self.lines:
            place = place[:-1]
        line = self.lines.get(place)
        return self.name if line is None else f"{self.name}:{line}"


def read_yaml(path: Path) -> YamlFile:
    """ConfigError where there is no such file, or it is no YAML mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the recipe {path} is not text: {error}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> YamlFile:
    """As :func:`read_yaml`, of the text of a file."""
    lines: dict[tuple[str | int, ...], int] = {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _walk(root, (), lines, name)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{name} is not YAML: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{name} must be a YAML mapping with `sources:`, or one as MergeKit has it, with `slices:`")
    return YamlFile(name, values, lines)


def _walk(node: yaml.Node, loc: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int], name: str) -> None:
    lines[loc] = node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*loc, index), lines, name)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in seen and key.value != "<<":
                where = ".".join(map(str, (*loc, key.value)))
                raise ConfigError(
                    f"{name}:{line}: {where!r} is written twice (first in line {seen[key.value]}); keep one of them"
                )
            seen[key.value] = line
            _walk(value, (*loc, key.value), lines, name)
            lines[(*loc, key.value)] = line
