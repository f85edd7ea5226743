"""Check the names of the parameters that settings give a policy's class, against its signature. Values are not seen."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from store.errors import ConfigError
from store.text import suggestion


def check_parameters(policy: str, kind: type[Any], given: Mapping[str, Any]) -> None:
    """Check that a class can be called with the given parameters.

    A field of a dataclass whose metadata say ``setting: False`` cannot be given.

    Raises:
        ConfigError: a parameter is unknown, or one without a default is missing.
    """
    try:
        signature = _signature(kind)
    except (TypeError, ValueError):  # a class written in C may have none
        return
    try:
        signature.bind(**given)
    except TypeError as error:
        named = [
            one for one in signature.parameters.values() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        ]
        raise ConfigError(f"policy {policy}{_reason(str(error), [one.name for one in named], given)}") from error


def _signature(kind: type[Any]) -> inspect.Signature:
    signature = inspect.signature(kind)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    fixed = {one.name for one in fields if not one.metadata.get("setting", True)}
    return signature.replace(parameters=[one for one in signature.parameters.values() if one.name not in fixed])


def _reason(error: str, known: list[str], given: Mapping[str, Any]) -> str:
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None and not known:
        return f" takes no parameters, and {unknown!r} was given; remove it"
    if unknown is not None and "unexpected" in error:
        return f": unknown parameter {unknown!r}: {suggestion(unknown, known)} Known: {', '.join(known)}"
    rename = "; `name:` in the settings is the policy's own name: rename the parameter" if "'name'" in error else ""
    return f": {error}{rename}"
