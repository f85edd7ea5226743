"""A configuration file as plain values: safe, no key twice, and no number that is read as another than it seems."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from store.errors import ConfigError

_MISREAD = re.compile(r"[-+]?0[0-9_]+|.*:.*")
"""Numbers that YAML 1.1 takes for octal or sexagesimal ones."""


class _Loader(yaml.SafeLoader):
    """Plain values only, no number that YAML 1.1 takes for another one than it looks like, and no key twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Of a key that is there twice the first value, a whole section perhaps, would be dropped without a word."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    told = f"{key.value!r} is there twice: write it once, with all that belongs to it"
                    raise yaml.constructor.ConstructorError(None, None, told, key.start_mark)
                seen.add(key.value)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """``0100`` would be 64 (octal), ``10:00`` 600 (sexagesimal)."""
        return int(self._read_alike(node, super().construct_yaml_int(node)))

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        """``10:00.0`` would be 600."""
        return float(self._read_alike(node, super().construct_yaml_float(node)))

    def _read_alike(self, node: yaml.ScalarNode, taken: float) -> float:
        if _MISREAD.fullmatch(node.value) is None:
            return taken
        told = f"YAML takes {node.value} for {taken}: write it as a decimal number without leading zeros"
        raise yaml.constructor.ConstructorError(None, None, told, node.start_mark)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


def read_mapping(path: Path) -> Mapping[str, Any]:
    """The keys of a YAML file; none where it is empty. ConfigError where it cannot be read or is no mapping."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # a SafeLoader
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path} must be a YAML mapping such as `store: ./checkpoints`")
    return content
