"""YAML files of recipes: plain values, and the line where each of them stands.

Where YAML would say nothing and mean something else it is an error: a key that is written twice, of which the last one
counts, and a number such as 00000120 or 1:50, which is 80 (octal) or 110 (sexagesimal).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from store.errors import ConfigError

_LARGEST = 100_000
"""Values of a file, those that aliases repeat counted each time."""

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MISREAD = re.compile(r"[-+]?0[0-9_]+|.*:.*")
"""Numbers that YAML 1.1 takes for octal or sexagesimal ones, and everybody else for decimal ones or for a range."""

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
    walk = _Walk(name)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            walk.visit(root, ())
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{name} is not YAML: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{name} must be a YAML mapping with `sources:`, or one as MergeKit has it, with `slices:`")
    return YamlFile(name, values, walk.lines)


class _Walk:
    """Over all values of a file before any of them is made. lines: where each of them stands."""

    def __init__(self, name: str) -> None:
        self.lines: dict[tuple[str | int, ...], int] = {}
        self._name = name
        self._seen = 0

    def visit(self, node: yaml.Node, loc: tuple[str | int, ...]) -> None:
        """ConfigError for what YAML would take for something else, and where aliases repeat one another without end."""
        self.lines[loc] = node.start_mark.line + 1
        self._count(node)
        if isinstance(node, yaml.ScalarNode):
            self._require_read_alike(node)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.visit(item, (*loc, index))
        elif isinstance(node, yaml.MappingNode):
            self._visit_mapping(node, loc)

    def _visit_mapping(self, node: yaml.MappingNode, loc: tuple[str | int, ...]) -> None:
        seen: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            self._require_read_alike(key)
            line = key.start_mark.line + 1
            if key.value in seen and key.value != "<<":
                where = ".".join(map(str, (*loc, key.value)))
                raise ConfigError(
                    f"{self._name}:{line}: {where!r} is written twice (first in line {seen[key.value]}); keep one of "
                    "them"
                )
            seen[key.value] = line
            self.visit(value, (*loc, key.value))
            self.lines[(*loc, key.value)] = line

    def _count(self, node: yaml.Node) -> None:
        self._seen += 1
        if self._seen > _LARGEST:
            raise ConfigError(
                f"{self._name}:{node.start_mark.line + 1}: more than {_LARGEST} values, those that aliases (`*name`) "
                "repeat among them: write out what the recipe needs, once"
            )

    def _require_read_alike(self, node: yaml.ScalarNode) -> None:
        if node.tag not in _NUMBERS or _MISREAD.fullmatch(node.value) is None:
            return
        constructor = SafeConstructor()
        whole = node.tag == _NUMBERS[0]
        taken = constructor.construct_yaml_int(node) if whole else constructor.construct_yaml_float(node)
        raise ConfigError(
            f"{self._name}:{node.start_mark.line + 1}: YAML takes {node.value} for {taken}: write it as a decimal "
            f"number without leading zeros, or in quotes"
        )
