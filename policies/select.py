"""From settings to a policy: ``{"name": "threshold", "threshold": 0.01}`` or just ``"full"``.

The parameters of a policy are the fields of its class, which checks their values itself; here only names are
matched. A name that is not ours is a class of the user's, see :mod:`policies.own`. Bounds are not a policy's setting:
see :func:`policies.bounds.bound`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from policies.base import Policy
from policies.budget import Budgeted
from policies.filter import Filter
from policies.full import Full
from policies.observe import Observe
from policies.own import own_policy
from policies.parameters import check_parameters
from policies.parity import Parity
from policies.setting import described
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

    Runs the user's code where the name is that of a class of theirs. Raises ConfigError: unknown name or parameter
    (the message names the nearest known one), a missing parameter, a senseless value (the message says what is
    allowed), and what :func:`policies.own.own_policy` raises.
    """
    name, parameters = _parts(settings)
    kind = POLICIES.get(name)
    if kind is None:
        return own_policy(name, parameters, taken=sorted(POLICIES))
    check_parameters(name, kind, parameters)
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
