"""Lists and counts in messages: a handful of things and how many more, a number and its noun."""

from __future__ import annotations

from collections.abc import Iterable


def listed(texts: Iterable[str], limit: int = 3, between: str = ", ") -> str:
    """The first of many, and how many more there are."""
    found = list(texts)
    more = len(found) - limit
    if more <= 0:
        return between.join(found)
    return f"{between.join(found[:limit])}{';' if between.startswith(';') else ''} and {more} more"


def counted(count: float, noun: str, nouns: str | None = None) -> str:
    """A number and its noun: ``1 rank``, ``2 ranks``. nouns: the plural where it is no mere ``s``."""
    number = str(count) if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun if count == 1 else nouns or noun + 's'}"
