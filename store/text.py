"""Format lists, counts and suggestions for messages."""

import difflib
from collections.abc import Iterable


def listed(items: Iterable[object], limit: int = 3, between: str = ", ", rest: str = "more") -> str:
    """Return the first items as text, and how many there are beyond them. ``rest``: noun of these."""
    texts = [str(item) for item in items]
    beyond = len(texts) - limit
    if beyond <= 0:
        return between.join(texts)
    return f"{between.join(texts[:limit])}{';' if between.startswith(';') else ''} and {beyond} {rest}"


def counted(count: float, noun: str, nouns: str | None = None) -> str:
    """Return a number and its noun: ``1 rank``, ``2 ranks``. nouns: the plural, where it is not formed with ``s``."""
    number = str(count) if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun if count == 1 else nouns or noun + 's'}"


def suggestion(word: str, known: Iterable[str], cutoff: float = 0.0) -> str:
    """Return the question ``did you mean ...?`` about the nearest known word; empty where none reaches ``cutoff``."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"did you mean {found[0]!r}?" if found else ""
