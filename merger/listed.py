"""Lists in messages: a handful, and how many more there are."""

from __future__ import annotations

from collections.abc import Iterable


def listed(texts: Iterable[str], limit: int = 3, between: str = ", ") -> str:
    """The first of many, and how many more there are."""
    found = list(texts)
    more = len(found) - limit
    if more <= 0:
        return between.join(found)
    return f"{between.join(found[:limit])}{';' if between.startswith(';') else ''} and {more} more"
