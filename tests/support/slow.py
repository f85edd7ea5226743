"""Parameters of which the fast tests try one, and ``make test-all`` every other, too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def others_slow(values: Iterable[Any], fast: int = 1) -> list[Any]:
    """Return the parameters, all but the first ``fast`` of them marked as slow."""
    marked = []
    for place, value in enumerate(values):
        plain = value if hasattr(value, "marks") else pytest.param(*(value if isinstance(value, tuple) else (value,)))
        slow = pytest.param(*plain.values, marks=(*plain.marks, pytest.mark.slow), id=plain.id)
        marked.append(plain if place < fast else slow)
    return marked
