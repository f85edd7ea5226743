"""What a policy's class can be called with, and whether what settings give it fits. Names only, never values."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policies.setting import nearest
from store.errors import ConfigError


@dataclass(frozen=True)
class Parameters:
    """names: in the order declared. required: those without a default. open: any other name is taken too."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    open: bool = False


def parameters_of(kind: type[Any]) -> Parameters:
    """The fields of a dataclass, but for those whose metadata say that they are no ``setting``; of another class, the
    parameters of calling it."""
    if dataclasses.is_dataclass(kind):
        fields = [one for one in dataclasses.fields(kind) if one.init and one.metadata.get("setting", True)]
        required = [
            one.name
            for one in fields
            if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        ]
        return Parameters(tuple(one.name for one in fields), tuple(required))
    try:
        called = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):  # a class made in C tells nothing
        return Parameters((), (), open=True)
    named = [one for one in called if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return Parameters(
        tuple(one.name for one in named),
        tuple(one.name for one in named if one.default is one.empty),
        any(one.kind is one.VAR_KEYWORD for one in called),
    )


def check_parameters(policy: str, kind: type[Any], given: Mapping[str, Any]) -> None:
    """Raises ConfigError for a parameter that the class does not take, or one that it needs and is not given."""
    known = parameters_of(kind)
    for key in given if not known.open else ():
        if not known.names:
            raise ConfigError(f"policy {policy} takes no parameters, and {key!r} was given; remove it")
        if key not in known.names:
            raise ConfigError(
                f"policy {policy}: unknown parameter {key!r}: did you mean {nearest(key, known.names)!r}? "
                f"Known: {', '.join(known.names)}"
            )
    for name in known.required:
        if name == "name":
            raise ConfigError(
                f"policy {policy}: a parameter cannot be called 'name', which says what policy it is: rename it, or "
                "give it a default"
            )
        if name not in given:
            raise ConfigError(f"policy {policy}: parameter {name!r} is missing; it has no default")
