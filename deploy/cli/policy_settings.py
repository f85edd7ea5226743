"""From what was typed to a policy, the settings that name it and the bounds around it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.asked import ANY
from policies.base import Policy
from policies.bounds import Bounds
from policies.own import anchored
from policies.select import policy_from
from store.config_file import parse_value
from store.errors import ConfigError, UsageError

_ODD_NUMBER = re.compile(r"[-+.]?\d")


@dataclass(frozen=True)
class Named:
    """A policy to look at. settings: as a configuration has them, with the path of its file made absolute."""

    policy: Policy
    settings: object
    bounds: Bounds = ANY


def named(word: str, given: Sequence[str]) -> Named:
    """The policy that ``word`` names: a built-in or registered one, a class, or the one of a YAML configuration.

    given: ``key=value``, the value as JSON or YAML has it. ConfigError or UsageError where that is no policy."""
    if word.endswith((".yaml", ".yml")):
        if given:
            raise UsageError(
                f"--set goes with a policy's name or class: {word} has its parameters in it, edit them there"
            )
        return _configured(Path(word))
    settings = anchored({"name": word, **parameters(given)} if given else word, Path.cwd())
    return Named(policy_from(settings), settings)  # type: ignore[arg-type]


def _configured(path: Path) -> Named:
    from monitor.config import load_config

    config = load_config(path)
    return Named(policy_from(config.policy), config.policy, config.limits())


def parameters(given: Sequence[str]) -> Mapping[str, Any]:
    """What ``--set`` gave: ``key=value`` each, the value as JSON or YAML has it. UsageError for anything else."""
    found: dict[str, Any] = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not equals or not key:
            raise UsageError(f"--set takes key=value, such as --set k=4, not {one!r}")
        if key == "name" or key in found:
            what = "is the policy itself, which is given as POLICY" if key == "name" else "was given twice"
            raise UsageError(f"--set {one}: {key!r} {what}")
        found[key] = _value(one, value)
    return found


def _value(one: str, text: str) -> Any:
    """JSON, in which 1e-3 is a number; else a YAML mapping or list, or a word."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    if _ODD_NUMBER.match(text):
        raise UsageError(
            f"--set {one}: write numbers as 12, 0.5 or 1e-3, and a text that begins with a digit as '\"1a\"'"
        )
    if not text.startswith(("{", "[")):
        return text
    try:
        return parse_value(text, "the value")
    except ConfigError as error:
        raise UsageError(f"--set {one}: neither JSON nor YAML: {error}") from error
