"""From settings to a policy: ``{"name": "threshold", "threshold": 0.01}`` or just ``"full"``.

The parameters of a policy are the fields of its class, which checks their values itself; here only names are
matched. Bounds are not a policy's setting: see :func:`policies.bounds.bound`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from policies.base import Policy
from policies.budget import Budgeted
from policies.filter import Filter
from policies.full import Full
from policies.observe import Observe
from policies.parity import Parity
from policies.setting import described, nearest
from policies.threshold import Threshold
from store.errors import ConfigError

POLICIES: Mapping[str, type[Any]] = MappingProxyType(
    {
        "budget": Budgeted,
        "filter": Filter,
        "full": Full,
        "observe": Observe,
        "parity": Parity,
        "threshold": Threshold,
    }
)
"""Every policy that settings can name. Each is a frozen dataclass; its fields are its parameters, but for those
whose metadata say that they are not ``setting``."""


def policy_from(settings: Mapping[str, Any] | str) -> Policy:
    """The policy that the settings describe: a name, or a mapping with ``name`` and the parameters.

    Raises ConfigError: unknown name or parameter (the message names the nearest known one), a missing
    parameter, a senseless value (the message says what is allowed).
    """
    name, parameters = _parts(settings)
    kind = POLICIES.get(name)
    if kind is None:
        raise ConfigError(
            f"unknown policy {name!r}: did you mean {nearest(name, POLICIES)!r}? Known: {', '.join(sorted(POLICIES))}"
        )
    _check_names(name, kind, parameters)
    if isinstance(parameters.get("inner"), str | Mapping):
        parameters["inner"] = policy_from(parameters["inner"])
    elif "inner" in parameters:
        raise ConfigError(f"policy {name}: inner must be a policy, such as full, not {described(parameters['inner'])}")
    policy: Policy = kind(**parameters)
    return policy


def _parts(settings: object) -> tuple[str, dict[str, Any]]:
    if isinstance(settings, str):
        return settings, {}
    if not isinstance(settings, Mapping):
        raise ConfigError(
            "policy must be a name, or a mapping such as {name: parity, k: 2}, "
            f"not {described(settings)}; known names: {', '.join(sorted(POLICIES))}"
        )
    name = settings.get("name")
    if not isinstance(name, str):
        found = "it has none" if name is None else f"not {described(name)}"
        raise ConfigError(f"policy needs a name ({found}); known: {', '.join(sorted(POLICIES))}")
    return name, {str(key): value for key, value in settings.items() if key != "name"}


def _check_names(name: str, kind: type[Any], parameters: Mapping[str, Any]) -> None:
    fields = [one for one in dataclasses.fields(kind) if one.metadata.get("setting", True)]
    known = [one.name for one in fields]
    for key in parameters:
        if not known:
            raise ConfigError(f"policy {name} takes no parameters, and {key!r} was given; remove it")
        if key not in known:
            raise ConfigError(
                f"policy {name}: unknown parameter {key!r}: did you mean {nearest(key, known)!r}? "
                f"Known: {', '.join(known)}"
            )
    for one in fields:
        required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if required and one.name not in parameters:
            raise ConfigError(f"policy {name}: parameter {one.name!r} is missing; it has no default")
