"""Checks of single settings. What arrives here was typed by a user, so any type is possible.

Every message names the setting, what is allowed and what was given. ``where`` says whose setting it is, such
as ``policy parity``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from store.errors import ConfigError


def check_integer(where: str, name: str, value: object, least: int) -> None:
    """Raises ConfigError unless ``value`` is an integer >= ``least``. True and False are no integers here."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{where}: {name} must be an integer >= {least}, not {described(value)}")


def check_number(where: str, name: str, value: object) -> None:
    """Raises ConfigError unless ``value`` is a finite number >= 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
        raise ConfigError(f"{where}: {name} must be a finite number >= 0, not {described(value)}")


def check_one_of(where: str, name: str, value: object, allowed: Iterable[str]) -> None:
    """Raises ConfigError unless ``value`` is one of the words ``allowed``."""
    words = tuple(allowed)
    if value not in words:
        raise ConfigError(f"{where}: {name} must be {' or '.join(map(repr, words))}, not {described(value)}")


def described(value: object) -> str:
    """A value as an error message shows it; explains the one way in which YAML turns a number into text."""
    if isinstance(value, str) and _is_number(value):
        return f"the text {value!r} (YAML takes 1e-3 for text: write 1.0e-3, without quotes)"
    return repr(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
