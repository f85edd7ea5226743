"""Names that settings choose from, and how a JSON schema says so. Knows no settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from policies.select import POLICIES
from store.encoding import BF16, BF16_INT8, INT8_BLOCK, INT8_SQRT_BLOCK
from store.encoding import ENCODINGS as BY_NAME
from store.names import WEIGHTS

ENCODINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "raw": {},
    "compact": {WEIGHTS: BF16, "exp_avg": INT8_BLOCK, "exp_avg_sq": INT8_SQRT_BLOCK},
    "careful": {WEIGHTS: BF16_INT8, "exp_avg": INT8_BLOCK, "exp_avg_sq": INT8_SQRT_BLOCK},
}
"""Names that stand for an encoding of each slot; slots that are not named are raw."""

SIGNALS: Final = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGXCPU")
"""Signals by which a job may be told of its end."""


def encodings_schema(schema: dict[str, Any]) -> None:
    """Have a JSON schema list the names of encodings, of all slots and of each."""
    schema["anyOf"] = [
        {"type": "string", "enum": list(ENCODINGS)},
        {"type": "object", "additionalProperties": {"type": "string", "enum": list(BY_NAME)}},
    ]


def policies_schema(schema: dict[str, Any]) -> None:
    """Have a JSON schema offer the policies by name, alone or with their parameters. Others are the user's."""
    name = {"anyOf": [{"enum": sorted(POLICIES)}, {"type": "string", "description": "my.py:Mine, or a registered one"}]}
    schema["anyOf"] = [name, {"type": "object", "properties": {"name": name}, "required": ["name"]}]
