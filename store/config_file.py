"""Read YAML files of settings and recipes with PyYAML's safe loader, and keep the line of every value.

A duplicate key is an error, because YAML keeps its last value only. So is a number that YAML 1.1 reads as octal or
sexagesimal: ``0100`` is 64 and ``10:00`` is 600. Objects of Python are never built."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from store.errors import ConfigError

_MAX_VALUES = 100_000  # values of one file, counted again for every alias that repeats them
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_OCTAL_OR_SEXAGESIMAL = re.compile(r"[-+]?0[0-9_]+|.*:.*")

Loc = Sequence[str | int]  # Path to a value: keys of mappings and positions in lists


@dataclass(frozen=True)
class YamlFile:
    """A YAML mapping and where its values stand."""

    name: str  # of the file, as messages show it
    values: Mapping[str, Any]  # the mapping
    lines: Mapping[tuple[str | int, ...], int]  # line number by path to the value, counted from 1

    def at(self, loc: Loc) -> str:
        """Return ``FILE:LINE`` of a value, or of the nearest value around it."""
        path = tuple(loc)
        while path and path not in self.lines:
            path = path[:-1]
        line = self.lines.get(path)
        return self.name if line is None else f"{self.name}:{line}"


def read_yaml(path: Path, kind: str = "configuration") -> YamlFile:
    """Read a YAML mapping; an empty file is an empty mapping. ``kind``: of file, for messages.

    Raises ConfigError if the file cannot be read, or is not a YAML mapping whose keys are text."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the {kind} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: the file is not text in UTF-8: {error}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> YamlFile:
    """Parse a YAML mapping, as :func:`read_yaml` reads it."""
    values, lines = _load(text, name)
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{name} must be a YAML mapping: lines of `key: value`")
    return YamlFile(name, values, lines)


def parse_value(text: str, name: str) -> Any:
    """Parse any YAML value. Raises ConfigError as :func:`read_yaml` does."""
    return _load(text, name)[0]


def _load(text: str, name: str) -> tuple[Any, Mapping[tuple[str | int, ...], int]]:
    checker = _Checker(name)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None, {}
        checker.visit(root, ())
        return loader.construct_document(root), checker.lines
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{name} is not YAML: {error}") from error


class _Checker:
    """Checks all nodes of a document before any value is built, and records their lines."""

    def __init__(self, name: str) -> None:
        self.lines: dict[tuple[str | int, ...], int] = {}
        self._name = name
        self._visited = 0

    def visit(self, node: yaml.Node, loc: tuple[str | int, ...]) -> None:
        """Check a node and all below it. Raises ConfigError."""
        self.lines[loc] = node.start_mark.line + 1
        self._visited += 1
        if self._visited > _MAX_VALUES:
            raise ConfigError(
                f"{self._at(node)}: more than {_MAX_VALUES} values, counting those that aliases (`*name`) repeat: "
                "write out what is needed, once"
            )
        if isinstance(node, yaml.ScalarNode):
            self._check_number(node)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.visit(item, (*loc, index))
        elif isinstance(node, yaml.MappingNode):
            self._visit_mapping(node, loc)

    def _visit_mapping(self, node: yaml.MappingNode, loc: tuple[str | int, ...]) -> None:
        first: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            self._check_number(key)
            line = key.start_mark.line + 1
            if key.value in first and key.value != "<<":
                dotted = ".".join(map(str, (*loc, key.value)))
                raise ConfigError(
                    f"{self._at(key)}: {dotted!r} is written twice (first in line {first[key.value]}): write it once, "
                    "with everything that belongs to it"
                )
            first[key.value] = line
            self.visit(value, (*loc, key.value))
            self.lines[(*loc, key.value)] = line

    def _check_number(self, node: yaml.ScalarNode) -> None:
        if node.tag not in (_INT, _FLOAT) or _OCTAL_OR_SEXAGESIMAL.fullmatch(node.value) is None:
            return
        safe = SafeConstructor()
        number = safe.construct_yaml_int(node) if node.tag == _INT else safe.construct_yaml_float(node)
        raise ConfigError(
            f"{self._at(node)}: YAML takes {node.value} for {number}: write it as a decimal number without leading "
            "zeros, or in quotes"
        )

    def _at(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}"
